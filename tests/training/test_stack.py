"""Runs that train as one are what they are alone, and a step of them never looks at the device."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.support.examples import example
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import deltalab
from deltalab.errors import InputError
from deltalab.models.model import build_model, parameter_groups
from deltalab.models.spec import ModelSpec
from deltalab.ops.backends import NONE, available
from deltalab.ops.fused.loss import linear_cross_entropy
from deltalab.tasks import BUILTIN, IGNORE, MQAR, Batch, Random, Task
from deltalab.tasks.batches import SentBatches, TrainingBatches
from deltalab.tasks.corpus import Corpus
from deltalab.training.optimizer import Adam, AdamW, Layout, Moments
from deltalab.training.stack import Stack
from deltalab.training.train import RunResult, TrainSpec, stackable, train, train_together
from deltalab.training.trainer import LockStep

# What PyTorch has no rule for, `vmap` does run by run: no error, but no stack either.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")

CPU = torch.device("cpu")
TASK = deltalab.get_task("mqar", length=16, pairs=2, vocab_size=16)
TINY = ModelSpec(rule="comba", vocab_size=16, d_model=16, layers=1, heads=1, chunk_size=16)
SPEC = TrainSpec(steps=12, batch_size=8, lr=1e-2, evaluations=4, eval_batches=2)
STARTED = replace(TINY, rule={"name": "comba", "d": {"head": {"init": 1}}})
MEMBERS = [
    (TINY, SPEC),
    (TINY, replace(SPEC, lr=3e-2, warmup=0.5)),
    (STARTED, replace(SPEC, weight_decay=1.0, clip=0.1, betas=(0.8, 0.99))),
]
RULES = [
    pytest.param(rule.spec(), id=f"{name}: {deltalab.get_rule(name).turned(rule)}")
    for name in deltalab.list_rules()
    for rule in deltalab.get_rule(name).variants()
]
TASKS = [
    ("mqar", {"length": 64, "pairs": 16, "vocab_size": 64, "mixture": ((32, 2, 3), (64, 16, 1)), "train_examples": 50}),
    ("mod_arithmetic", {"brackets": True}),
    *((name, example(name)) for name in BUILTIN),
]


def _id(part: str | dict[str, Any]) -> str:
    """The folder of images has another name in each process."""
    return str({key: value for key, value in part.items() if key != "folder"} if isinstance(part, dict) else part)


def stack_of(task: Task, model: ModelSpec, *, seeds: tuple[int, ...] = (1, 2), **given: Any) -> Stack:
    """Its runs, with the first steps loaded."""
    spec = replace(SPEC, **{"batch_size": 3, **given})
    ((_, stack),) = LockStep(task, [(model, spec)], seeds, most=len(seeds)).stacks
    stack.batches.load(0, 4)
    stack.optimizer.rates.fill_(0.1)
    return stack


def assert_close(a: RunResult, b: RunResult, *, tolerance: float = 1e-4) -> None:
    assert [metric[:3] for metric in a.metrics] == [metric[:3] for metric in b.metrics]
    for (_, name, _, one), (*_, other) in zip(a.metrics, b.metrics, strict=True):
        assert one == pytest.approx(other, rel=tolerance), name
    assert (a.seed, a.diverged_at) == (b.seed, b.diverged_at)
    assert list(a.weights) == list(b.weights)
    for name, value in a.weights.items():
        torch.testing.assert_close(value, b.weights[name], rtol=tolerance, atol=10 * tolerance, msg=name)


# --- the same results as alone -------------------------------------------------------------------------------


@pytest.mark.slow
def test_members_of_a_stack_are_what_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(LockStep(TASK, MEMBERS, [1, 7]).stacks) == 1
    together = train_together(TASK, MEMBERS, [1, 7], test=True)
    monkeypatch.setattr("deltalab.training.trainer.SATURATED", {"cpu": 0})
    for (model, spec), result in zip(MEMBERS, together, strict=True):
        alone = train(TASK, model, spec, [1, 7], test=True)
        assert (alone.parameters, alone.state_size) == (result.parameters, result.state_size)
        for one, other in zip(result.runs, alone.runs, strict=True):
            assert_close(one, other)
    losses = {run.final("train", "loss") for result in together for run in result.runs}
    assert len(losses) == 6, "every run is its own"


@pytest.mark.slow(keep="comba")
@pytest.mark.parametrize("rule", RULES)
def test_losses_and_gradients_of_a_stack_are_those_of_its_runs(rule: dict[str, Any]) -> None:
    """In fp64: ttt_mlp at mini_batch=1 divides by small numbers, and magnifies rounding by a thousand."""
    task = deltalab.get_task("mqar", length=20, pairs=2, vocab_size=16)
    model = ModelSpec(rule=rule, vocab_size=16, d_model=16, layers=1, heads=2, chunk_size=8)
    stack = stack_of(task, model)
    inputs, targets = stack.batches.draw(torch.tensor(1))
    weights = stack.state.weights.double().requires_grad_()
    losses = stack.losses(weights, inputs, targets)
    (grad,) = torch.autograd.grad(losses.sum(), weights)
    found = stack.layout.unpack(grad)
    for i, seed in enumerate((1, 2)):
        network, batch = build_model(model, seed=seed).double(), task.batch("train", 3, seed, 1)
        scored = batch.targets != IGNORE
        loss = F.cross_entropy(network(batch.inputs, where=scored), batch.targets[scored])
        loss.backward()
        torch.testing.assert_close(losses[i], loss, rtol=1e-12, atol=0)
        whole = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]).norm()
        for name, p in network.named_parameters():
            wanted = torch.zeros_like(p) if p.grad is None else p.grad
            # Some gradients are all but zero: held against the whole gradient.
            assert float((found[name][i] - wanted).norm() / whole) < 1e-9, name


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_losses_and_gradients_on_a_gpu_are_those_on_a_cpu(
    tied: bool, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack's own way there: kernels of embedding and loss, and the last norm at labelled places alone."""
    pytest.importorskip("triton")
    stack, found = stack_of(TASK, replace(TINY, tie_embeddings=tied), seeds=seeds), []
    inputs, targets = stack.batches.draw(torch.tensor(1))
    for fused in (False, True):
        for module in ("training.stack", "models.model", "ops.fused.loss"):
            monkeypatch.setattr(f"deltalab.{module}.automatic", available if fused else lambda device: NONE)
        weights = stack.state.weights.requires_grad_()
        losses = stack.losses(weights, inputs, targets)
        found.append((losses, *torch.autograd.grad(losses.sum(), weights)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("readout", ["position", "last"])
def test_features_at_places_are_these_of_all(readout: Any) -> None:
    model, tokens = build_model(replace(TINY, readout=readout)), torch.arange(12).view(2, 6)
    at = torch.tensor([[5, 0, 0], [1, 2, 4]])
    torch.testing.assert_close(model.features(tokens, at), model.features(tokens)[torch.tensor([[0], [1]]), at])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task"),
    [
        ({"tie_embeddings": False}, TASK),
        ({"block": "mamba", "expand_v": 2}, TASK),
        ({"attention": (1,), "window": 5, "layers": 2, "heads": 2}, TASK),
        ({"attention": (0,), "layers": 2}, TASK),
        ({"output_norm": False, "output_gate": False, "conv": 0}, TASK),
        ({"readout": "last"}, deltalab.get_task("mad_compression", length=8)),
        ({"vocab_size": 256}, deltalab.get_task("text", length=16)),
    ],
    ids=str,
)
def test_models_of_every_form_stack(model: dict[str, Any], task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, given = replace(TINY, **model), replace(SPEC, steps=4, evaluations=2, batch_size=2)
    stacked = train(task, spec, given, [1, 2], test=True)
    monkeypatch.setattr("deltalab.training.trainer.SATURATED", {"cpu": 0})
    for one, other in zip(stacked.runs, train(task, spec, given, [1, 2], test=True).runs, strict=True):
        assert_close(one, other, tolerance=2e-4)


@pytest.mark.slow
def test_a_stack_in_bf16_learns_over_fp32_weights() -> None:
    given = replace(SPEC, steps=60, batch_size=16, precision="bf16", evaluations=6)
    for run in train(TASK, TINY, given, [1, 2]).runs:
        losses = [value for split, name, _, value in run.metrics if (split, name) == ("train", "loss")]
        assert losses[-1] < losses[0]
        assert all(value.dtype == torch.float32 for value in run.weights.values())


# --- the optimizer --------------------------------------------------------------------------------------------


def test_an_update_is_that_of_adamw_with_clipping() -> None:
    runs = [
        Adam([0.1, 0.2, 0.05, 0.1, 0.1], 0.1, (0.9, 0.95), 1.0),
        Adam([1e-3, 3e-3, 1e-2, 0.0, 1e-4], 0.0, (0.8, 0.999), 0.0),
        Adam([0.3, 0.1, 0.1, 0.1, 0.1], 2.0, (0.0, 0.5), 1e-3),
    ]
    model = build_model(TINY)
    layout, generator = Layout(model), torch.Generator().manual_seed(0)
    networks = [build_model(TINY, seed=seed) for seed in range(3)]
    rows = torch.stack([layout.pack(network.state_dict()) for network in networks])
    state = Moments(rows, torch.zeros_like(rows), torch.zeros_like(rows))
    stack = Stack(model, layout, TrainingBatches(TASK, 2, [0, 1, 2], CPU, 5), state, runs, bf16=False)
    optimizers = [
        torch.optim.AdamW(parameter_groups(network, run.weight_decay), betas=run.betas, fused=True)
        for network, run in zip(networks, runs, strict=True)
    ]
    stack.optimizer.load(0, stack.optimizer.rates_of(0, 5))
    for step in range(5):
        grads = torch.stack(
            [
                layout.pack({name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()})
                for _ in runs
            ]
        )
        stack.optimizer.step(state, torch.zeros(3), grads)
        for i, (network, optimizer, run) in enumerate(zip(networks, optimizers, runs, strict=True)):
            for name, p in network.named_parameters():
                p.grad = layout.unpack(grads)[name][i].clone()
            torch.nn.utils.clip_grad_norm_(network.parameters(), run.clip or math.inf)
            for group in optimizer.param_groups:
                group["lr"] = run.lr[step]
            optimizer.step()
            for name, p in network.named_parameters():
                found = layout.unpack(stack.state.weights)[name][i]
                torch.testing.assert_close(found, p.detach(), rtol=1e-6, atol=1e-6, msg=f"{i} {name} {step}")


def test_the_rates_are_those_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.training.stack.BLOCK", 5)
    monkeypatch.setattr("deltalab.training.trainer.BLOCK", 5)
    seen = []
    step = AdamW.step

    def recorded(self: AdamW, state: Moments, losses: Tensor, grad: Tensor) -> None:
        seen.append((int(self.begin + self.row), self.rates[int(self.row), 1, :, 0].tolist()))
        step(self, state, losses, grad)

    monkeypatch.setattr(AdamW, "step", recorded)
    train_together(TASK, MEMBERS[:2], [1])
    assert [at for at, _ in seen] == list(range(SPEC.steps))
    for at, rates in seen:
        wanted = [spec.learning_rate(at) / (1 - 0.9 ** (at + 1)) for _, spec in MEMBERS[:2]]
        assert rates == pytest.approx(wanted, rel=1e-6)


# --- divergence and ends ----------------------------------------------------------------------------------------


def test_a_diverged_run_stays_where_it_is_and_hurts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(TASK, TINY, SPEC, [1, 2, 3], test=True)
    states, losses = [], Stack.losses

    def planted(self: Stack, *rest: Tensor) -> Tensor:
        states.append(self.state.weights.clone())
        at = int(self.optimizer.begin + self.optimizer.row)
        return torch.where(torch.arange(len(self)) == (1 if at == 4 else -1), math.nan, 1.0) * losses(self, *rest)

    monkeypatch.setattr(Stack, "losses", planted)
    runs = train(TASK, TINY, SPEC, [1, 2, 3], test=True).runs
    assert [run.diverged_at for run in runs] == [None, 4, None]
    assert torch.equal(states[4][1], states[5][1])
    assert not torch.equal(states[4][0], states[5][0])
    assert [len(state) for state in states] == [3] * 6 + [2] * 6, "from the next evaluation on it costs nothing"
    assert torch.equal(runs[1].weights["embed.weight"].flatten(), states[4][1, : 16 * 16])
    for i in (0, 2):
        assert_close(runs[i], whole.runs[i])


def test_a_member_that_ends_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def watch(member: int, step: int, runs: list[RunResult]) -> bool:
        assert [run.seed for run in runs] == [1, 2]
        assert all(run.metrics[-1][2] == step for run in runs)
        seen.append((member, step))
        return (member, step) == (1, 6)

    whole = train_together(TASK, MEMBERS, [1, 2], test=True)
    results = train_together(TASK, MEMBERS, [1, 2], test=True, watch=watch)
    assert seen == [(0, 3), (1, 3), (2, 3), (0, 6), (1, 6), (2, 6), (0, 9), (2, 9), (0, 12), (2, 12)]
    for i in (0, 2):
        for one, other in zip(results[i].runs, whole[i].runs, strict=True):
            assert_close(one, other)
    for run in results[1].runs:
        assert run.diverged_at is None
        assert {step for split, _, step, _ in run.metrics if split != "cost"} == {3, 6}
        assert not [metric for metric in run.metrics if metric[0] == "test"]


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 9])
def test_a_continued_stack_equals_an_uninterrupted_one(at: int, tmp_path: Path) -> None:
    """With a member that diverges, and one that ends at step 6."""
    members = [MEMBERS[0], (TINY, replace(SPEC, lr=1e30, clip=0.0)), MEMBERS[1]]

    def end(member: int, step: int, runs: list[RunResult]) -> bool:
        return (member, step) == (2, 6)

    def cut(member: int, step: int, runs: list[RunResult]) -> bool:
        if step == at:
            raise Killed
        return end(member, step, runs)

    file = tmp_path / "stack.pt"
    whole = train_together(TASK, members, [1, 2], test=True, watch=end)
    assert all(run.diverged_at is not None for run in whole[1].runs)
    with pytest.raises(Killed):
        train_together(TASK, members, [1, 2], test=True, checkpoint=file, checkpoint_seconds=0, watch=cut)
    resumed = train_together(TASK, members, [1, 2], test=True, checkpoint=file, watch=end)
    for one, other in zip(whole, resumed, strict=True):
        for a, b in zip(one.runs, other.runs, strict=True):
            assert repr(a.metrics) == repr(b.metrics)
            # Bit for bit, NaN included.
            assert all(torch.equal(*(x.weights[name].view(torch.int32) for x in (a, b))) for name in a.weights)
    assert not file.exists()


# --- no look at the device --------------------------------------------------------------------------------------


class NoLook(TorchDispatchMode):
    """Raises where a GPU would have to be waited for, so that no CUDA graph could be captured."""

    LOOKS: ClassVar[set[str]] = {
        "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal",
        "aten::_linalg_check_errors", "aten::repeat_interleave", "aten::unique_dim", "aten::_unique2",
        "aten::normal_", "aten::uniform_", "aten::random_",
    }  # fmt: skip

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().split(".")[0]
        given = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
        masked = name == "aten::index" and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in given[1:])
        assert not masked, "an index by a mask looks at the device"
        assert name not in self.LOOKS, f"{name} looks at the device"
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "given"), TASKS, ids=_id)
def test_a_step_on_any_task_never_looks_at_the_device(name: str, given: dict[str, Any]) -> None:
    task = deltalab.get_task(name, **given)
    of_task = {"vocab_size": task.vocab_size, "readout": task.readout, "patches": task.patches}
    stack = stack_of(task, ModelSpec(rule="deltanet", d_model=8, layers=1, heads=1, **of_task))
    stack.update()
    with NoLook():
        stack.update()
    assert int(stack.optimizer.row) == 2
    assert stack.optimizer.bad.tolist() == [-1, -1]
    assert not stack.overfull


@pytest.mark.slow(keep="comba")
@pytest.mark.parametrize("rule", [rule for rule in RULES if "exact" not in str(rule.id)])
def test_a_step_of_any_rule_never_looks_at_the_device(rule: dict[str, Any]) -> None:
    task = deltalab.get_task("mqar", length=16, pairs=2, vocab_size=16)
    stack = stack_of(task, ModelSpec(rule=rule, vocab_size=16, d_model=8, layers=1, heads=1, chunk_size=8))
    stack.update()
    before = stack.state.weights.clone()
    with NoLook():
        stack.update()
    assert not torch.equal(before, stack.state.weights)


def test_what_looks_is_seen() -> None:
    for look in (lambda x: x.item(), lambda x: x[x > 0], lambda x: bool(x > 0), lambda x: torch.nonzero(x)):
        with pytest.raises(AssertionError, match="looks"), NoLook():
            look(torch.ones(1))


# --- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "given"), TASKS, ids=_id)
def test_a_feed_draws_what_the_task_draws(name: str, given: dict[str, Any]) -> None:
    task = deltalab.get_task(name, **given)
    seeds = [3, 9, 3, 4]
    feed = TrainingBatches(task, 5, seeds, CPU, 6)
    for begin, end in ((0, 6), (10, 13)):
        feed.load(begin, end)
        for row in (0, end - begin - 1):
            inputs, targets = feed.draw(torch.tensor(row))
            for i, seed in enumerate(seeds):
                batch = task.batch("train", 5, seed, begin + row)
                assert torch.equal(inputs[i], batch.inputs)
                assert torch.equal(targets[i], batch.targets)
                assert int((batch.targets != IGNORE).sum(1).max()) <= task.most_scored


@pytest.mark.parametrize(("name", "given"), [("text", {"length": 12}), TASKS[0]], ids=_id)
def test_batches_that_the_cpu_sends_are_those_that_a_device_draws(name: str, given: dict[str, Any]) -> None:
    task = deltalab.get_task(name, **given)
    drawn, sent = (kind(task, 5, [3, 9, 3], CPU, 6) for kind in (TrainingBatches, SentBatches))
    for begin, end in ((0, 6), (10, 13)):
        drawn.load(begin, end)
        sent.load(begin, end)
        for row in (0, end - begin - 1):
            for one, other in zip(drawn.draw(torch.tensor(row)), sent.draw(torch.tensor(row)), strict=True):
                assert torch.equal(one, other)


def test_a_device_that_cannot_hold_the_data_is_sent_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    task, model, spec = deltalab.get_task("text", length=8), replace(TINY, vocab_size=256), replace(SPEC, steps=4)
    monkeypatch.setattr(Corpus, "fits", lambda self, split, device: split != "train")
    trial = LockStep(task, [(model, spec)], [1, 2])
    assert isinstance(trial.stacks[0][1].batches, SentBatches)
    monkeypatch.undo()
    other = LockStep(task, [(model, spec)], [1, 2])
    assert isinstance(other.stacks[0][1].batches, TrainingBatches)
    for one in (trial, other):
        one.advance(4)
    for a, b in zip(trial.results(0, weights=True), other.results(0, weights=True), strict=True):
        assert a.metrics == b.metrics
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


@dataclass(frozen=True, kw_only=True)
class Same(MQAR):
    """All rows of a batch are its first one, so no two batches are rows of one draw."""

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        return Batch(*(x[:1].expand(size, -1).clone() for x in (batch.inputs, batch.targets)))


@dataclass(frozen=True, kw_only=True)
class Addressed(MQAR):
    def draw(self, split: str, size: int, random: Random) -> Batch:
        return super().draw(split, size, Random(f"{random.address}/other", random.device))


@dataclass(frozen=True, kw_only=True)
class TooMany(MQAR):
    @property
    def most_scored(self) -> int:
        return 1


def test_a_task_whose_rows_depend_on_each_other_is_drawn_seed_by_seed() -> None:
    task = Same(length=16, pairs=2, vocab_size=16)
    feed = TrainingBatches(task, 3, [1, 2], CPU, 2)
    feed.load(0, 2)
    for i, seed in enumerate((1, 2)):
        assert torch.equal(feed.draw(torch.tensor(1))[0][i], task.batch("train", 3, seed, 1).inputs)


def test_a_task_that_reads_the_address_of_its_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="depend on more than the numbers"):
        TrainingBatches(Addressed(length=16, pairs=2, vocab_size=16), 3, [1, 2], CPU, 2)


def test_a_task_that_scores_more_than_it_says_is_refused() -> None:
    with pytest.raises(InputError, match="more positions of an example than its most_scored, 1"):
        train(TooMany(length=16, pairs=2, vocab_size=16), TINY, SPEC, [1])


# --- the loss ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 40, 2**20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_loss_is_cross_entropy(most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.ops.fused.loss.MOST_LOGITS", {"cpu": most})
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(3, n, 8, generator=generator).to(dtype).requires_grad_() for n in (10, 20))
    targets = torch.randint(20, (3, 10), generator=generator)
    targets[0, ::2] = targets[1, 1:] = IGNORE
    by = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    found = linear_cross_entropy(x, weight, targets, ignore=IGNORE)
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    logits = exact[0] @ exact[1].mT
    wanted = torch.stack([F.cross_entropy(*one, ignore_index=IGNORE) for one in zip(logits, targets, strict=True)])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad((found * by.to(found.dtype)).sum(), (x, weight))
    for one, other in zip(grads, torch.autograd.grad((wanted * by).sum(), exact), strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other).norm() / other.norm()) < tolerance


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_parts_of_a_batch_add_up_to_its_mean(kind: Callable[[int], int | torch.Tensor]) -> None:
    """The second part has no label that counts, and adds 0."""
    x, weight = torch.randn(6, 4).requires_grad_(), torch.randn(9, 4).requires_grad_()
    targets = torch.tensor([3, IGNORE, 8, IGNORE, IGNORE, IGNORE])
    whole = linear_cross_entropy(x, weight, targets)
    parts = sum(linear_cross_entropy(x[i : i + 3], weight, targets[i : i + 3], count=kind(2)) for i in (0, 3))
    torch.testing.assert_close(parts, whole)
    for one, other in zip(*(torch.autograd.grad(y, (x, weight)) for y in (parts, whole)), strict=True):
        torch.testing.assert_close(one, other)


def test_no_label_is_no_loss() -> None:
    x, weight = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
    targets = torch.tensor([[1, IGNORE, 2], [IGNORE] * 3])
    found = linear_cross_entropy(x, weight, targets, ignore=IGNORE)
    assert found.isnan().tolist() == [False, True]


# --- memory, and rules that cannot be stacked -------------------------------------------------------------------


def out_of_memory(monkeypatch: pytest.MonkeyPatch, *, fits: int, at: int = 0) -> list[int]:
    """Has a stack of more than `fits` runs fail at a step, as a GPU would; returns the sizes that were tried."""
    tried: list[int] = []
    update = Stack.update

    def limited(self: Stack) -> None:
        if int(self.optimizer.begin + self.optimizer.row) == at:
            tried.append(len(self))
            if len(self) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has less.")
        update(self)

    monkeypatch.setattr(Stack, "update", limited)
    return tried


@pytest.mark.slow
@pytest.mark.parametrize(("at", "kept"), [(0, False), (7, False), (7, True)])
def test_a_stack_that_does_not_fit_is_halved(
    at: int, kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train_together(TASK, MEMBERS, [1, 2], test=True)
    tried = out_of_memory(monkeypatch, fits=2, at=at)
    told: list[tuple[int, int]] = []
    with caplog.at_level(logging.WARNING, "deltalab"):
        results = train_together(
            TASK,
            MEMBERS,
            [1, 2],
            test=True,
            checkpoint=tmp_path / "stack.pt" if kept else None,
            checkpoint_seconds=0,
            watch=lambda member, step, runs: told.append((member, step)),
        )
    assert tried == [6, 3, 2, 2, 2]
    assert "2.50 GiB" in caplog.text
    assert told == [(member, step) for step in SPEC.evaluated_at() for member in range(3)], "nothing is told twice"
    for one, other in zip(results, whole, strict=True):
        for a, b in zip(one.runs, other.runs, strict=True):
            assert_close(a, b)


@pytest.mark.slow
def test_a_run_that_does_not_fit_says_what_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = out_of_memory(monkeypatch, fits=0)
    with pytest.raises(torch.OutOfMemoryError, match=r"single run of rule 'comba'.* 2\.50 GiB"):
        train_together(TASK, MEMBERS, [1])
    assert tried == [3, 2, 1]


@pytest.mark.slow
def test_a_rule_that_cannot_be_stacked_trains_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operands = type(deltalab.get_rule("comba")).operands

    def looking(self: Any, q: Tensor, *rest: Any, **gates: Any) -> Any:
        assert q.sum().item() < math.inf
        return operands(self, q, *rest, **gates)

    with caplog.at_level(logging.WARNING, "deltalab"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltalab.training.trainer.SATURATED", {"cpu": 0})
        alone = train(TASK, TINY, SPEC, [1, 2]).runs
        assert not caplog.text
    monkeypatch.setattr(type(deltalab.get_rule("comba")), "operands", looking)
    with caplog.at_level(logging.WARNING, "deltalab"):
        runs = train(TASK, TINY, SPEC, [1, 2]).runs
    assert "rule 'comba'" in caplog.text
    assert "cannot be stacked" in caplog.text
    assert [run.metrics for run in runs] == [run.metrics for run in alone]


# --- what trains together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "spec", "right"),
    [
        ({}, {"lr": 1.0, "weight_decay": 0.0, "warmup": 0.3, "clip": 0.0, "betas": (0.5, 0.5)}, True),
        ({"rule": {"name": "comba", "d": {"head": {"init": 1}}}}, {}, True),
        ({"rule": {"name": "comba", "g": {"mamba2_decay": {"dt_max": 1.0}}}}, {}, True),
        ({"rule": {"name": "comba", "d": 0}}, {}, False),
        ({"rule": {"name": "comba", "g": "metala_decay"}}, {}, False),
        ({"rule": {"name": "comba", "transition": "iplr"}}, {}, False),
        ({"rule": {"name": "deltanet"}}, {}, False),
        ({"d_model": 32}, {}, False),
        ({}, {"steps": 13}, False),
        ({}, {"batch_size": 4}, False),
        ({}, {"evaluations": 2}, False),
        ({}, {"precision": "bf16"}, False),
    ],
    ids=str,
)
def test_trials_that_differ_in_numbers_alone_train_together(model: Any, spec: Any, right: bool) -> None:
    other = replace(TINY, **model), replace(SPEC, **spec)
    assert stackable((TINY, SPEC), other) is stackable(other, (TINY, SPEC)) is right
    if not right:
        with pytest.raises(InputError, match="may differ in lr"):
            train_together(TASK, [(TINY, SPEC), other], [1])


def test_a_gate_that_is_another_function_is_not_stacked() -> None:
    def with_beta(most: float) -> tuple[ModelSpec, TrainSpec]:
        return replace(TINY, rule={"name": "deltanet", "beta": {"sigmoid": {"max": most}}}), SPEC

    assert stackable(with_beta(1), with_beta(1))
    assert not stackable(with_beta(1), with_beta(2))
