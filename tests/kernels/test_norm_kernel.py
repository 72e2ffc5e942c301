"""RMS norms fused with the addition before and the gate after them, against fp64; interpreted without a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deltalab
from deltalab.kernels.step import norm as kernels
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.ops.backends import NONE, available
from deltalab.ops.fused.norm import EPS, HeadNorm, ResidualNorm, RMSNorm
from deltalab.training.stack import Stack
from deltalab.training.train import TrainSpec
from deltalab.training.trainer import LockStep

# What PyTorch has no rule for, `vmap` does run by run.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Triton's interpreter truncates where a GPU rounds to bf16.
ROUNDING = {BF16: 2**-8 if DEVICE == "cuda" else 2**-7, FP16: 2**-11, FP32: 2e-6}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.ops.fused.norm.automatic", available)


def draw(
    runs: int, rows: int, width: int, dtypes: tuple[torch.dtype | None, ...], device: str = DEVICE
) -> list[Tensor | None]:
    """x, branch, w and gate, or None. No x is near 0, where rounding decides the norm of a single number."""
    generator = torch.Generator(device).manual_seed(rows * width)
    shapes = [(runs, rows, width), (runs, rows, width), (runs, width), (runs, rows, width)]
    actual = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        part = None if dtype is None else torch.randn(shape, generator=generator, device=device, dtype=FP32)
        actual.append(part)
    x, branch, w, gate = actual
    x = x + x.sign()
    branch = None if branch is None else 0.1 * branch
    return [
        None if tensor is None else tensor.to(dtype).requires_grad_()
        for tensor, dtype in zip((x, branch, w, gate), dtypes, strict=True)
    ]


def cosines(x: Tensor) -> Tensor:
    """Upstream gradients that are exact in bf16."""
    return torch.arange(x.numel(), dtype=FP32, device=x.device).cos().bfloat16().view_as(x)


def oracle(x: Tensor, branch: Tensor | None, w: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    z = y = x if branch is None else x + branch
    if w is not None:
        y = w[:, None] * z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if gate is None else y * gate.sigmoid(), None if branch is None else z


def compare(inputs: list[Tensor | None], dtype: torch.dtype) -> None:
    """The kernels' results and gradients are right to the rounding of the dtype that stores them."""
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    y, z = kernels.rms_norm(*inputs, EPS, dtype)
    actual, wanted = (
        [y, *([] if inputs[1] is None else [z])],
        [tensor for tensor in oracle(*exact) if tensor is not None],
    )
    assert y.dtype == dtype
    assert inputs[1] is not None or not z.numel()
    for outputs, leaves in ((actual, inputs), (wanted, exact)):
        total = sum((tensor.double() * cosines(tensor)).sum() for tensor in outputs)
        outputs += torch.autograd.grad(total, [tensor for tensor in leaves if tensor is not None])
    for i, (tensor, right) in enumerate(zip(actual, wanted, strict=True)):
        # And 1e-6: what is left of numbers around 1 that cancel.
        tensor = tensor.detach()
        limit = 1e-6 + ROUNDING[tensor.dtype] * (right.abs() + right.square().mean().sqrt())
        assert bool(((tensor.double() - right).abs() <= limit).all()), (
            f"{i}: off by {float((tensor - right).abs().max())}"
        )


# --- the kernels ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    runs=st.integers(1, 3), rows=st.integers(1, 40), width=st.integers(2, 70), tile=st.sampled_from([2048, 256]),
    programs=st.integers(1, 5), branch=st.booleans(), weight=st.booleans(), gate=st.booleans(),
)  # fmt: skip
def test_a_fused_norm_is_that_in_fp64(
    runs: int, rows: int, width: int, tile: int, programs: int, branch: bool, weight: bool, gate: bool
) -> None:
    present = [FP32, *(FP32 if tensor else None for tensor in (branch, weight, gate))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE", tile)
        patch.setattr(kernels, "PROGRAMS", programs)
        compare(draw(runs, rows, width, tuple(present)), FP32)


@pytest.mark.parametrize("width", [1, 33, 4096])
@pytest.mark.parametrize(
    "dtypes",
    [
        ((FP32, None, FP32, None), BF16),
        ((FP32, BF16, FP32, None), BF16),
        ((BF16, None, FP32, BF16), BF16),
        ((BF16, None, None, BF16), BF16),
        ((FP16, None, FP16, FP32), FP16),
        ((BF16, None, BF16, None), FP32),
    ],
    ids=str,
)
def test_each_tensor_has_its_own_dtype(dtypes: Any, width: int) -> None:
    compare(draw(2, 3, width, dtypes[0]), dtypes[1])


def test_a_narrow_residual_stream_is_normed_as_it_is_stored() -> None:
    x, branch, w, _ = draw(1, 9, 40, (BF16, BF16, FP32, None))
    y, z = kernels.rms_norm(x, branch, w, None, EPS, FP32)
    assert z.dtype == BF16
    torch.testing.assert_close(z, x + branch, rtol=ROUNDING[BF16], atol=0)
    torch.testing.assert_close(y.double(), oracle(z.double(), None, w.double(), None)[0], rtol=2e-6, atol=2e-6)
    d_x, d_branch = torch.autograd.grad((y * cosines(y)).sum(), [x, branch])
    torch.testing.assert_close(d_x, d_branch, rtol=0, atol=0)


def test_what_is_not_differentiated_costs_no_gradient() -> None:
    inputs = draw(2, 5, 12, (FP32, FP32, FP32, None))
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    for i in range(2):
        actual = torch.autograd.grad((tensor := kernels.rms_norm(*inputs, EPS, FP32)[i]).cos().sum(), inputs[:2])
        wanted = torch.autograd.grad(oracle(*exact)[i].cos().sum(), exact[:2])
        assert tensor.shape == (2, 5, 12)
        torch.testing.assert_close(actual, tuple(tensor.float() for tensor in wanted))


def test_views_are_what_they_show() -> None:
    x, _, w, gate = draw(1, 12, 10, (FP32, None, FP32, FP32))
    x, w, gate = x.detach().mT.contiguous().mT, w.detach()[:, :5].repeat(1, 2), gate.detach()[:, :1].expand(1, 12, 10)
    y, _ = kernels.rms_norm(x, None, w, gate, EPS, FP32)
    torch.testing.assert_close(y.double(), oracle(*(x.double(), None, w.double(), gate.double()))[0], rtol=1e-6, atol=0)


# --- the modules ------------------------------------------------------------------------------------------------


def test_without_kernels_it_is_what_pytorch_has() -> None:
    x, branch, gate = (torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    pytorch_norm = nn.RMSNorm(8, eps=1e-5)
    with torch.no_grad():
        pytorch_norm.weight.copy_(torch.linspace(-1, 2, 8))
    norms = [RMSNorm(8), ResidualNorm(8), HeadNorm(8)]
    for norm in norms:
        assert torch.equal(norm.state_dict()["weight"], torch.ones(8))
        norm.load_state_dict(pytorch_norm.state_dict())
    tensor, residual, heads = norms
    assert torch.equal(tensor(x), pytorch_norm(x))
    for actual, wanted in zip(residual(x, branch), (x + branch, pytorch_norm(x + branch)), strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(residual(x, None)[1], pytorch_norm(x))
    assert residual(x, None)[0] is x
    assert torch.equal(heads(x, gate.flatten(-2)), pytorch_norm(x).flatten(-2) * gate.flatten(-2).sigmoid())
    assert torch.equal(heads(x, None), pytorch_norm(x).flatten(-2))
    bare = HeadNorm(8, norm=False)
    assert not bare.state_dict()
    assert torch.equal(bare(x, gate.flatten(-2)), x.flatten(-2) * gate.flatten(-2).sigmoid())
    assert torch.equal(bare(x, None), x.flatten(-2))


def test_weights_are_called_what_saved_models_call_them() -> None:
    spec = {"vocab_size": 8, "d_model": 8, "rule": "deltanet", "layers": 1, "readout": "last"}
    norms = {"norm.weight", "blocks.0.norm.weight", "blocks.0.mlp_norm.weight", "blocks.0.mixer.norm.weight"}
    norms |= {"rebuild.norm.weight", "rebuild.mlp.0.weight", "rebuild.mlp.3.weight"}
    ones = {name for name, value in build_model(spec).state_dict().items() if torch.equal(value, value**0)}
    assert ones == norms
    assert "blocks.0.mixer.norm.weight" not in build_model({**spec, "output_norm": False}).state_dict()


@pytest.mark.usefixtures("fused")
def test_outputs_are_in_the_dtype_of_the_next_product() -> None:
    x = torch.randn(2, 3, 16, device=DEVICE)
    norm, heads = ResidualNorm(16).to(DEVICE), HeadNorm(8).to(DEVICE)
    with torch.autocast(DEVICE, BF16):
        total, y = norm(x, x.bfloat16())
        o = heads(x.bfloat16().view(2, 3, 2, 8), x.bfloat16())
    assert (total.dtype, y.dtype, o.dtype) == (FP32, BF16, BF16)
    assert (total.shape, y.shape, o.shape) == (x.shape, x.shape, x.shape)
    torch.testing.assert_close(y.float(), F.rms_norm(x + x.bfloat16(), (16,), eps=EPS), rtol=ROUNDING[BF16], atol=0)
    assert [tensor.dtype for tensor in (*norm(x, x), heads(x.view(2, 3, 2, 8), None))] == [FP32] * 3
    doubled = norm.double()(x.double(), None)[1]
    torch.testing.assert_close(doubled, F.rms_norm(x.double(), (16,), eps=EPS), rtol=1e-14, atol=0)


@pytest.mark.usefixtures("fused")
@pytest.mark.filterwarnings("ignore:.*torch.compile")
def test_a_compiler_takes_it_as_one_graph() -> None:
    norm, heads = ResidualNorm(8).to(DEVICE), HeadNorm(4).to(DEVICE)
    x = torch.randn(2, 3, 8, device=DEVICE, requires_grad=True)

    def both(x: Tensor) -> Tensor:
        total, y = norm(x, x.sin())
        return heads(y.unflatten(-1, (2, 4)), total)

    actual, wanted = torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x)
    torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (actual, wanted)))


# --- models -----------------------------------------------------------------------------------------------------


MODELS: list[dict[str, Any]] = [
    {},
    {"output_norm": False},
    {"output_gate": False, "mlp": False, "layers": 2},
    {"output_norm": False, "output_gate": False, "conv": 0},
    {"block": "mamba", "expand_v": 2},
    {"attention": (0,), "layers": 2},
    {"readout": "last"},
]


def stack_of(seeds: tuple[int, ...], **more: Any) -> Stack:
    name, given = ("mad_compression", {"length": 8}) if "readout" in more else ("mqar", {"length": 16, "pairs": 2})
    task = deltalab.get_task(name, **given)
    spec = ModelSpec(rule="comba", vocab_size=task.vocab_size, d_model=12, layers=1, heads=2, chunk_size=16)
    precision = more.pop("precision", "fp32")
    model = replace(spec, **more)
    ((_, stack),) = LockStep(
        task,
        [(model, TrainSpec(steps=4, batch_size=3, lr=1e-3, evaluations=1, precision=precision))],
        seeds,
        most=len(seeds),
    ).stacks
    stack.batches.load(0, 4)
    return stack


def losses(stack: Stack) -> tuple[Tensor, Tensor]:
    """The loss of each run, and the gradients of all."""
    inputs, targets = stack.batches.draw(torch.tensor(1, device=stack.device))
    weights = stack.state.weights.detach().requires_grad_()
    actual = stack.losses(weights, inputs, targets)
    (grad,) = torch.autograd.grad(actual.sum(), weights)
    return actual, grad


class Calls(TorchDispatchMode):
    """Counts fused norms."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forward += op.name() == "deltalab::rms_norm"
        self.backward += op.name() == "deltalab::rms_norm_backward"
        return op(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
@pytest.mark.parametrize("more", MODELS, ids=str)
def test_stacked_models_learn_the_same_with_and_without_kernels(
    more: dict[str, Any], seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_of(seeds, **more)
    with torch.no_grad():
        # Weights of norms that differ from channel to channel and from run to run.
        stack.state.weights.mul_(1 + 0.3 * torch.randn_like(stack.state.weights))
    tokens = stack.batches.draw(torch.tensor(1, device=stack.device))[0][0]
    results = []
    for kernel in (False, True):
        monkeypatch.setattr("deltalab.ops.fused.norm.automatic", available if kernel else lambda device: NONE)
        with Calls() as calls:
            actual = losses(stack)
        results.append((*actual, *stack.measure(tokens)))
        norms = sum(isinstance(tensor, RMSNorm | ResidualNorm) for tensor in stack.model.modules())
        norms += sum(isinstance(tensor, HeadNorm) and fuses(more) for tensor in stack.model.modules())
        assert (calls.forward, calls.backward) == ((norms, norms) if kernel else (0, 0))
    for tensor, other in zip(*results, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5)


def fuses(more: dict[str, Any]) -> bool:
    return more.get("output_norm", True) or more.get("output_gate", True)


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        ((1, 8 * 65536, 128), (BF16, None, FP32, None)),
        ((8, 65536, 128), (FP32, BF16, FP32, None)),
        ((8, 65536, 128), (BF16, None, FP32, BF16)),
        ((3, 65537, 100), (FP32, BF16, FP32, None)),
        ((2, 4097, 4096), (FP32, BF16, FP32, None)),
        ((16, 65536, 64), (BF16, None, None, BF16)),
    ],
    ids=str,
)
def test_real_sizes_are_those_in_fp64(shape: tuple[int, int, int], dtypes: tuple[Any, ...]) -> None:
    compare(draw(*shape, dtypes), BF16)


@pytest.mark.gpu
def test_gradients_are_the_same_bits_every_time() -> None:
    inputs = draw(2, 65536, 128, (FP32, BF16, FP32, None))
    given = [tensor for tensor in inputs if tensor is not None]

    def gradients() -> tuple[Tensor, ...]:
        y, z = kernels.rms_norm(*inputs, EPS, BF16)
        return torch.autograd.grad((y * cosines(y)).sum() + z.sum(), given)

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(tensor, other) for tensor, other in zip(first, gradients(), strict=True))


@pytest.mark.gpu
def test_offsets_go_beyond_32_bits() -> None:
    x = torch.ones(1, 2**24 + 5, 128, device=DEVICE, dtype=BF16)
    x[:, -5:] = draw(1, 5, 128, (BF16, None, None, None))[0].detach()
    w = torch.ones(1, 128, device=DEVICE, requires_grad=True)
    y, _ = kernels.rms_norm(x.requires_grad_(), None, w, None, EPS, BF16)
    d_y = torch.zeros_like(y)
    d_y[:, -5:] = cosines(d_y[:, -5:])
    d_x, d_w = torch.autograd.grad(y, [x, w], d_y)
    tail, weight = x[:, -5:].detach().double().requires_grad_(), w.detach().double().requires_grad_()
    right, _ = oracle(tail, None, weight, None)
    wanted = torch.autograd.grad(right, [tail, weight], d_y[:, -5:].double())
    for actual, tensor in ((y[:, -5:], right), (d_x[:, -5:], wanted[0]), (d_w, wanted[1])):
        torch.testing.assert_close(actual.double(), tensor, rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_a_model_under_autocast_reaches_the_kernels(seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stack_of(seeds, layers=2, precision="bf16", d_model=64)
    with Calls() as calls:
        actual, grad = losses(stack)
    assert (calls.forward, calls.backward) == (7, 7)
    monkeypatch.setattr("deltalab.ops.fused.norm.automatic", lambda device: NONE)
    wanted, right = losses(stack)
    torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=0)
    assert float((grad - right).norm() / right.norm()) < 3e-2
