"""What a process does behind one's back: an audit hook that notes programs, sockets, foreign code and files
written outside of a folder; and the peak of memory over a stretch of work.

An audit hook stays for the life of its process, so this is for processes of their own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

CANARY = "quire_canary"
"""Foreign code, modules and files of the tests carry this word."""
STARTS = ("subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "pty.spawn")
SPEAKS = ("socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.")
UNPICKLES = ("pickle.find_class", "marshal.loads")
CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "shutil.",
)
OWN = tuple(
    str(Path(folder).resolve())
    for folder in {*sysconfig.get_paths().values(), sys.base_prefix, Path(__file__).parents[2] / "quire"}
)
COMPILER = "/torchinductor_"
"""A folder that PyTorch's compiler makes as soon as it is imported, by torch.export for example."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Notes what happens while it is `on`. `inside` is the folder that may be written to."""

    def __init__(self) -> None:
        self.on = False
        self.inside = Path("/nowhere")
        self.secrets: tuple[str, ...] = ()
        """Files that may not be read either."""
        self.notes: list[str] = []
        sys.addaudithook(self._hear)

    @contextmanager
    def over(self, inside: Path, *secrets: Path) -> Iterator[list[str]]:
        self.notes, self.inside = [], inside.resolve()
        self.secrets = tuple(str(path.resolve()) for path in secrets)
        self.on = True
        try:
            yield self.notes
        finally:
            self.on = False

    def _hear(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event.startswith((*STARTS, *SPEAKS)):
            self.notes.append(f"{event} {values!r:.200}")
        elif event in UNPICKLES:
            if event != "marshal.loads" and not self._by_python(values):
                self.notes.append(f"{event} {values!r:.200}")
        elif event == "import":
            if CANARY in str(values[0]):
                self.notes.append(f"import of {values[0]}")
        elif event == "exec":
            code = values[0]
            foreign = isinstance(code, CodeType) and not code.co_filename.startswith((*OWN, "<"))
            if foreign or CANARY in repr(getattr(code, "co_consts", "")) + repr(
                getattr(code, "co_names", "")
            ):
                self.notes.append(f"exec of {code!r:.200}")
        elif event == "open":
            self._opened(*values)
        elif event.startswith(CHANGES):
            for value in values:
                if isinstance(value, str | bytes | os.PathLike) and not self._allowed(os.fsdecode(value)):
                    self.notes.append(f"{event} {values!r:.200}")

    @staticmethod
    def _by_python(values: tuple[Any, ...]) -> bool:
        """Copying an object asks for these by their names, without any file."""
        return values[:2] in {("copyreg", "_reconstructor"), ("copyreg", "__newobj__")}

    def _opened(self, path: Any, mode: str | None, flags: int) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path))
        if flags & WRITES and not self._allowed(name):
            self.notes.append(f"open for writing {name}")
        if self.secrets and os.path.realpath(name) in self.secrets:
            self.notes.append(f"open of {name}")

    def _allowed(self, path: str) -> bool:
        real = os.path.realpath(path)
        return real.startswith((str(self.inside), "/dev/", "/proc/")) or COMPILER in real


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """A list whose one entry is, at the end, by how many bytes resident memory rose above its beginning."""
    import pyarrow as pa  # not before the watch is set up: what imports do is watched as well

    grown: list[int] = []
    gc.collect()  # what is kept for later use would hide what is used
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest value so far is forgotten
    before = status("VmRSS")
    try:
        yield grown
    finally:
        grown.append(max(0, status("VmHWM") - before))
