"""The shape of the code: who imports whom, how long a file is, and what is never done."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "quire").rglob("*.py"))
FOLDERS = ("quire", "tests", "benchmarks", "examples")
EVERY_FILE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

BASE = {"errors", "registry", "options", "files"}
BELOW_RECIPES = {
    "functional",
    "nn",
    "models",
    "backprop",
    "kernels",
    "tuning",
    "data",
    "train",
    "tasks",
    "estimators",
    "doctor",
}
ALLOWED = {
    "__main__": {"cli"},
    "errors": set(),
    "files": {"errors"},
    "registry": {"errors"},
    "options": {"errors"},
    "functional": BASE | {"kernels"},
    "nn": BASE | {"functional"},
    "models": BASE | {"nn", "functional"},
    "backprop": BASE | {"functional", "nn", "models"},
    "tuning": BASE | {"functional", "nn", "models"},
    "data": BASE,
    "train": BASE | {"data", "functional", "nn"},
    "tasks": BASE | {"models", "nn", "functional", "train", "data", "backprop", "tuning"},
    "estimators": BASE | {"tasks", "train", "models", "nn", "data", "functional"},
    "kernels": BASE,
    "doctor": BASE | {"data", "functional", "train"},
    "report": BASE | {"data"},
    "recipes": BASE | BELOW_RECIPES | {"report"},
    "export": BASE | BELOW_RECIPES,
    "runs": BASE | BELOW_RECIPES | {"recipes", "report", "export"},
    "sheet": BASE | BELOW_RECIPES | {"recipes", "report", "runs", "export"},
    "bench": BASE | BELOW_RECIPES | {"recipes", "report"},
    "board": BASE | BELOW_RECIPES | {"recipes", "report", "runs", "export", "sheet"},
    "cli": BASE | BELOW_RECIPES | {"recipes", "report", "runs", "export", "sheet", "board", "bench"},
}
"""What each part of quire/ may import besides itself."""


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "quire").parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, also inside functions; `from a import b` gives a.b.

    Imports for the type checker alone never run, and are left out.
    """
    unseen: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unseen.update(node.body)
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def wrong_directions(source: str, path: Path) -> list[str]:
    part = part_of(path)
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    found = []
    for line, name in imported_modules(ast.parse(source), package):
        words = name.split(".")
        if words[0] != "quire" or len(words) < 2 or words[1] in ("__version__", part):
            continue
        if words[1] not in ALLOWED[part]:
            found.append(f"{name_of(path)}:{line} imports {name}")
    return found


def test_every_part_has_a_place() -> None:
    parts = {part_of(path) for path in SOURCES} - {"__init__"}
    assert parts <= set(ALLOWED), f"say in ALLOWED what {parts - set(ALLOWED)} may import"


def test_the_directions_have_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, below in ALLOWED.items() if part not in done and below <= done}
        assert ready, f"a cycle among {set(ALLOWED) - done}"
        done |= ready


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    if path != ROOT / "quire" / "__init__.py":
        assert wrong_directions(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize(
    "source", ["import quire.models.mlp", "from quire import tasks", "def f():\n    from ..models import mlp"]
)
def test_a_wrong_direction_is_noticed(source: str) -> None:
    assert wrong_directions(source, ROOT / "quire" / "train" / "step.py")


def test_no_file_is_too_long_to_read() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in EVERY_FILE}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "importlib", "runpy"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "ctypes.CDLL"}
FORBIDDEN_NAMES = {"torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def dangers(source: str) -> list[str]:
    """Where a file could make data into code: unpickling, eval, an import by name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{node.lineno}: import {m}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = given.get("allow_pickle") == "False" and name != "torch.load"
            # PyTorch's restricted reader makes tensors and containers, and refuses everything else.
            safe = safe or (name == "torch.load" and given.get("weights_only") == "True")
            if name in FORBIDDEN_CALLS or (name in FORBIDDEN_NAMES and not safe):
                found.append(f"{node.lineno}: {name}(…)")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_read_is_ever_executed(path: Path) -> None:
    found = dangers(path.read_text(encoding="utf-8"))
    if path.name == "__init__.py":  # a package may load its own modules, from a closed list, on first use
        found = [line for line in found if not line.endswith("import importlib")]
    if path.match("quire/bench/*.py"):  # which peers are installed, and in which version
        found = [line for line in found if not line.endswith(("importlib.util", "importlib.metadata"))]
    if path.match("quire/kernels/host/__init__.py"):  # what was compiled when Quire was installed
        found = [line for line in found if not line.endswith("ctypes.CDLL(…)")]
    if path.match("quire/cli/objects.py"):  # the user's own word on the command line, never a file's
        found = [line for line in found if "importlib" not in line]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, allow_pickle=False)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
        "ctypes.CDLL(path)",
        "import importlib",
    ],
)
def test_a_danger_is_noticed(source: str) -> None:
    assert dangers(source)


def test_what_is_safe_is_allowed() -> None:
    assert dangers("model.eval()\ntorch.compile(model)\nnp.load(path, allow_pickle=False)") == []
    assert dangers("torch.load(path, weights_only=True)") == []


def test_test_folders_are_packages() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_recipes_and_command_load_without_pytorch() -> None:
    heavy = ("torch", "numpy", "sklearn", "pyarrow", "matplotlib")
    commands = [f"quire.cli.{path.stem}" for path in (ROOT / "quire" / "cli").glob("[!_]*.py")]
    program = f"import sys, quire.recipes, {', '.join(commands)}; print(*({set(heavy)} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


TRAINING = """
import sys
import torch
from quire.data.batch import TensorData
from quire.models.mlp import MLP, MLPConfig
from quire.nn.heads import Categorical
from quire.options import Train
from quire.tasks.supervised import Supervised
from quire.train import fit

task = Supervised(MLP(MLPConfig(2, 2, hidden=(3,), dropout=0.5)), Categorical(2))
data = TensorData({"inputs": torch.randn(8, 2), "target": torch.arange(8) % 2})
fit(task, data, data, epochs=1, train=Train(batch_size=4))
print(*({"sympy", "torch._dynamo", "torch.onnx", "sklearn"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_training_loads_none_of_the_libraries_that_take_long() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tasks", "models"])
def test_what_a_file_registers_is_known_to_whoever_imports_its_folder(part: str) -> None:
    """A run is read by name in a process that has not trained it."""
    names = [
        f"quire.{part}.{path.stem}"
        for path in (ROOT / "quire" / part).glob("[!_]*.py")
        if ".register(" in path.read_text(encoding="utf-8")
    ]
    program = f"import sys, quire.{part}; print(*({set(names)} - set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert names
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
