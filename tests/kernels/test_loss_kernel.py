"""The kernel of the loss against fp64 and against PyTorch's own operators, in Triton's interpreter or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import example
from torch import Tensor

pytest.importorskip("triton")

from deltalab.kernels.step import loss as kernel
from deltalab.models.spec import ModelSpec
from deltalab.ops.backends import NONE, available
from deltalab.ops.fused.loss import labelled, linear_cross_entropy
from deltalab.registry import get_task, list_tasks
from deltalab.tasks import IGNORE
from deltalab.training.train import TrainSpec
from deltalab.training.trainer import LockStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""The largest error of a gradient over the largest gradient of its row; in bf16 the interpreter truncates."""


def drawn(runs: int, rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(runs, rows, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(width, (runs, rows), generator=generator)
    return logits, torch.where(torch.rand(runs, rows, generator=generator) < 0.3, IGNORE, targets)


def reference(logits: Tensor, targets: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and its gradients in fp64."""
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    losses = losses.view(targets.shape)
    (gradient,) = torch.autograd.grad((losses / count[:, None]).sum(), logits)
    return losses.detach(), gradient


def assert_right(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> None:
    count = (targets != IGNORE).sum(1).clamp(min=1)
    actual = logits.to(DEVICE, dtype, copy=True)
    wanted_losses, wanted = reference(actual.cpu(), targets, count)
    losses = kernel.cross_entropy_(actual, targets.to(DEVICE), count.to(DEVICE), ignore=IGNORE)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    exact = 1e-12 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(losses.double().cpu(), wanted_losses, rtol=exact, atol=exact)
    off = (actual.double().cpu() - wanted).abs()
    # Next to a probability of 1 the target's gradient is the difference of two numbers of fp32.
    assert bool((off <= DTYPES[dtype] * wanted.abs().amax(-1, keepdim=True) + exact / 10).all())
    assert not actual[(targets == IGNORE).to(DEVICE)].any()


@settings(max_examples=25, deadline=None)
@given(
    runs=st.integers(1, 3),
    rows=st.integers(1, 4),
    width=st.sampled_from([1, 2, 7, 16, 20, 33, 64]),
    widest=st.sampled_from([8, 16, 8192]),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 99),
)
def test_rows_of_any_width_in_any_number_of_blocks(
    runs: int, rows: int, width: int, widest: int, dtype: torch.dtype, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "WIDEST", widest)
        assert_right(*drawn(runs, rows, width, seed), dtype)


@pytest.mark.parametrize("width", [8192, 8200])
def test_a_vocabulary_of_its_size(width: int) -> None:
    assert_right(*drawn(2, 2, width, 0), torch.bfloat16)


def test_one_label_of_each_sequence_lies_beside_what_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`labelled` returns a strided view; the kernel once read the numbers between as labels, and halved the loss."""
    targets = torch.full((2, 6, 5), IGNORE)
    targets[..., 3] = torch.arange(12).view(2, 6) % 3
    labels = labelled(targets, 1, ignore=IGNORE)[1].flatten(1)
    assert labels.stride() != (6, 1)
    x, weight = (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (6, 3))
    losses = []
    for fused in (False, True):
        monkeypatch.setattr("deltalab.ops.fused.loss.automatic", available if fused else lambda device: NONE)
        losses.append(linear_cross_entropy(x, weight, labels.to(DEVICE), ignore=IGNORE))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_tasks())
def test_the_loss_of_every_task_is_what_it_is_without_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = get_task(name, **example(name))
    model = ModelSpec(
        rule="linear_attention",
        vocab_size=task.vocab_size,
        d_model=8,
        heads=1,
        readout=task.readout,
        patches=task.patches,
    )
    trial = LockStep(
        task, [(model, TrainSpec(steps=1, batch_size=2, lr=0.01, evaluations=1, precision="fp32"))], [1, 2], most=2
    )
    ((_, stack),) = trial.stacks
    stack.batches.load(0, 1)
    batch = stack.batches.draw(stack.optimizer.row)
    losses = []
    for fused in (False, True):
        for module in ("ops.fused.loss", "training.stack"):
            monkeypatch.setattr(f"deltalab.{module}.automatic", available if fused else lambda device: NONE)
        losses.append(stack.losses(stack.state.weights, *batch))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("widest", [4, 8])
def test_logits_at_the_ends_of_what_there_is(widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "WIDEST", widest)
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[3e4, -3e4, 0, 0, 0, 0, 0, 0], [-inf, -inf, -inf, -inf, 0, 1, 2, 3], [-1e30] * 8, [nan] + [0] * 7, [inf] * 8],
        device=DEVICE,
    )[None]
    targets = torch.tensor([[1, 7, 3, 2, 5]], device=DEVICE)
    wanted = F.cross_entropy(logits[0], targets[0], reduction="none")
    losses = kernel.cross_entropy_(logits, targets, torch.tensor([5], device=DEVICE), ignore=IGNORE)[0]
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert logits[0].isfinite().all(-1).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("most", [1, 60, 2**20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_is_what_it_is_without_the_kernel(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three runs has no target that counts: its loss is NaN."""
    monkeypatch.setattr("deltalab.ops.fused.loss.MOST_LOGITS", {DEVICE: most})
    _, targets = drawn(3, 7, 20, 1)
    targets[2] = IGNORE
    x, weight = (torch.randn(3, n, 8, generator=torch.Generator().manual_seed(n)) for n in (7, 20))
    by = torch.tensor([0.5, 2.0, 1.0], device=DEVICE)
    actual = {}
    for fused in (False, True):
        monkeypatch.setattr("deltalab.ops.fused.loss.automatic", available if fused else lambda device: NONE)
        inputs = [tensor.to(DEVICE, dtype, copy=True).requires_grad_() for tensor in (x, weight)]
        losses = linear_cross_entropy(*inputs, targets.to(DEVICE), ignore=IGNORE)
        actual[fused] = losses, *torch.autograd.grad((losses * by)[:2].sum(), inputs)
    assert actual[True][0].isnan().tolist() == [False, False, True]
    for tensor, other in zip(actual[True], actual[False], strict=True):
        assert tensor.dtype == other.dtype
        torch.testing.assert_close(tensor[:2], other[:2], rtol=2 * DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 8192, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_real_width(width: int, dtype: torch.dtype) -> None:
    assert_right(*drawn(3, 100, width, 0), dtype)


@pytest.mark.gpu
def test_more_logits_than_32_bits_address() -> None:
    logits = torch.zeros(1, 2**17 + 1, 2**14, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.full(logits.shape[:2], IGNORE, device=DEVICE)
    targets[0, -1] = 5
    losses = kernel.cross_entropy_(logits, targets, torch.ones(1, dtype=torch.int64, device=DEVICE), ignore=IGNORE)
    torch.testing.assert_close(losses[0, -1], torch.tensor(2.0**14, device=DEVICE).log())
    assert float(logits[0, -1, 5]) == -1
    assert not logits[0, :-1].any()
