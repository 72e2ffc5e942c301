"""Element-wise recurrences, in parallel and by kernels, held to a loop: in Triton's interpreter, or on a GPU."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import deltalab
from deltalab import elementwise
from deltalab.authoring.inputs import draw, parts
from deltalab.elementwise import Scan, running_max
from deltalab.ops.backends import available

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
DTYPES = (torch.float64, torch.complex128)


def kernel(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    run = available(DEVICE).elementwise
    assert run is not None
    return run(a, b, start)


FORMS: dict[str, Scan] = {"chunked": elementwise.scan, "triton": kernel}


def loop(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    rows = []
    for t in range(b.shape[1]):
        state = a[:, t if a.shape[1] > 1 else 0] * state + b[:, t]
        rows.append(state)
    return torch.stack(rows, dim=1)


def drawn(dtype: torch.dtype, length: int, *, moving: bool, channels: tuple[int, ...] = (3, 5)) -> list[Tensor]:
    """a of modulus at most 1, b and start."""
    torch.manual_seed(length)
    a = torch.randn(2, length if moving else 1, *channels, dtype=dtype)
    a = a / (a.abs() + 0.1 * torch.rand_like(a.abs()))
    return [a, torch.randn(2, length, *channels, dtype=dtype), torch.randn(2, *channels, dtype=dtype)]


def with_gradients(run: Scan, tensors: list[Tensor], device: str) -> list[Tensor]:
    leaves = [x.to(device).requires_grad_() for x in tensors]
    h = run(*leaves)
    # Draw in double: the same seed gives other numbers in single precision.
    wide = torch.complex128 if h.is_complex() else torch.float64
    weight = torch.randn(h.shape, dtype=wide, generator=torch.Generator().manual_seed(1)).to(device, h.dtype)
    return [x.cpu() for x in (h.detach(), *torch.autograd.grad((h * weight).sum().real, leaves))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 38])
def test_form_is_the_loop(form: str, dtype: torch.dtype, moving: bool, length: int) -> None:
    tensors = drawn(dtype, length, moving=moving)
    device = DEVICE if form == "triton" else "cpu"
    for got, want in zip(
        with_gradients(FORMS[form], tensors, device), with_gradients(loop, tensors, "cpu"), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_factors_of_zero_and_one_neither_overflow_nor_leak() -> None:
    a, b, start = drawn(torch.float64, 300, moving=True)
    a[:, ::50], a[:, 1::50] = 0.0, 1.0
    (h, *gradients), (want, *right) = (with_gradients(run, [a, b, start], "cpu") for run in (elementwise.scan, loop))
    for got, known in zip((h, *gradients), (want, *right), strict=True):
        torch.testing.assert_close(got, known, rtol=0, atol=1e-11)
    assert torch.equal(h[:, 50], b[:, 50])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stack_of_runs_is_each_run_by_itself(form: str, dtype: torch.dtype) -> None:
    device = DEVICE if form == "triton" else "cpu"
    tensors = [torch.stack([x, 2 * x, -x]).to(device) for x in drawn(dtype, 5, moving=True)]
    tensors[0] = tensors[0][:1].expand(3, *tensors[0].shape[1:])
    leaves = [x.clone().requires_grad_() for x in tensors]
    got = torch.func.vmap(FORMS[form])(*leaves)
    got.abs().square().sum().backward()
    for run in range(3):
        alone = [x[run].clone().requires_grad_() for x in tensors]
        want = FORMS[form](*alone)
        want.abs().square().sum().backward()
        torch.testing.assert_close(got[run], want)
        for stacked, single in zip(leaves, alone, strict=True):
            assert stacked.grad is not None
            torch.testing.assert_close(stacked.grad[run], single.grad)


def test_running_max_is_its_loop() -> None:
    x, fade = torch.randn(2, 13, 3, dtype=torch.float64), -torch.rand(2, 13, 3, dtype=torch.float64)
    for before in (torch.full((2, 3), -torch.inf, dtype=torch.float64), torch.full((2, 3), 1.5, dtype=torch.float64)):
        m, rows = before, []
        for t in range(13):
            m = torch.maximum(m + fade[:, t], x[:, t])
            rows.append(m)
        torch.testing.assert_close(running_max(x, fade, before), torch.stack(rows, dim=1))


RULES = {
    "rg_lru": deltalab.get_rule("rg_lru"),
    "lru": deltalab.get_rule("lru"),
    "rwkv4": deltalab.get_rule("rwkv4"),
    "s4d": deltalab.get_rule(
        "s4d",
        rate={"slot_rate": {"slots": 2}},
        omega={"slot_frequency": {"slots": 2}},
        c={"slot_weight": {"slots": 2}},
        d={"slot_weight": {"slots": 2}},
    ),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_of_a_rule_by_its_kernel(name: str, dtype: torch.dtype) -> None:
    rule = RULES[name]
    x = draw(rule, batch=1, length=9, heads=2, key_dim=5, value_dim=5).map(lambda part: part.to(DEVICE, dtype))
    exact = x.map(Tensor.double)
    bounds = torch.tensor([0, 4, 5, 9], device=DEVICE)

    def run(given: Any, backend: Any) -> dict[str, Tensor]:
        o, state = deltalab.scan(rule, given.q, given.k, given.v, given.gates, backend=backend, cu_seqlens=bounds)
        return {"o": o, **parts(state)}

    got, want = run(x, "triton"), run(exact, "recurrent")
    for key, value in want.items():
        limit = 2e-2 if dtype == torch.bfloat16 and key == "o" else 1e-4
        assert float((got[key].double() - value).norm() / value.norm()) < limit, key
        assert got[key].dtype == (dtype if key == "o" else torch.float32)


def test_fp64_has_no_kernel_of_a_rule() -> None:
    x = draw(RULES["lru"], batch=1, length=2, heads=1, key_dim=2, value_dim=2)
    with pytest.raises(deltalab.InputError, match="take q, k and v in bf16, fp16 or fp32, not"):
        deltalab.scan(RULES["lru"], x.q, x.k, x.v, x.gates, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("moving", [True, False])
def test_long_and_wide(dtype: torch.dtype, moving: bool) -> None:
    tensors = drawn(dtype, 1500, moving=moving, channels=(4, 130))
    wide = [x.to(torch.complex128 if dtype.is_complex else torch.float64) for x in tensors]
    for got, want in zip(with_gradients(kernel, tensors, DEVICE), with_gradients(loop, wide, "cpu"), strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-4
