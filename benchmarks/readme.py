"""Puts the newest results into README's table.

python -m benchmarks.readme           rewrite the table
python -m benchmarks.readme --check   exit with 1 where README has another
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from quire.bench.table import markdown

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks -->\n", "<!-- end of benchmarks -->\n"
CASES = 2
"""Of a subject on a machine, at most; the files have all."""
AMONG_THEMSELVES = {"guard"}
"""Subjects without a peer but Quire itself, which are left to the files."""
MACHINES = {"h200": "one H200", "amd-epyc-2-cores": "two CPU cores"}


def newest() -> dict[tuple[str, str], dict[str, Any]]:
    """The last result of each subject on each machine."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted((HERE / "results").glob("*.json")):
        if "-growth-" in path.name:
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["subject"] in AMONG_THEMSELVES:
            continue
        prefix = f"{content['date']}-{content['subject']}-"
        machine = path.stem.removeprefix(prefix)
        found[machine, content["subject"]] = content
    return found


def table() -> str:
    rows = []
    for (machine, _), content in sorted(newest().items(), reverse=True, key=lambda item: item[0][0]):
        name = MACHINES.get(machine, machine)
        rows += [(name, outcome) for outcome in content["outcomes"][:CASES]]
    return markdown(rows)


def with_table(text: str) -> str:
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table()}\n{END}{after}"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    made = with_table(text)
    if "--check" in sys.argv[1:]:
        return int(made != text)
    README.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
