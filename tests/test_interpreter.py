"""Triton's interpreter computes with bf16 as a GPU does: in fp32, rounded once."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from deltalab.kernels import interpreter  # noqa: E402


@triton.jit
def kernel(x, y, dot, total, less, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(dot + at, tl.dot(a, b))
    tl.store(total + at, a * b + a)
    tl.store(less + at, (a < b).to(tl.float32))
    tl.store(count + at, tl.dot((a < b).to(tl.bfloat16), (3 * (a < b)).to(tl.bfloat16)))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs the interpreter")
def test_bf16_is_computed_in_fp32() -> None:
    interpreter.mend()
    x, y = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    dot, total, less, count = torch.empty(16, 16), torch.empty_like(x), torch.empty(16, 16), torch.empty(16, 16)
    kernel[(1,)](x, y, dot, total, less, count, SIZE=16)
    torch.testing.assert_close(dot, x.float() @ y.float())
    torch.testing.assert_close(total, x * y + x, rtol=2**-7, atol=2**-7)
    assert torch.equal(less.bool(), x < y)
    chosen = (x < y).float()
    torch.testing.assert_close(count, chosen @ (3 * chosen))
