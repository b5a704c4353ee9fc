"""The board: a local page over a folder of runs, the sheet, explanations and instruments. It only reads.

    app.py          which address is answered by what
    guard.py        what every answer carries, and what is refused before anything is looked at
    runs.py         the runs of a folder, read again only where they changed
    metrics.py      curves that are read on from where the last look ended, and thinned for a picture
    layout.py       many records of one form read at once
    worker.py       a second process with PyTorch, in which proofs, instruments and the doctor run
    markup.py       HTML in which everything is escaped unless it was made here
    formula.py      MathML from LaTeX
    pages/          one page a file
    instruments/    one instrument a file, and one registration
    static/         the style sheet and the scripts, as they are sent

The server itself never imports PyTorch: it starts at once and stays small however many runs there are.
"""

from __future__ import annotations
