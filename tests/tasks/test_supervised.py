"""A supervised task is the same after it was written down and read again."""

from __future__ import annotations

import json

import torch

from quire.models import MLP, MLPConfig
from quire.tasks.supervised import Categorical, Gaussian, Supervised
from quire.train.task import build_task


def test_heads_keep_their_order_through_json() -> None:
    torch.manual_seed(0)
    heads = {"zebra": Categorical(3), "ant": Gaussian(1), "mole": Categorical(2)}
    task = Supervised(MLP(MLPConfig(in_features=4, out_features=6, hidden=(5,))), heads).eval()
    again = build_task(json.loads(json.dumps(task.spec(), sort_keys=True))).eval()
    again.load_state_dict(task.state_dict())
    x = torch.randn(7, 4)
    answers, others = task.predict(x), again.predict(x)
    assert list(answers) == list(others)
    for name, value in answers.items():
        torch.testing.assert_close(others[name], value)
