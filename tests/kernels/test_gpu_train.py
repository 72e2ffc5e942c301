"""What training on a GPU must give: whole steps in a CUDA graph, which are the steps that they were captured from."""

import logging
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.examples import example

import deltalab
from deltalab.models.spec import ModelSpec
from deltalab.tasks import BUILTIN, corpus
from deltalab.training.stack import Stack
from deltalab.training.train import TrainSpec, train, train_together
from deltalab.training.trainer import LockStep

pytestmark = pytest.mark.gpu

TASK = deltalab.get_task("mqar", length=64, pairs=4, vocab_size=128)
SPEC = TrainSpec(steps=12, batch_size=8, lr=3e-3, evaluations=2, eval_batches=1, precision="fp32")
RULES = [pytest.param(rule, id=rule) for rule in deltalab.list_rules()]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def model(rule: str, **given: Any) -> ModelSpec:
    return ModelSpec(**{"rule": rule, "vocab_size": 128, "d_model": 64, "layers": 2, "heads": 2, **given})


def trained(task: Any, spec: ModelSpec, given: TrainSpec, *, graph: bool, seeds: tuple[int, ...] = (1, 2)) -> LockStep:
    trial = LockStep(task, [(spec, given)], seeds)
    if not graph:
        for _, stack in trial.stacks:
            stack.eager = "as the test wants it"
    trial.advance(given.steps)
    return trial


def assert_close(stack: LockStep, other: LockStep, tolerance: float) -> None:
    for a, b in zip(stack.results(0, weights=True), other.results(0, weights=True), strict=True):
        assert a.final("train", "loss") == pytest.approx(b.final("train", "loss"), rel=tolerance)
        for name, value in a.weights.items():
            torch.testing.assert_close(value, b.weights[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_of_any_rule_is_one_graph(rule: str, precision: Any) -> None:
    spec = replace(SPEC, precision=precision)
    graph, eager = (trained(TASK, model(rule), spec, graph=wanted) for wanted in (True, False))
    assert graph.graph == "whole step", graph.graph
    assert eager.graph == "none: as the test wants it"
    assert_close(graph, eager, 1e-3 if precision == "fp32" else 5e-2)


LAYERS: dict[str, dict[str, Any]] = {
    "grouped values": {"rule": "gated_deltanet", "heads": 4, "qk_heads": 2, "qk_norm": True, "rope": True},
    "token shift": {"rule": "kda", "token_shift": True, "output_norm": "group", "output_gate": "silu"},
    "gate of low rank": {"rule": "gated_deltanet", "gate_rank": 8},
    "gate before the norm": {"rule": "mamba2", "output_norm": "rms_all", "output_gate": "silu_before_norm"},
    "Transformer++": {"rule": "attention", "heads": 4, "kv_heads": 2, "rope": True, "conv": 0, "output_gate": False},
    "a window": {"rule": {"name": "attention", "window": 24}},
    "attention over depth": {"rule": "gated_deltanet", "attention_residuals": 2},
    "experts": {"rule": "gated_deltanet", "experts": {"count": 4}},
    "latents": {"rule": "attention", "rope": True, "kv_rank": 16, "q_rank": 16, "rope_dim": 8, "conv": 0},
    "canon layers": {"rule": "gated_deltanet", "canon": ["A", "B", "C", "D"]},
    "canon layer B alone": {"rule": "gated_deltanet", "canon": ["B"], "conv": 0},
    "values of the first layer": {"rule": "gated_deltanet", "value_residual": {}},
    "two rules side by side": {"rule": "mamba2", "beside": {"name": "attention", "window": 24}},
    "gated attention": {"rule": "attention", "rope": True, "conv": 0, "output_norm": False},
    "layers of two sizes": {
        "rule": "gated_deltanet", "layers": ["rule", {"name": "rule", "layer": {"heads": 4, "mlp_width": 96}}],
    },
    "capped logits": {"rule": "gated_deltanet", "logit_cap": 10.0},
    "two softmaxes": {"rule": "differential_attention", "conv": 0},
    "blocks of RWKV-7": {
        "rule": "rwkv7", "conv": 0, "token_shift": "each", "output_norm": "group", "output_gate": "linear",
        "gate_rank": 8, "low_rank_activation": {"g": "tanh", "output_gate": "sigmoid"}, "low_rank_bias": ["a"],
        "bonus": True, "value_residual": {"rank": 4}, "mlp": "relu2", "mlp_shift": True, "norm": "layer",
        "first_norm": True,
    },
    "blocks of RWKV-6": {
        "rule": "rwkv6", "conv": 0, "token_shift": {"rank": 8}, "output_norm": "group", "output_gate": "silu",
        "low_rank_activation": {"g": "tanh"}, "mlp": "gated_relu2", "mlp_shift": True, "norm": "layer",
        "first_norm": True,
    },
    "a rule for each layer": {
        "rule": "gated_deltanet",
        "layers": ["rule", {"name": "attention", "window": 24, "layer": {"kv_heads": 1, "rope": True, "conv": 0}}],
    },
}  # fmt: skip


@pytest.mark.parametrize("given", LAYERS.values(), ids=LAYERS)
def test_a_step_of_any_layer_is_one_graph_and_as_on_a_cpu(given: dict[str, Any]) -> None:
    graph, eager = (trained(TASK, model(**given), SPEC, graph=wanted) for wanted in (True, False))
    assert graph.graph == "whole step", graph.graph
    assert_close(graph, eager, 1e-3)
    on_cpu = train(TASK, model(**given), replace(SPEC, device="cpu"), [1, 2])
    narrow = trained(TASK, model(**given), replace(SPEC, precision="bf16"), graph=True)
    assert narrow.graph == "whole step", narrow.graph
    for run, other, rounded in zip(graph.results(0), on_cpu.runs, narrow.results(0), strict=True):
        assert run.final("train", "loss") == pytest.approx(other.final("train", "loss"), rel=1e-3)
        assert rounded.final("train", "loss") == pytest.approx(other.final("train", "loss"), rel=5e-2)


@pytest.mark.parametrize("name", BUILTIN)
def test_a_step_on_any_task_is_one_graph(name: str) -> None:
    task = deltalab.get_task(name, **example(name))
    spec = model("gated_deltanet", vocab_size=task.vocab_size, readout=task.readout, patches=task.patches)
    graph, eager = (trained(task, spec, SPEC, graph=wanted) for wanted in (True, False))
    assert graph.graph == "whole step", graph.graph
    assert_close(graph, eager, 1e-3)


@pytest.mark.parametrize("name", BUILTIN)
def test_training_on_any_task_is_that_on_a_cpu(name: str) -> None:
    """No graph and no kernel is in both, so that a wrong one cannot agree with itself."""
    task = deltalab.get_task(name, **example(name))
    spec = model("gated_deltanet", vocab_size=task.vocab_size, readout=task.readout, patches=task.patches)
    on_gpu, on_cpu = (train(task, spec, replace(SPEC, device=device), [1, 2]) for device in ("cuda", "cpu"))
    for run, other in zip(on_gpu.runs, on_cpu.runs, strict=True):
        for split in ("train", "validation"):
            assert run.final(split, "loss") == pytest.approx(other.final(split, "loss"), rel=1e-3), split


def test_a_corpus_that_a_gpu_cannot_hold_is_sent_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    task, spec = deltalab.get_task("text", length=32), model("gated_deltanet", vocab_size=256)
    held = trained(task, spec, SPEC, graph=True)
    held.measure("test")
    monkeypatch.setattr(corpus, "SHARE", 2**40)
    sent = trained(task, spec, SPEC, graph=True)
    sent.measure("test")
    assert task.fed_by_cpu(held.device)
    assert sent.graph == "whole step", sent.graph
    assert [run.metrics for run in sent.results(0)] == [run.metrics for run in held.results(0)]


@pytest.mark.parametrize("rule", RULES)
def test_a_stack_is_its_runs_alone(rule: str) -> None:
    """Step after step, each from the same state: what products of another shape round is not to add up.

    In MIRAS it does, whose slope |e|^(1/2) has none of its own at 0: there 1e-7 of the weights is up to 3e-2 of one
    gradient and 1e-2 of the loss 12 steps later, on a CPU; no other rule makes more than 1e-4 and 4e-5 of it.
    """
    seeds = (1, 2, 3)
    together, *alone = (LockStep(TASK, [(model(rule), SPEC)], some) for some in (seeds, *((seed,) for seed in seeds)))
    ((_, stack),), singles = together.stacks, [result.stacks[0][1] for result in alone]
    apart = []
    for step in range(SPEC.steps):
        before = stack.state.weights.clone()
        for i, single in enumerate(singles):
            for ours, theirs in zip(single.state, stack.state, strict=True):
                ours.copy_(theirs[i : i + 1])
        for trial in (together, *alone):
            trial.advance(step + 1)
        torch.testing.assert_close(
            torch.cat([single.optimizer.loss for single in singles]), stack.optimizer.loss, rtol=1e-5, atol=0
        )
        moved, moved_alone = (w - before for w in (stack.state.weights, torch.cat([s.state.weights for s in singles])))
        apart.append((moved_alone - moved).norm(dim=1) / moved.norm(dim=1))
    assert {trial.graph for trial in (together, *alone)} == {"whole step"}
    assert float(torch.stack(apart).median(dim=0).values.max()) <= 1e-2


@pytest.mark.parametrize("heads", [1, 2])
def test_stacked_flash_attention_with_one_head(heads: int) -> None:
    spec = replace(SPEC, steps=40, precision="bf16")
    for run in trained(TASK, model("attention", heads=heads), spec, graph=True, seeds=(1, 2, 3)).results(0):
        (alone,) = trained(TASK, model("attention", heads=heads), spec, graph=True, seeds=(run.seed,)).results(0)
        assert run.final("train", "loss") == pytest.approx(alone.final("train", "loss"), rel=0.05)


def test_a_step_that_cannot_be_captured_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    losses = Stack.losses

    def looking(self: Stack, *rest: torch.Tensor) -> torch.Tensor:
        values = losses(self, *rest)
        assert float(values.sum().detach()) >= 0
        return values

    wanted = train(TASK, model("comba"), SPEC, [1, 2])
    monkeypatch.setattr(Stack, "losses", looking)
    with caplog.at_level(logging.WARNING, "deltalab"):
        result = train(TASK, model("comba"), SPEC, [1, 2])
    assert "without a CUDA graph" in caplog.text
    assert result.hardware["cuda_graph"].startswith("none: ")
    for run, other in zip(result.runs, wanted.runs, strict=True):
        assert run.final("train", "loss") == pytest.approx(other.final("train", "loss"), rel=1e-3)
    monkeypatch.undo()
    alone = train(TASK, model("comba"), SPEC, [1]).hardware
    assert alone["cuda_graph"] == "whole step", "nothing stays behind"
    assert alone["gpu"] in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout


def test_a_stack_that_does_not_fit_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    task = deltalab.get_task("mqar", length=256, pairs=16, vocab_size=512)
    spec, wide = replace(SPEC, batch_size=128), model("deltanet", vocab_size=512, d_model=128)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(task, wide, spec, [1])
    share = torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(min(1.0, 4 * share))
        with caplog.at_level(logging.WARNING, "deltalab"):
            results = train_together(task, [(wide, replace(spec, lr=lr)) for lr in (1e-3, 3e-3)], range(6))
        assert "halved" in caplog.text
        assert all(run.diverged_at is None for result in results for run in result.runs)
        torch.cuda.set_per_process_memory_fraction(share / 4)
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError, match=r"single run of rule 'deltanet'.* it asked for [\d.]+ .iB"):
            train(task, wide, spec, [1])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_members_diverge_and_end_apart() -> None:
    wild = replace(SPEC, lr=1e30, clip=0.0)
    calm, mad, ended = train_together(
        TASK,
        [(model("comba"), spec) for spec in (SPEC, wild, SPEC)],
        [1, 2],
        watch=lambda member, step, runs: (member, step) == (2, 6),
    )
    assert all(run.diverged_at is None for run in calm.runs)
    assert all(run.diverged_at is not None for run in mad.runs)
    assert {step for run in ended.runs for split, _, step, _ in run.metrics if split == "train"} == {6}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["each backward at once", "all backwards at the end"])
def test_graphs_of_blocks_give_the_gradients_of_blocks(autocast: bool, late: bool) -> None:
    """Over batches whose gradients add up, of which a smaller one takes no graph."""
    batches = [torch.randint(0, 32, (rows, 65), device="cuda") for rows in (4, 3, 4)]

    def gradients(graphed: bool) -> list[torch.Tensor]:
        net = deltalab.build_model(model("comba", layers=3)).cuda()
        if graphed:
            net.graph_blocks()
        losses = []
        for tokens in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                losses.append(net.loss(tokens[:, :-1], tokens[:, 1:]))
            if not late:
                losses[-1].backward()
        if late:
            torch.stack(losses).sum().backward()
        assert (net.graphs is not None and net.graphs.captured is not None) == graphed
        grads = [parameter.grad for parameter in net.parameters()]
        return [*losses, *[grad for grad in grads if grad is not None]]

    for graph, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(graph, other, rtol=2e-2 if autocast else 1e-3, atol=1e-4)
