"""The kernel of the LSTM with exponential gates, held to its loop over tokens. In Triton's interpreter, or on a GPU."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import deltalab
from deltalab.authoring.inputs import draw, parts
from deltalab.nonlinear import exponential_lstm
from deltalab.ops.backends import available

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
NAMES = ("x", "r", "h", "c", "n", "m")


def loop(x: Tensor, r: Tensor, *state: Tensor, log_sigmoid: bool) -> tuple[Tensor, ...]:
    rows = []
    for token in x.unbind(1):
        o, state = exponential_lstm(token, r, state, log_sigmoid=log_sigmoid)
        rows.append(o)
    return torch.stack(rows, dim=1), *state


def kernel(x: Tensor, r: Tensor, *state: Tensor, log_sigmoid: bool) -> tuple[Tensor, ...]:
    run = available(DEVICE).lstm
    assert run is not None
    o, after = run(x, r, state, log_sigmoid=log_sigmoid)
    return o, *after


def drawn(length: int, width: int, *, dtype: torch.dtype = torch.float64, empty: bool = False) -> list[Tensor]:
    """x, R and a state; an empty one has m = -inf."""
    torch.manual_seed(length + width)
    x, r = torch.randn(2, length, 3, 4, width, dtype=dtype), torch.randn(3, 4, width, width, dtype=dtype) / width**0.5
    state = [torch.randn(2, 3, width, dtype=dtype) for _ in range(4)]
    state[2] = 1 + state[2].square()
    if empty:
        state = [torch.zeros_like(part) for part in state[:3]] + [torch.full_like(state[3], -torch.inf)]
    return [x, r, *state]


def with_gradients(run: Any, tensors: list[Tensor], device: str, log_sigmoid: bool, ends: bool) -> dict[str, Tensor]:
    """The results, and the gradients of a weighted sum of them: of h alone, or also of the states at the end."""
    leaves = [x.to(device).requires_grad_() for x in tensors]
    results = dict(zip(("h of all", *NAMES[2:]), run(*leaves, log_sigmoid=log_sigmoid), strict=True))
    summed = list(results.values())[: None if ends else 1]
    total = torch.stack([(y * torch.linspace(-1, 1, y.numel()).view_as(y).to(y)).sum() for y in summed]).sum()
    gradients = torch.autograd.grad(total, leaves)
    results |= {f"gradient of {name}": value for name, value in zip(NAMES, gradients, strict=True)}
    return {name: value.detach().cpu() for name, value in results.items()}


@pytest.mark.parametrize("log_sigmoid", [True, False])
@pytest.mark.parametrize(
    ("length", "width", "empty", "ends"), [(1, 4, False, True), (6, 5, True, False), (5, 19, False, True)]
)
def test_kernel_is_the_loop(log_sigmoid: bool, length: int, width: int, empty: bool, ends: bool) -> None:
    tensors = drawn(length, width, empty=empty)
    got = with_gradients(kernel, tensors, DEVICE, log_sigmoid, ends)
    for name, want in with_gradients(loop, tensors, "cpu", log_sigmoid, ends).items():
        torch.testing.assert_close(
            got[name], want, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_stack_of_runs_is_each_run_by_itself() -> None:
    tensors = [torch.stack([x, x / 2]).to(DEVICE) for x in drawn(3, 4)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    h, *_ = torch.func.vmap(lambda *given: kernel(*given, log_sigmoid=True))(*leaves)
    h.square().sum().backward()
    for run in range(2):
        alone = [x[run].clone().requires_grad_() for x in tensors]
        want, *_ = kernel(*alone, log_sigmoid=True)
        want.square().sum().backward()
        torch.testing.assert_close(h[run], want)
        for stacked, single in zip(leaves, alone, strict=True):
            assert stacked.grad is not None
            torch.testing.assert_close(stacked.grad[run], single.grad)


def test_packed_sequences_of_the_rule_by_its_kernel() -> None:
    rule = deltalab.get_rule("slstm")
    x = draw(rule, batch=1, length=7, heads=2, key_dim=1, value_dim=5).map(lambda part: part.to(DEVICE, torch.float32))
    bounds = torch.tensor([0, 3, 7], device=DEVICE)

    def run(given: Any, backend: Any) -> dict[str, Tensor]:
        o, state = deltalab.scan(rule, given.q, given.k, given.v, given.gates, backend=backend, cu_seqlens=bounds)
        return {"o": o, **parts(state)}

    got, want = run(x, "triton"), run(x.map(Tensor.double), "recurrent")
    for key, value in want.items():
        torch.testing.assert_close(got[key].double(), value, rtol=1e-4, atol=1e-5)


def test_a_wide_head_has_no_kernel() -> None:
    rule = deltalab.get_rule("slstm")
    x = draw(rule, batch=1, length=2, heads=1, key_dim=1, value_dim=65).map(Tensor.float)
    with pytest.raises(deltalab.InputError, match="width up to 64, not 65"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 64])
def test_long_and_wide(width: int) -> None:
    tensors = drawn(400, width, dtype=torch.float32)
    tensors[1] = tensors[1] / 4  # a state that is no chaos
    got = with_gradients(kernel, tensors, DEVICE, True, True)
    for name, want in with_gradients(loop, [x.double() for x in tensors], "cpu", True, True).items():
        assert float((got[name] - want).norm() / want.norm()) < 1e-3, name
