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


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def four_times_the_sum(x, out, SIZE: tl.constexpr):
    tl.store(out, tl.sum(doubled(doubled(tl.load(x + tl.arange(0, SIZE)))), 0))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs the interpreter")
def test_the_language_is_interpreted_in_each_launch_and_in_no_other_place() -> None:
    interpreter.mend()
    load, x, out = tl.load, torch.arange(8.0), torch.empty(1)
    for factor in (1.0, 2.0):
        four_times_the_sum[(1,)](factor * x, out, SIZE=8)
        assert out.item() == 4 * factor * 28
        assert tl.load is load
