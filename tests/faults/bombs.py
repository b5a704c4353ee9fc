"""Files of few bytes that want much room: of kinds that a size in a header does not give away, and packed
ones within what is allowed, which may take the room that they say they need and no more.
"""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from PIL import Image

from tests.faults import payloads

MEGABYTE = 2**20
UNPACKED = 64 * MEGABYTE
"""What the packed files hold that are within bounds."""
SIDE = 64
PACKED_IMAGES = UNPACKED // SIDE**2


def texts(folder: Path) -> Path:
    """One text of a megabyte in 600 rows; the file has it once for every ten."""
    rows = pa.table({"a": ["x" * MEGABYTE] * 10, "b": np.arange(10.0)})
    with parquet.ParquetWriter(folder / "table.parquet", rows.schema, compression="zstd") as writer:
        for _ in range(60):
            writer.write_table(rows)
    return folder / "table.parquet"


def categories(folder: Path) -> Path:
    """The same as what pandas calls categories."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 600, pa.int32()), pa.array(["x" * MEGABYTE]))
    table = pa.table({"a": column, "b": np.arange(600.0)})
    parquet.write_table(table, folder / "table.parquet", compression="zstd")
    return folder / "table.parquet"


def nothing(folder: Path) -> Path:
    """A hundred million texts, none of which is there."""
    column = pa.nulls(10_000_000, pa.string())
    schema = pa.schema([("a", pa.string()), ("b", pa.string())])
    with parquet.ParquetWriter(folder / "table.parquet", schema) as writer:
        for _ in range(10):
            writer.write_table(pa.table({"a": column, "b": column}, schema))
    return folder / "table.parquet"


def lists(folder: Path) -> Path:
    """Lists, which no table of numbers has, of a hundred million empty ones."""
    column = pa.array([[]], pa.list_(pa.int8())).take(pa.array(np.zeros(10_000_000, np.int64)))
    with parquet.ParquetWriter(folder / "table.parquet", pa.schema([("a", column.type)])) as writer:
        for _ in range(10):
            writer.write_table(pa.table({"a": column}))
    return folder / "table.parquet"


def progressive_jpeg(side: int) -> bytes:
    """All of a progressive image is kept until its last scan is read, at whatever size it is asked for."""
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "JPEG", progressive=True, quality=1)
    return file.getvalue()


def packed_tensor() -> bytes:
    """What torch.save writes of 300 MB of zeros, packed, which torch.save does not do."""
    import torch

    plain = io.BytesIO()
    torch.save({"a": torch.zeros(75 * MEGABYTE)}, plain)
    made = io.BytesIO()
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    return made.getvalue()


def shared_tensor() -> bytes:
    """A tensor of a terabyte by its strides, over a storage of four bytes."""
    import torch

    file = io.BytesIO()
    torch.save({"a": torch.zeros(1).expand(2**38)}, file)
    return file.getvalue()


# Packed, but not beyond what is allowed ---------------------------------------------------------


def part_random(size: int, noisy: int = 40) -> bytes:
    """Packs to a fortieth, or another part."""
    noise = payloads.random_bytes(size // noisy)
    return noise + bytes(size - len(noise))


def packed_array() -> bytes:
    rows = UNPACKED // 256
    head = payloads.npy(b"", descr="'<f4'", shape=f"({rows}, 64)")
    file = io.BytesIO()
    values = np.zeros((rows, 64), np.float32)
    values[: rows // 40] = np.random.default_rng(0).random((rows // 40, 64))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", head + values.tobytes())
    return file.getvalue()


def packed_idx() -> bytes:
    header = bytes([0, 0, 8, 3]) + struct.pack(">III", PACKED_IMAGES, SIDE, SIDE)
    return gzip.compress(header + part_random(UNPACKED), 1)


def packed_png() -> bytes:
    rows = UNPACKED // 4 // 10_000  # four bytes a pixel are what decoding takes
    pixels = np.frombuffer(part_random(rows * 10_000, 10), np.uint8).reshape(rows, 10_000)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()
