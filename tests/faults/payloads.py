"""Content made to do harm: pickles that run programs, tensors that lie about where they are, files that grow.

Nothing here is harmful if it should run after all: what it would do is leave a note in a folder.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.watch import CANARY


class Call:
    """Pickles as the call of a function by its name."""

    def __init__(self, function: Callable[..., Any], *values: Any) -> None:
        self.function, self.values = function, values

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.values


def pickles() -> dict[str, bytes]:
    """What would start a program, run or import code, speak, or write, in several protocols."""
    import importlib
    import os
    import socket
    import subprocess
    import webbrowser

    calls = {
        "system": Call(os.system, f"touch {CANARY}.ran"),
        "exec": Call(exec, f"open('{CANARY}.ran', 'w')"),
        "eval": Call(eval, f"open('{CANARY}.ran', 'w')"),
        "import": Call(importlib.import_module, CANARY),
        "popen": Call(subprocess.Popen, ["touch", f"{CANARY}.ran"]),
        "socket": Call(socket.create_connection, ("127.0.0.1", 9)),
        "write": Call(open, f"{CANARY}.ran", "w"),
        "browse": Call(webbrowser.open, "http://127.0.0.1:9/"),
    }
    made = {
        name: pickle.dumps(call, protocol)
        for (name, call), protocol in zip(calls.items(), itertools.cycle([0, 2, 4]), strict=False)
    }
    made["stacked"] = pickle.dumps([calls["system"], {"state_dict": calls["exec"]}], 5)
    made["by hand"] = f"cos\nsystem\n(S'touch {CANARY}.ran'\ntR.".encode()
    return made


def torch_zip(content: bytes, name: str = "archive/data.pkl") -> bytes:
    """A file as torch.save writes them, with this as its pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return file.getvalue()


def npy(content: bytes, *, descr: str = "'|O'", shape: str = "(1,)", order: str = "False") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin1") + content


def npz(members: dict[str, bytes], *, compressed: bool = False) -> bytes:
    file = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def zip_bomb(name: str, megabytes: int, *, start: bytes = b"") -> bytes:
    """A member of zeros that deflates to a thousandth."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        member.write(start)
        for _ in range(megabytes):
            member.write(bytes(2**20))
    return file.getvalue()


def gzip_bomb(megabytes: int, start: bytes = b"") -> bytes:
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb") as member:
        member.write(start)
        for _ in range(megabytes):
            member.write(bytes(2**20))
    return file.getvalue()


# Tensors ----------------------------------------------------------------------------------------


def safetensors(header: Any, content: bytes = bytes(64), *, length: int | None = None) -> bytes:
    """A file with this header, as an object or as bytes, and this content; `length` is what it says the
    header's is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def entry(start: int = 0, end: int = 16, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape,
            "data_offsets": [start, end]}  # fmt: skip


def bad_tensors() -> dict[str, bytes]:
    """Files of tensors that no reader may believe."""
    one = entry()
    twice = b'{"a":' + json.dumps(one).encode() + b',"a":' + json.dumps(entry(16, 32)).encode() + b"}"
    made = {
        "empty": b"",
        "seven bytes": bytes(7),
        "header of no length": safetensors(b"", length=0),
        "header of 2**63 bytes": safetensors({"a": one}, length=2**63),
        "header of 2**64-1 bytes": safetensors({"a": one}, length=2**64 - 1),
        "header of 100 MB": safetensors({"a": one}, length=100_000_000),
        "header past the end": safetensors({"a": one}, length=4096),
        "header cut short": safetensors({"a": one}, length=20),
        "no JSON": safetensors(b"tensors"),
        "JSON of another kind": safetensors([1, 2]),
        "not UTF-8": safetensors(b'{"\xff\xfe":' + json.dumps(one).encode() + b"}"),
        "deep JSON": safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "overlapping": safetensors({"a": entry(0, 16), "b": entry(8, 24)}),
        "the same place": safetensors({"a": entry(0, 16), "b": entry(0, 16)}),
        "beyond the end": safetensors({"a": entry(0, 2**40, (2**38,))}),
        "at 2**62": safetensors({"a": entry(2**62, 2**62 + 16)}),
        "reversed": safetensors({"a": entry(16, 0)}),
        "negative": safetensors({"a": entry(-16, 0)}),
        "a hole": safetensors({"a": entry(0, 16), "b": entry(32, 48)}),
        "trailing bytes": safetensors({"a": one}, bytes(4096)),
        "too few bytes": safetensors({"a": one}, bytes(3)),
        "unknown dtype": safetensors({"a": entry(dtype="F33")}),
        "dtype that imports": safetensors({"a": entry(dtype=f"{CANARY}.F32")}),
        "dtype of another width": safetensors({"a": entry(dtype="F64")}),
        "negative shape": safetensors({"a": entry(shape=(-4,))}),
        "shape that overflows": safetensors({"a": entry(shape=(2**62, 2**62, 16))}),
        "shape of text": safetensors({"a": entry(shape="4")}),
        "shape of a million": safetensors({"a": entry(0, 64, tuple([1] * 1_000_000))}),
        "offsets of text": safetensors({"a": {**one, "data_offsets": ["0", "16"]}}),
        "no offsets": safetensors({"a": {"dtype": "F32", "shape": [4]}}),
        "one name twice": safetensors(twice),
        "metadata of numbers": safetensors({"__metadata__": {"format": 7}, "a": one}),
        "metadata that is a list": safetensors({"__metadata__": [], "a": one}),
    }
    return made


# Images -----------------------------------------------------------------------------------------


def png(
    width: int, height: int, *, depth: int = 8, colour: int = 2, rows: int = 0, extra: bytes = b""
) -> bytes:
    """A PNG of zeros; with fewer `rows` than it says. `extra` chunks come before the pixels."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    line = bytes(1 + (width * depth * channels + 7) // 8)
    packer = zlib.compressobj(9)
    block = max(1, 2**22 // len(line))
    packed, left = b"", rows or height
    while left:
        packed += packer.compress(line * min(left, block))
        left -= min(left, block)
    packed += packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    palette = chunk(b"PLTE", bytes(3 * 256)) if colour == 3 else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + palette
        + extra
        + chunk(b"IDAT", packed)
        + chunk(b"IEND", b"")
    )


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def swollen_png(kind: bytes, start: bytes) -> bytes:
    """A small image beside which lies something that unpacks to 100 MB."""
    return png(16, 16, extra=chunk(kind, start + zlib.compress(bytes(100 * 2**20))))


def bad_images() -> dict[str, tuple[str, bytes | Callable[[], bytes]]]:
    """Name of the file and content: images of few bytes that say they are large, or grow when read."""
    gif = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
    gif += b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0x80) + bytes(6) + b"\x02\x02\x4c\x01\0;"
    bmp = (
        b"BM"
        + struct.pack("<IHHI", 100, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 2**30, 2**30, 1, 24, 0, 0, 0, 0, 0, 0)
    )
    tiff = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 4)
    for tag, value in ((256, 10**6), (257, 10**6), (258, 8), (262, 1)):
        tiff += struct.pack("<HHII", tag, 4, 1, value)
    return {
        "a billion pixels, 1 bit": ("bomb.png", lambda: png(40_000, 30_000, depth=1, colour=0, rows=100)),
        "99 million pixels, 1 bit": ("bomb.png", lambda: png(9_900, 9_999, depth=1, colour=0)),
        "60 million pixels, palette": ("bomb.png", lambda: png(10_000, 6_000, colour=3)),
        "60 million pixels, colours": ("bomb.png", lambda: png(10_000, 6_000)),
        "60 million pixels, alpha": ("bomb.png", lambda: png(10_000, 6_000, colour=6)),
        "60 million pixels, 16 bits": ("bomb.png", lambda: png(10_000, 6_000, depth=16, colour=0)),
        "more rows than there are": ("bomb.png", lambda: png(9_000, 9_000, rows=10)),
        "2**31 pixels wide": ("bomb.png", png(2**31 - 1, 1, depth=1, colour=0, rows=1)[:200]),
        "text of 100 MB": ("bomb.png", lambda: swollen_png(b"zTXt", b"k\0\0")),
        "international text of 100 MB": ("bomb.png", lambda: swollen_png(b"iTXt", b"k\0\1\0\0\0")),
        "profile of 100 MB": ("bomb.png", lambda: swollen_png(b"iCCP", b"p\0\0")),
        "GIF of 4 billion pixels": ("bomb.gif", gif),
        "BMP of 2**60 pixels": ("bomb.bmp", bmp + bytes(46)),
        "TIFF of 10**12 pixels": ("bomb.tiff", tiff + bytes(8)),
        "TIFF whose tags go in a circle": ("bomb.tiff", tiff + struct.pack("<I", 8)),
        "PPM of 10**10 pixels": ("bomb.ppm", b"P6 100000 100000 255\n" + bytes(100)),
        "PPM with a long number": ("bomb.ppm", b"P6 " + b"9" * 100_000 + b" 1 255\n"),
        "PGM cut short": ("bomb.pgm", b"P5 9000 9000 255\n" + bytes(100)),
        "EPS, which is a program": (
            "bomb.png",
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n",
        ),
        "WEBP cut short": (
            "bomb.webp",
            b"RIFF\xff\xff\xff\x7fWEBPVP8X\n\0\0\0\x10\0\0\0\xff\xff\xff\xff\xff\xff",
        ),
    }


# Documents --------------------------------------------------------------------------------------


def bad_toml() -> dict[str, bytes]:
    deep = 20_000
    return {
        "deep arrays": b"a = " + b"[" * deep + b"]" * deep,
        "deep tables": b"a = " + b"{a=" * deep + b"1" + b"}" * deep,
        "dotted key": b".".join([b"a"] * 5_000) + b" = 1",
        "dotted table": b"[" + b".".join([b"a"] * 5_000) + b"]\nx = 1",
        "number of 100 000 digits": b"a = " + b"9" * 100_000,
        "not UTF-8": b'a = "\xff\xfe"',
        "zero bytes": bytes(1000),
        "key twice": b"a = 1\na = 2",
        "open string": b'a = """' + b"x" * 100_000,
        "a million keys": b"".join(b"k%d = 1\n" % i for i in range(100_000)),
        "wrong escape": b'a = "\\U99999999"',
        "no value": b"format =",
    }


def bad_json() -> dict[str, bytes]:
    deep = 200_000
    return {
        "deep arrays": b"[" * deep + b"]" * deep,
        "deep objects": b'{"a":' * deep + b"1" + b"}" * deep,
        "deep and open": b"[" * deep,
        "number of 100 000 digits": b'{"format": ' + b"9" * 100_000 + b"}",
        "not UTF-8": b'{"a": "\xff"}',
        "not JSON": b"{format: 1}",
        "a list": b"[1, 2, 3]",
        "a number": b"1e999",
        "null": b"null",
        "many empty lists": b"[" + b"[]," * 300_000 + b"[]]",
    }


def laughing(element: str) -> bytes:
    """XML of one element whose text is a word a billion times, by entities of entities."""
    words = "".join(f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefghi", "bcdefghij", strict=True))
    head = f"<?xml version='1.0'?><!DOCTYPE {element} [<!ENTITY a 'ha'>{words}]>"
    return f"{head}<{element}>&j;</{element}>".encode()


def random_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(count)
