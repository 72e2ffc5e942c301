"""The kernel of SwiGLU against fp64, interpreted or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from deltalab.kernels.step import swiglu as kernels
from deltalab.kernels.step.swiglu import swiglu
from deltalab.models import block as models
from deltalab.ops.backends import available

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERRORS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The largest error over the size of what is summed; Triton's interpreter truncates where a GPU rounds to bf16."""


def plain(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_right(x: Tensor, d_y: Tensor) -> None:
    exact = x.double().requires_grad_()
    wanted = plain(exact)
    (d_x,) = torch.autograd.grad(wanted, exact, d_y.double())
    given = x.to(DEVICE).requires_grad_()
    actual = swiglu(given)
    (grad,) = torch.autograd.grad(actual, given, d_y.to(DEVICE))
    for tensor, other in ((actual.detach(), wanted.detach()), (grad, d_x)):
        assert tensor.dtype == x.dtype
        assert tensor.is_contiguous()
        torch.testing.assert_close(tensor.cpu().double(), other, rtol=ERRORS[x.dtype], atol=ERRORS[x.dtype])


@settings(max_examples=20, deadline=None)
@given(
    rows=st.sampled_from([1, 3, 4, 9]),
    width=st.sampled_from([1, 7, 16, 24]),
    columns=st.sampled_from([8, 1024]),
    dtype=st.sampled_from(list(ERRORS)),
    seed=st.integers(0, 99),
)
def test_value_and_gradient_of_any_shape(rows: int, width: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "COLUMNS", columns)
        x = drawn(rows, 2 * width, dtype=dtype, seed=seed)
        assert_right(x, drawn(rows, width, dtype=dtype, seed=seed + 1))


def test_strided_inputs_and_gradients() -> None:
    x = drawn(3, 10, 5).transpose(1, 2)
    assert_right(x, drawn(1, 1, 5).expand(3, 5, 5))


def test_large_gates_do_not_overflow() -> None:
    x = torch.tensor([[-1e4, 1e4, 0.0, 3.0, -2.0, 5.0]])
    assert_right(x, torch.ones(1, 3))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_stack_of_runs_is_each_run(dim: int) -> None:
    x = drawn(2, 3, 4, 12).to(DEVICE).requires_grad_()
    actual = torch.func.vmap(swiglu, in_dims=dim)(x)
    wanted = torch.stack([plain(tensor) for tensor in x.unbind(dim)])
    torch.testing.assert_close(actual, wanted)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (actual, wanted)]
    torch.testing.assert_close(*grads)


def test_the_operator_keeps_what_pytorch_expects_of_one() -> None:
    torch.library.opcheck(torch.ops.deltalab.swiglu, (drawn(2, 6).to(DEVICE).requires_grad_(),))


def test_a_model_takes_the_kernel_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, which the kernel does not hold, it computes with PyTorch."""
    x = drawn(4, 10).to(DEVICE)
    taken: list[torch.dtype] = []
    kernel = available(DEVICE)._replace(swiglu=lambda z: taken.append(z.dtype) or swiglu(z))
    monkeypatch.setattr(models, "automatic", lambda device: kernel)
    torch.testing.assert_close(models._swiglu(x), plain(x))
    torch.testing.assert_close(models._swiglu(x.double()), plain(x.double()))
    assert taken == [torch.float32]
