"""The pages of the board, one a file: each a function from what there is to see to markup."""
