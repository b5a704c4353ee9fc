"""Options."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults import payloads
from tests.faults.hostile_files.case import Case, lay
from tests.faults.hostile_files.runs import in_run
from tests.faults.watch import CANARY


def configs() -> Iterator[Case]:
    for name, content in payloads.bad_toml().items():
        yield Case(f"options.toml: {name}", "config", lay("options.toml", content))
        yield Case(f"config.toml of a run: {name}", "run", in_run("config.toml", content))
    for name in ("system", "exec"):
        content = payloads.pickles()[name]
        yield Case(f"options.toml that is a pickle, {name}", "config", lay("options.toml", content))
        yield Case(f"config.toml that is a pickle, {name}", "run", in_run("config.toml", content))
    yaml = f"!!python/object/apply:os.system ['touch {CANARY}.ran']\n".encode()
    yield Case("options.yaml that calls", "config", lay("options.yaml", yaml))
    lines = b"a: &a [x, x]\n" + b"".join(
        b"%c: &%c [*%c, *%c]\n" % (i + 1, i + 1, i, i) for i in range(97, 117)
    )
    yield Case("options.yaml that laughs", "config", lay("options.yaml", lines))
    for number, line in enumerate(
        (
            f'device = "{CANARY}"',
            f'optim.name = "{CANARY}:make"',
            f'"__class__" = "{CANARY}"',
            f"model.activation = \"__import__('{CANARY}')\"",
            "optim = 3",
            "seed = -1",
            "optim.lr = nan",
            "model.hidden = [[1], [2]]",
            "data = 5",
            "train.batch_size = 1e9",
        )
    ):
        yield Case(f"options.toml with a bad value, {number}", "config", lay("options.toml", line.encode()))
