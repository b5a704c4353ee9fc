"""Which backend is taken, and what is said where a kernel cannot run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quire.errors import InputError
from quire.functional import additive_attention, gaussian_pooling, nadaraya_watson
from quire.kernels import refusal, use_triton


def skip_if_interpreted() -> None:
    triton = sys.modules.get("triton")
    if triton is not None and triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter takes tensors on the CPU")


def test_a_kernel_refuses_tensors_on_the_cpu() -> None:
    skip_if_interpreted()
    query, key, value, vector = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5, 2), torch.randn(3)
    for run in (
        lambda: additive_attention(query, key, value, vector, backend="triton"),
        lambda: gaussian_pooling(query, key, value, backend="triton"),
        lambda: nadaraya_watson(query, key, value, backend="triton"),
    ):
        with pytest.raises(InputError, match="a tensor on cpu with backend='triton'") as caught:
            run()
        assert "tensors on a CUDA device" in caught.value.expected
        assert "backend='auto'" in caught.value.fix


def test_auto_needs_a_reason_for_the_kernel_and_none_against_it() -> None:
    assert use_triton("auto", "")
    assert not use_triton("auto", "", worth=False)
    assert not use_triton("auto", "a tensor on cpu")
    assert not use_triton("torch", "")
    assert use_triton("triton", "", worth=False)
    with pytest.raises(InputError, match="did you mean 'triton'"):
        use_triton("tritn", "")
    with pytest.raises(InputError, match="no Triton with backend='triton'"):
        use_triton("triton", "no Triton")


def test_reasons() -> None:
    skip_if_interpreted()
    assert refusal(torch.ones(1, device="meta")) == "a tensor on meta"


@pytest.mark.gpu
def test_reasons_on_the_gpu() -> None:
    pytest.importorskip("triton")
    there = torch.ones(1, device="cuda")
    assert refusal(there, there.half(), there.bfloat16()) == ""
    assert refusal(there, there.double()) == "a tensor of type torch.float64"
    assert refusal(there, there.cpu()) == "a tensor on cpu"


def test_plain_pytorch_never_imports_triton() -> None:
    program = (
        "import sys, torch; from quire.functional import additive_attention, gaussian_pooling\n"
        "before = 'triton' in sys.modules\n"
        "q = torch.randn(300, 8); additive_attention(q, q, q, q[0]); gaussian_pooling(q, q, q)\n"
        "assert before or 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
