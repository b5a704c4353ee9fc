"""All hostile files, by theme."""

from __future__ import annotations

from tests.faults.hostile_files.case import Case
from tests.faults.hostile_files.documents import configs
from tests.faults.hostile_files.images import images, scenes
from tests.faults.hostile_files.packed import packed
from tests.faults.hostile_files.runs import runs
from tests.faults.hostile_files.tables import tables
from tests.faults.hostile_files.tensors import tensors
from tests.faults.hostile_files.texts import labels, pairs, texts, tokens, writers


def cases() -> list[Case]:
    of_text = [*texts(), *tokens(), *pairs(), *labels(), *writers()]
    return [*tables(), *tensors(), *images(), *scenes(), *of_text, *configs(), *runs(), *packed()]
