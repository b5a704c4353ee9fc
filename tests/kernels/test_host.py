"""The library of loops in C++: that it is there, and what is done where it is not."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path
from sysconfig import get_config_var

import pytest
import torch

from quire.functional import mixture_chunks, moves, tally
from quire.functional.nearest import cluster_sums
from quire.kernels import host
from tests.kernels.widths import limited


def test_where_there_is_a_compiler_there_is_a_library() -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    assert host.library() is not None


def test_structures_are_those_of_the_loops() -> None:
    with limited("plain"):
        library = host.library()
        assert library is not None
        assert library.quire_sweep_size() == ctypes.sizeof(tally._Sweep)
        assert library.quire_move_size() == ctypes.sizeof(moves._Move) + ctypes.sizeof(moves._Part)
        assert library.quire_mixture_size() == ctypes.sizeof(mixture_chunks._Mixture)
    folder = Path(host.__file__).parent
    exported = "".join(path.read_text() for path in folder.glob("*.cpp"))
    names = set(re.findall(r"^EXPORT \w+ (quire_\w+)\(", exported, re.MULTILINE))
    assert names == {*host.FUNCTIONS, "quire_host_version"}


def test_without_it_everything_is_computed_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "library", lambda: None)
    x, centres = torch.randn(500, 3), torch.randn(4, 3).double()
    assert not tally.takes(x, centres)
    found = cluster_sums(x, centres)
    assert torch.equal(found.labels, torch.cdist(x.double(), centres).argmin(1))


def test_a_file_that_is_no_library_of_this_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited("plain"):
        monkeypatch.setattr(host, "VERSION", -1)
        host.library.cache_clear()
        try:
            assert host.library() is None
            (tmp_path / f"_host{get_config_var('EXT_SUFFIX')}").write_bytes(b"no library")
            monkeypatch.setattr(host, "__file__", str(tmp_path / "__init__.py"))
            host.library.cache_clear()
            assert host.library() is None
        finally:
            monkeypatch.undo()
            host.library.cache_clear()
