"""Tables: CSV, NumPy's arrays, Parquet."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from tests.faults import payloads
from tests.faults.hostile_files.case import Case, endless, lay
from tests.faults.watch import CANARY


def tables() -> Iterator[Case]:
    for name, content in payloads.pickles().items():
        yield Case(f"table.csv that is a pickle, {name}", "table", lay("table.csv", content))
        yield Case(f"table.npy of objects, {name}", "table", lay("table.npy", payloads.npy(content)))
        members = {"X.npy": payloads.npy(content), "y.npy": payloads.npy(content)}
        yield Case(f"table.npz of objects, {name}", "table", lay("table.npz", payloads.npz(members)))
    for ending in ("npy", "npz", "parquet", "tsv", "pt", "pkl", "data"):
        content = payloads.pickles()["system"]
        yield Case(f"table.{ending} that is a pickle", "table", lay(f"table.{ending}", content))
    yield Case(
        "table.npy, a pickle under an array's magic",
        "table",
        lay("table.npy", b"\x93NUMPY" + payloads.pickles()["exec"]),
    )
    lies = {
        "of 2**40 rows": {"descr": "'<f8'", "shape": "(1099511627776, 2)"},
        "of 2**62 rows": {"descr": "'<f8'", "shape": f"({2**62},)"},
        "of 10**30 rows": {"descr": "'<f8'", "shape": f"({10**30}, 2)"},
        "of -1 rows": {"descr": "'<f8'", "shape": "(-1, 2)"},
        "whose header is code": {"descr": f"__import__('{CANARY}')"},
        "whose shape is code": {"descr": "'<f8'", "shape": f"(exec('import {CANARY}'),)"},
        "of records of objects": {"descr": "[('a', '|O'), ('b', '<f8')]"},
        "of a type of 2**31 bytes": {"descr": "'|V2147483647'"},
        "of an unknown type": {"descr": f"'{CANARY}'"},
        "of a deep header": {"descr": "(" * 3000 + "1" + ")" * 3000},
        "of wrong order": {"descr": "'<f8'", "order": f"'{CANARY}'"},
    }
    for name, values in lies.items():
        content = payloads.npy(bytes(64), **values)  # type: ignore[arg-type]
        yield Case(f"table.npy {name}", "table", lay("table.npy", content))
        yield Case(f"table.npz {name}", "table", lay("table.npz", payloads.npz({"X.npy": content})))
    for name, shape in {"a million columns": (1, 10**6), "no rows of 2**40 columns": (0, 2**40)}.items():
        content = payloads.npy(bytes(min(10**6, shape[0] * shape[1])), descr="'|u1'", shape=str(shape))
        yield Case(f"table.npy of {name}", "table", lay("table.npy", content))
    head = payloads.npy(b"", descr="'<f8'", shape=f"({300 * 2**17}, 1)")
    yield Case(
        "table.npz of 300 MB in 300 kB",
        "table",
        lay("table.npz", lambda: payloads.zip_bomb("X.npy", 300, start=head)),
    )
    yield Case(
        "table.npz whose member is no array",
        "table",
        lay("table.npz", lambda: payloads.zip_bomb("X.npy", 200)),
    )
    outside = {f"../../{CANARY}.npy": payloads.npy(b""), "/etc/x.npy": payloads.npy(b"")}
    yield Case("table.npz with names outside", "table", lay("table.npz", payloads.npz(outside)))
    yield Case("table.npz, a zip of nothing", "table", lay("table.npz", payloads.npz({})))
    yield Case("table.npz cut short", "table", lay("table.npz", payloads.npz({"X.npy": bytes(999)})[:-30]))

    def huge_parquet(folder: Path, _: Path) -> Path:
        column = pa.array(np.zeros(2**20))
        schema = pa.schema([(name, pa.float64()) for name in "abcdefgh"])
        with parquet.ParquetWriter(folder / "table.parquet", schema) as writer:
            for _ in range(12):
                writer.write_table(pa.table({name: column for name in "abcdefgh"}, schema))
        return folder / "table.parquet"

    yield Case("table.parquet of 800 MB in few", "table", huge_parquet)
    yield Case(
        "table.parquet whose footer lies",
        "table",
        lay("table.parquet", b"PAR1" + bytes(64) + struct.pack("<I", 2**31 - 1) + b"PAR1"),
    )
    yield Case(
        "table.parquet of noise",
        "table",
        lay("table.parquet", b"PAR1" + payloads.random_bytes(4000) + struct.pack("<I", 3900) + b"PAR1"),
    )
    for ending in ("csv", "jsonl", "npy", "npz", "parquet"):
        yield from endless(f"table.{ending}", "table", f"table.{ending}")
    yield Case("table.csv of gzip", "table", lay("table.csv", lambda: payloads.gzip_bomb(50)))
    yield Case("table.csv of a zip", "table", lay("table.csv", lambda: payloads.zip_bomb("table.csv", 50)))
    yield Case("table.csv of a million columns", "table", lay("table.csv", b"," * 1_000_000 + b"\n"))
    yield Case("table.csv of an open quote", "table", lay("table.csv", b'a,b\n1,"' + b"x\n" * 500_000))
    yield Case("table.csv of zero bytes", "table", lay("table.csv", bytes(1_000_000)))
    yield Case(
        "table.csv of formulas",
        "table",
        lay("table.csv", b"a,b,kind\n" + b"=cmd|' /C calc'!A0,2,x\n1,2,y\n" * 40),
        refused=False,
    )
