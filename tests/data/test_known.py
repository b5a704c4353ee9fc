"""Known sets are fetched from a server of the test's own, and nothing is kept that is not as it should be."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import struct
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from quire.data import known
from quire.data.images import load_images
from quire.data.images.cifar import CIFAR_10, PIXELS
from quire.data.images.idx import IMAGES_NAME
from quire.data.known import KNOWN, KnownSet, Part, download
from quire.errors import InputError, QuireError

Files = dict[str, bytes]


@pytest.fixture
def served() -> Iterator[tuple[str, Files]]:
    """Address and files of a server on this machine. What is called "cut" ends early, and "slow" is never
    sent."""
    files: Files = {}
    never = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            if name.startswith("slow"):
                never.wait(20)
            if name not in files:
                self.send_error(404)
                return
            self.send_response(200)
            if name.startswith("cut"):
                self.send_header("Content-Length", str(2 * len(files[name])))
            self.end_headers()
            self.wfile.write(files[name])

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", files
    never.set()
    server.shutdown()
    server.server_close()


def part(name: str, content: bytes, **changed: object) -> Part:
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} | changed
    return Part(name, **facts)  # type: ignore[arg-type]


def idx(values: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return gzip.compress(head + values.astype(np.uint8).tobytes())


def digits() -> Files:
    generator = np.random.default_rng(0)
    found = {}
    for name, rows in (("train", 30), ("t10k", 10)):
        found[f"{name}-images-idx3-ubyte.gz"] = idx(generator.integers(0, 256, (rows, 8, 8)))
        found[f"{name}-labels-idx1-ubyte.gz"] = idx(np.arange(rows) % 10)
    return found


def archive(members: Files) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def add(monkeypatch: pytest.MonkeyPatch, sources: list[str], *parts: Part) -> None:
    monkeypatch.setitem(KNOWN._entries, "tiny", KnownSet("a few", "lenet", tuple(sources), parts))


def test_a_set_of_several_files_can_be_read(
    served: tuple[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, files = served
    files |= digits()
    seen: dict[str, int] = {}
    add(monkeypatch, [address], *(part(name, content) for name, content in files.items()))
    folder = download("tiny", tmp_path / "data" / "tiny", lambda name, done, whole: seen.update({name: done}))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert seen == {name: len(content) for name, content in files.items()}
    found = load_images(folder)
    assert found.test is not None
    assert len(found.test) == 10
    with pytest.raises(InputError, match="is there already"):
        download("tiny", folder)


def test_of_an_archive_only_what_is_known_is_taken(
    served: tuple[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, files = served
    rows = {name: np.zeros((40, 1 + PIXELS), np.uint8) for name in ("data_batch_1.bin", "test_batch.bin")}
    for content in rows.values():
        content[:, 0] = np.arange(40) % 10
    wanted = {f"inside/{name}": content.tobytes() for name, content in rows.items()}
    files["set.tar.gz"] = archive({"../outside": b"x", "/outside": b"x", **wanted, "inside/other": b"y"})
    members = tuple((name, len(content)) for name, content in wanted.items())
    add(monkeypatch, [address], part("set.tar.gz", files["set.tar.gz"], members=members))
    folder = download("tiny", tmp_path / "tiny")
    assert sorted(path.name for path in folder.iterdir()) == sorted(rows)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert load_images(folder).test is not None

    wrong = tuple((name, size + 1) for name, size in members)
    add(monkeypatch, [address], part("set.tar.gz", files["set.tar.gz"], members=wrong))
    with pytest.raises(QuireError, match=r"holds inside/data_batch_1.bin with 122920 bytes"):
        download("tiny", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


CONTENT = b"what it should be" * 10_000
WRONG = {
    "other bytes": ("a", CONTENT[:-1] + b"!", r"it has the SHA-256 [0-9a-f]{64}"),
    "fewer bytes": ("a", CONTENT[:-1], "169,999 bytes came"),
    "more bytes": ("a", CONTENT + b"!", "more than 170,000 bytes came"),
    "no such file": ("b", b"", "Not Found"),
    "a connection that is cut": ("cut", CONTENT[:5000], "5,?000 bytes"),
    "a server that says nothing": ("slow", CONTENT, "timed out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_as_it_should_be_leaves_nothing(
    name: str, served: tuple[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "SILENCE", 0.5)
    address, files = served
    file, content, said = WRONG[name]
    files[file] = content
    asked = "a" if file == "b" else file
    files.pop("b", None)
    add(monkeypatch, [address], part(asked, CONTENT))
    with pytest.raises(QuireError, match=said) as caught:
        download("tiny", tmp_path / "new" / "here" / "tiny")
    assert address + asked in str(caught.value)
    assert caught.value.exit_code == 1
    assert not list(tmp_path.iterdir())


def test_the_next_source_is_tried(
    served: tuple[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, files = served
    files |= {"a": CONTENT, "wrong/a": b"no"}
    nobody = "http://127.0.0.1:9/"
    add(monkeypatch, [nobody, address + "wrong/", address], part("a", CONTENT))
    assert (download("tiny", tmp_path / "tiny") / "a").read_bytes() == CONTENT
    add(monkeypatch, [nobody, address + "wrong/"], part("a", CONTENT))
    with pytest.raises(QuireError, match=r"9/a: .*; http.*wrong/a: 2 bytes came"):
        download("tiny", tmp_path / "other")


def test_a_disk_that_cannot_be_written_to_is_no_fault_of_the_connection(
    served: tuple[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, files = served
    files["a"] = CONTENT
    add(monkeypatch, [address], part("a", CONTENT))

    def full(name: str, done: int, whole: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(QuireError, match=r"tiny cannot be written: No space left on device"):
        download("tiny", tmp_path / "tiny", full)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", KNOWN)
def test_known_sets_are_such_as_the_readers_know(name: str) -> None:
    for part in KNOWN[name].parts:
        assert re.fullmatch("[0-9a-f]{64}", part.sha256)
        members = [member.rpartition("/")[2] for member, _ in part.members]
        if members:
            assert {CIFAR_10.test, CIFAR_10.names} < set(members)
            assert sum(Path(member).match(CIFAR_10.train) for member in members) == 5
        else:
            assert IMAGES_NAME.fullmatch(part.name) or "labels-idx1" in part.name
    assert all(source.startswith("http") and source.endswith("/") for source in KNOWN[name].sources)


def test_who_names_a_set_that_is_not_there_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("fashion-mnist", "data/fashion-mnist"):
        with pytest.raises(InputError) as caught:
            load_images(Path(path))
        wanted = "quire download fashion-mnist data/fashion-mnist, then --data data/fashion-mnist"
        assert caught.value.fix == wanted
