"""Training: a function of its configuration and seed, however it is interrupted and whoever trains beside it."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.nn.functional as F

import deltalab
from deltalab.errors import InputError
from deltalab.models.costs import CostCounter
from deltalab.models.layer import RuleLayer
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.ops.fused.loss import linear_cross_entropy
from deltalab.study.running.run import run_study_file
from deltalab.tasks import IGNORE, MQAR, Task
from deltalab.tasks.batches import TrainingBatches
from deltalab.training import device
from deltalab.training.evaluation import costs, counted_without_numbers
from deltalab.training.stack import Stack
from deltalab.training.train import RunResult, TrainSpec, TrialResult, save, train
from deltalab.training.trainer import LockStep

TASK = deltalab.get_task("mqar", length=16, pairs=2, vocab_size=16)
STUDY = """
name: tiny
task: {mqar: {length: 16, pairs: 2, vocab_size: 16}}
base:
  rule: comba
  model: {d_model: 16, layers: 1, heads: 1}
  train: {steps: 2, batch_size: 2, lr: 1e-2, evaluations: 1}
seeds: 1
"""
TINY = ModelSpec(rule="comba", vocab_size=16, d_model=16, layers=1, heads=1, chunk_size=16)
SPEC = TrainSpec(steps=12, batch_size=8, lr=1e-2, evaluations=4, eval_batches=2)


def spec(**given: Any) -> TrainSpec:
    return TrainSpec(**{**SPEC.__dict__, **given})


def assert_same(a: RunResult, b: RunResult) -> None:
    """Bit for bit, NaN included."""
    assert repr(a.metrics) == repr(b.metrics)
    assert (a.seed, a.diverged_at) == (b.seed, b.diverged_at)
    assert a.weights.keys() == b.weights.keys()
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def learned(run: RunResult) -> list[tuple[str, str, int, float]]:
    """What training and evaluation gave: the cost of a model is known however its training went."""
    return [metric for metric in run.metrics if metric[0] != "cost"]


@pytest.mark.slow
def test_it_learns_recall() -> None:
    result = train(TASK, TINY, spec(steps=250, batch_size=32, evaluations=5), [1, 2], test=True)
    for run in result.runs:
        curve = [value for split, name, _, value in run.metrics if (split, name) == ("validation", "loss")]
        assert curve[-1] < curve[0] / 2
        assert run.final("test", "accuracy") > 0.9 > 5 * TASK.chance
        assert run.final("test", "loss") != run.final("validation", "loss")


def test_metrics_are_at_evenly_spaced_steps_and_the_test_split_at_the_end_alone() -> None:
    run = train(TASK, TINY, SPEC, [1], test=True).runs[0]
    steps: dict[tuple[str, str], list[int]] = {}
    for split, name, step, value in run.metrics:
        assert math.isfinite(value)
        steps.setdefault((split, name), []).append(step)
    assert steps == {
        ("train", "loss"): [3, 6, 9, 12],
        **{("validation", name): [3, 6, 9, 12] for name in ("accuracy", "loss", "output_rms")},
        **{("test", name): [12] for name in ("accuracy", "loss", "output_rms")},
        **{
            ("cost", name): [12]
            for name in ("flops_per_token", "state_size", "kv_cache", "conv_cache", "dead_parameters")
        },
    }
    assert not any(split == "test" for split, *_ in train(TASK, TINY, SPEC, [1]).runs[0].metrics)


@dataclass(frozen=True, kw_only=True)
class Longer(MQAR):
    """Recall that is evaluated at its own length and at others."""

    labels: tuple[str, ...]

    def evaluations(self) -> dict[str, Task]:
        return {label: replace(self, length=int(label or self.length)) for label in self.labels}


def measured_at(*labels: str) -> dict[str, float]:
    result = train(Longer(length=16, pairs=2, vocab_size=16, labels=labels), TINY, SPEC, [1], test=True)
    return {name: value for split, name, _, value in result.runs[0].metrics if split == "test"}


def test_a_task_is_measured_at_every_length_that_it_names() -> None:
    plain = {name: value for split, name, _, value in train(TASK, TINY, SPEC, [1], test=True).runs[0].metrics}
    found = measured_at("16", "40", "24")
    names = {"accuracy", "loss", "output_rms"}
    assert found.keys() == names | {f"{name}@{length}" for name in names for length in (16, 24, 40)}
    for name in names:
        lengths = [found[f"{name}@{length}"] for length in (16, 24, 40)]
        assert lengths[0] == plain[name]
        assert len(set(lengths)) > 1
        assert found[name] == pytest.approx(sum(lengths) / 3)


def test_what_stands_under_no_label_is_the_plain_metric_alone() -> None:
    found, plain = measured_at("40", ""), measured_at("")
    assert plain.keys() == {"accuracy", "loss", "output_rms"}
    assert plain == {name: found[name] for name in plain}
    assert found["loss@40"] != found["loss"]


def test_a_run_that_is_not_finite_at_some_length_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: MQAR, batch: Any, logits: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return MQAR.measure(self, batch, logits * (math.inf if self.length == 40 else 1))

    monkeypatch.setattr(Longer, "measure", measure, raising=False)
    task = Longer(length=16, pairs=2, vocab_size=16, labels=("16", "40"))
    assert train(task, TINY, SPEC, [1]).runs[0].diverged_at == SPEC.evaluated_at()[0]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 11])
def test_the_last_evaluation_is_at_the_end_and_no_step_is_measured_twice(steps: int) -> None:
    for evaluations in range(1, steps + 1):
        at = spec(steps=steps, evaluations=evaluations).evaluated_at()
        assert len(set(at)) == evaluations
        assert at == sorted(at)
        assert at[0] >= 1
        assert at[-1] == steps


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_nothing() -> None:
    schedule = spec(steps=200, warmup=0.25, lr=3.0)
    rates = [schedule.learning_rate(step) for step in range(201)]
    assert rates[:50] == pytest.approx([3.0 * (i + 1) / 50 for i in range(50)])
    assert rates[50:] == pytest.approx([1.5 * (1 + math.cos(math.pi * i / 150)) for i in range(151)])
    assert spec(warmup=0).learning_rate(0) == SPEC.lr
    assert spec(warmup=1).learning_rate(SPEC.steps - 1) == SPEC.lr


class Killed(Exception):
    pass


def interrupted(at: int, file: Path, seeds: list[int], **given: Any) -> TrialResult:
    """Trains up to the evaluation at a step, is cut off there, and goes on in a new `LockStep`."""

    def cut(step: int, so_far: list[RunResult]) -> None:
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        train(TASK, TINY, spec(**given), seeds, test=True, checkpoint=file, checkpoint_seconds=0, watch=cut)
    assert file.exists()
    return train(TASK, TINY, spec(**given), seeds, test=True, checkpoint=file)


@pytest.mark.slow(keep="12")
@pytest.mark.parametrize("at", [3, 9, 12])
def test_a_continued_training_equals_an_uninterrupted_one(at: int, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "trial.pt"
    whole = train(TASK, TINY, SPEC, [1, 2], test=True)
    resumed = interrupted(at, file, [1, 2])
    for a, b in zip(whole.runs, resumed.runs, strict=True):
        assert_same(a, b)
    assert not list(file.parent.iterdir()), "the checkpoint is gone at the end"


def test_it_goes_on_from_the_checkpoint_and_does_not_start_again(tmp_path: Path) -> None:
    file = tmp_path / "trial.pt"
    trained = []

    class Counted(LockStep):
        def advance(self, until: int, split: str | None = None) -> None:
            trained.append(until)
            super().advance(until, split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltalab.training.train.LockStep", Counted)
        interrupted(6, file, [1])
    assert trained == [3, 6, 9, 12]


def test_checkpoints_take_no_more_than_a_twentieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock in which an evaluation takes 4 s and a save 1 s: one every 20 s, and not every 5."""
    now, saved = [0.0], []

    def slow(state: object, file: Path) -> None:
        saved.append(now[0])
        now[0] += 1

    def evaluated(step: int, so_far: list[RunResult]) -> None:
        now[0] += 4

    monkeypatch.setattr("deltalab.training.train.time.monotonic", lambda: now[0])
    monkeypatch.setattr("deltalab.training.train.save", slow)
    train(TASK, TINY, spec(steps=16, evaluations=16), [1], checkpoint=tmp_path / "trial.pt", watch=evaluated)
    assert saved == [8, 29, 50]


def test_a_diverged_seed_stays_diverged_when_the_training_goes_on(tmp_path: Path) -> None:
    whole = train(TASK, TINY, spec(lr=1e30, clip=0.0), [1, 2], test=True)
    assert all(run.diverged_at is not None for run in whole.runs)
    file = tmp_path / "trial.pt"
    resumed = interrupted(3, file, [1, 2], lr=1e30, clip=0.0)
    for a, b in zip(whole.runs, resumed.runs, strict=True):
        assert repr(a.metrics) == repr(b.metrics)
        assert a.diverged_at == b.diverged_at


def test_a_checkpoint_that_is_half_written_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trial.pt"
    save = torch.save

    def torn(state: object, to: IO[bytes]) -> None:
        save(state, to)
        to.truncate(100)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", torn)
    with pytest.raises(OSError, match="No space"):
        train(TASK, TINY, SPEC, [1], checkpoint=file, checkpoint_seconds=0)
    assert not file.exists()


def test_a_checkpoint_that_is_damaged_is_thrown_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "trial.pt"
    with pytest.raises(KeyboardInterrupt):
        train(TASK, TINY, SPEC, [1], checkpoint=file, checkpoint_seconds=0, watch=interrupt)
    file.write_bytes(file.read_bytes()[:1000])
    assert_same(train(TASK, TINY, SPEC, [1], checkpoint=file).runs[0], train(TASK, TINY, SPEC, [1]).runs[0])
    assert f"{file} is damaged, so the training starts over" in caplog.text


def test_what_a_killed_process_left_of_a_file_goes_with_the_next_save(tmp_path: Path) -> None:
    for name in ("trial.123.partial", "other.123.partial"):
        (tmp_path / name).touch()
    save({"a": torch.ones(2)}, tmp_path / "trial.pt")
    assert {file.name for file in tmp_path.iterdir()} == {"trial.pt", "other.123.partial"}


def interrupt(step: int, runs: list[RunResult]) -> None:
    raise KeyboardInterrupt


def test_seeds_that_are_not_stacked_equal_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.training.trainer.SATURATED", {"cpu": 0})
    together = train(TASK, TINY, SPEC, [1, 7, 2], test=True)
    for run in together.runs:
        assert_same(run, train(TASK, TINY, SPEC, [run.seed], test=True).runs[0])
    assert together.runs[0].final("train", "loss") != together.runs[1].final("train", "loss")


def drawn(model: ModelSpec, given: TrainSpec) -> tuple[list[tuple[Any, ...]], list[torch.Tensor]]:
    """What training and evaluation are given: the addresses of evaluations, and the inputs of training."""
    measured, trained = [], []
    with pytest.MonkeyPatch.context() as patch:
        batch, draw = MQAR.batch, TrainingBatches.draw

        def recorded(self: MQAR, split: str, size: int, seed: int, step: int, device: Any = "cpu") -> Any:
            if split != "train":
                measured.append((split, size, seed, step))
            return batch(self, split, size, seed, step, device)

        def recorded_draw(self: TrainingBatches, row: torch.Tensor) -> Any:
            trained.append(draw(self, row)[0])
            return draw(self, row)

        patch.setattr(MQAR, "batch", recorded)
        patch.setattr(TrainingBatches, "draw", recorded_draw)
        train(TASK, model, given, [1, 2], test=True)
    return measured, trained


def test_data_depend_on_the_seed_and_the_step_and_on_nothing_of_the_model() -> None:
    wide = ModelSpec(rule="deltanet", vocab_size=16, d_model=32, layers=2, heads=2)
    (measured, trained), (again, others) = drawn(TINY, SPEC), drawn(wide, spec(lr=3e-2))
    for step, (one, other) in enumerate(zip(trained, others, strict=True)):
        assert torch.equal(one, other)
        for inputs, seed in zip(one, (1, 2), strict=True):
            assert torch.equal(inputs, TASK.batch("train", SPEC.batch_size, seed, step).inputs)
    assert len(trained) == SPEC.steps
    assert len({tuple(inputs.flatten().tolist()) for both in trained for inputs in both}) == 2 * SPEC.steps
    # Whatever the run's seed, the evaluation is on the same batches, and these are drawn once.
    assert measured == again == [(split, 8, 0, i) for split in ("validation", "test") for i in range(2)]


def test_where_logits_are_asked_for_is_where_labels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build_model(TINY, seed=3), TASK.batch("train", SPEC.batch_size, 3, 0)
    scored = batch.targets != IGNORE
    with torch.no_grad():
        full = model(batch.inputs)
        torch.testing.assert_close(model(batch.inputs, where=scored), full[scored], rtol=1e-6, atol=1e-6)
    loss = F.cross_entropy(full.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
    made = []

    def recorded(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        made.append(x.shape[1])
        return linear_cross_entropy(x, *rest, **options)

    monkeypatch.setattr("deltalab.training.stack.linear_cross_entropy", recorded)
    (run,) = train(TASK, TINY, spec(steps=1, evaluations=1), [3]).runs
    assert run.final("train", "loss") == pytest.approx(float(loss), rel=1e-6)
    assert made == [int(scored.sum())] == [2 * SPEC.batch_size]


def test_divergence_is_reported_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN planted in one seed's layer at one step: that seed stops there, the others do not notice."""
    monkeypatch.setattr("deltalab.training.trainer.SATURATED", {"cpu": 0})
    alone = train(TASK, TINY, SPEC, [1], test=True).runs[0]
    forward = RuleLayer.advance
    calls = {"n": 0}

    def planted(self: RuleLayer, x: torch.Tensor, *rest: Any, **how: Any) -> Any:
        y, cache = forward(self, x, *rest, **how)
        if self.training and torch.is_grad_enabled():
            calls["n"] += 1
            if calls["n"] == 3 + 3 + 3 + 2:  # the fifth update of the second seed
                y = y * math.nan
        return y, cache

    monkeypatch.setattr(RuleLayer, "advance", planted)
    good, bad = train(TASK, TINY, SPEC, [1, 2], test=True).runs
    assert bad.diverged_at == 4
    assert math.isnan(bad.final("test", "accuracy"))
    assert math.isnan(bad.final("train", "loss"))
    assert {(split, step) for split, _, step, _ in learned(bad)} == {("train", 3), ("validation", 3)}
    assert_same(good, alone)
    assert calls["n"] == 12 + 5, "a diverged seed costs nothing more on a CPU"


def test_all_seeds_diverged_ends_the_training() -> None:
    seen = []
    result = train(
        TASK,
        TINY,
        spec(lr=1e6, weight_decay=0.1, clip=0.0, warmup=0.0),
        [1, 2],
        test=True,
        watch=lambda step, so_far: seen.append(step),
    )
    for run in result.runs:
        assert run.diverged_at is not None
        assert 0 <= run.diverged_at < SPEC.steps
        assert not [metric for metric in learned(run) if metric[2] > run.diverged_at]
        assert not [metric for metric in learned(run) if metric[0] == "test"]
    assert seen[-1] < SPEC.steps


def test_a_metric_that_is_not_finite_is_divergence_and_no_metric() -> None:
    trial = LockStep(TASK, [(TINY, SPEC)], [1, 2])
    trial.advance(3)
    ((_, stack),) = trial.stacks
    stack.state.weights[1] = math.nan
    trial.measure("validation")
    assert [run.diverged_at for run in trial.runs] == [None, 3]
    assert all(math.isfinite(value) for run in trial.runs for *_, value in run.metrics)
    trial.advance(6)
    assert {split for split, *_ in trial.runs[0].metrics} == {"train", "validation"}
    assert trial.runs[1].metrics == [metric for metric in trial.runs[1].metrics if metric[0] == "train"]


@pytest.mark.slow
def test_the_time_that_an_evaluation_takes_is_not_the_training_s(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(MQAR):
        def measure(self, batch: Any, logits: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
            time.sleep(3)
            return super().measure(batch, logits)

    trial = LockStep(Slow(length=16, pairs=2, vocab_size=TASK.vocab_size), [(TINY, spec(eval_batches=1))], [1])
    trial.advance(1, "validation")
    assert 0 < trial.seconds < 3


@pytest.mark.usefixtures("in_process")
def test_only_a_study_s_worker_changes_how_the_process_frees_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("ctypes.CDLL", lambda library: loaded.append(library))
    device.keep_freed_memory.cache_clear()
    try:
        train(TASK, TINY, SPEC, [1])
        assert None not in loaded  # torch may load NVIDIA's library
        study = tmp_path / "study.yaml"
        study.write_text(STUDY)
        result = run_study_file(study, db=tmp_path / "ledger.db", executor="inline")
    finally:
        device.keep_freed_memory.cache_clear()
    assert result.failed == 0
    assert loaded.count(None) == 1


def test_a_metric_that_nothing_counted_towards_has_no_value() -> None:
    task = deltalab.get_task("text", length=2)  # too short for a bigram to come again
    model = ModelSpec(rule="linear_attention", vocab_size=256, d_model=8, layers=1, heads=1)
    run = train(task, model, spec(steps=1, evaluations=1), [1]).runs[0]
    assert {name for _, name, *_ in learned(run)} == {
        *("loss", "bits_per_byte", "output_rms"),
        *("bits_per_byte_quarter_2", "bits_per_byte_quarter_4"),  # two positions have no quarter 1 and 3
    }
    assert math.isnan(run.final("validation", "recall_bits_per_byte"))


def test_what_a_watcher_raises_ends_the_training() -> None:
    seen: list[tuple[int, list[int]]] = []

    def watch(step: int, so_far: list[RunResult]) -> None:
        seen.append((step, [run.metrics[-1][2] for run in so_far]))
        if step == 6:
            raise Killed

    with pytest.raises(Killed):
        train(TASK, TINY, SPEC, [1, 2], watch=watch)
    assert seen == [(3, [3, 3]), (6, [6, 6])], "every seed is at the step that it is judged at"


@pytest.mark.slow
def test_bf16_runs_on_a_cpu_over_fp32_weights() -> None:
    run = train(TASK, TINY, spec(steps=60, batch_size=16, precision="bf16"), [1], test=True).runs[0]
    assert all(value.dtype == torch.float32 for value in run.weights.values())
    losses = [value for split, name, _, value in run.metrics if (split, name) == ("train", "loss")]
    assert losses[-1] < losses[0]
    full = train(TASK, TINY, spec(steps=60, batch_size=16), [1], test=True).runs[0]
    assert run.metrics != full.metrics


def test_cost_is_that_of_the_model() -> None:
    result = train(TASK, TINY, SPEC, [1, 2])
    for run in result.runs:
        assert run.final("cost", "state_size") == result.state_size
        assert run.final("cost", "flops_per_token") > 2 * 16 * (3 * 16 + 2 * 16)  # q, k, v; gate and output
    assert result.parameters == sum(value.numel() for value in result.runs[0].weights.values())
    assert result.state_size == 16 * 16
    assert result.runs[0].final("cost", "conv_cache") == 3 * 48
    assert result.tokens_per_second > 0
    assert result.hardware["device"] == "CPU, 1 thread(s)"


def test_time_in_which_other_work_has_the_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Stack.advance

    def interrupted(*given: Any) -> None:
        time.sleep(0.5)
        advance(*given)

    monkeypatch.setattr(Stack, "advance", interrupted)
    result = train(TASK, TINY, replace(SPEC, evaluations=1), [1])
    assert float(result.hardware["core_share"]) < 0.8
    assert result.tokens_per_second > SPEC.steps * SPEC.batch_size * TASK.length / 0.5


@pytest.mark.slow
@pytest.mark.parametrize("rule", deltalab.list_rules())
def test_a_gpu_counts_the_costs_that_a_cpu_does(rule: str) -> None:
    model = build_model(replace(TINY, rule=rule, heads=2), seed=0)
    assert counted_without_numbers(model, 24, 0) == costs(model, 24, 0)[:-1], "dead parameters need numbers"


def test_the_products_of_attention_count() -> None:
    model = build_model(replace(TINY, rule="attention", heads=2), seed=0)
    (_, _, _, short), *_ = costs(model, 16, 0)
    (_, _, _, long), *_ = costs(model, 64, 0)
    assert long - short == 2 * 2 * (64 - 16) * TINY.d_model, "each token's query with all keys, and weights with values"
    assert CostCounter().costs(model.spec, 64).flops_per_token == long


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"steps": -1}, "train.steps"),
    ({"steps": 0}, "train.steps"),
    ({"steps": True}, "train.steps"),
    ({"steps": 10.0}, "train.steps"),
    ({"steps": "10"}, "train.steps"),
    ({"steps": None}, "train.steps"),
    ({"batch_size": 0}, "train.batch_size"),
    ({"eval_batches": 0}, "train.eval_batches"),
    ({"evaluations": 13}, "exceed steps"),
    ({"lr": -1e-3}, "train.lr"),
    ({"lr": True}, "train.lr"),
    ({"lr": "1e-3"}, "train.lr"),
    ({"lr": math.nan}, "train.lr"),
    ({"lr": math.inf}, "train.lr"),
    ({"clip": math.inf}, "train.clip"),
    ({"weight_decay": -0.1}, "train.weight_decay"),
    ({"warmup": 1.5}, "train.warmup"),
    ({"betas": 0.9}, "train.betas"),
    ({"betas": None}, "train.betas"),
    ({"betas": [0.9]}, "train.betas"),
    ({"betas": [0.9, 1]}, "train.betas"),
    ({"betas": [0.9, "x"]}, "train.betas"),
    ({"precision": "fp16"}, "train.precision"),
    ({"device": "gpu"}, "did you mean 'cpu'"),
    ({"schedule": "wsd", "stable": 1.5}, "train.stable must be a finite number from 0 to 1"),
    ({"schedule": "wsd", "decay": "sqr"}, "did you mean 'sqrt'"),
    ({"stable": 0.8}, "train.stable has no effect on a cosine schedule, only on wsd"),
    ({"schedule": "linear", "decay": "sqrt"}, "train.decay has no effect on a linear schedule, only on wsd"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=lambda x: str(x))
def test_what_makes_no_training_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        spec(**given)


def test_numbers_that_are_equal_are_one_training() -> None:
    assert repr(spec(lr=1, clip=2, betas=[0, 0.5])) == repr(spec(lr=1.0, clip=2.0, betas=(0.0, 0.5)))


@pytest.mark.parametrize("seeds", [[], [1, 1]])
def test_seeds_are_distinct_and_at_least_one(seeds: list[int]) -> None:
    with pytest.raises(InputError, match="distinct"):
        train(TASK, TINY, SPEC, seeds)


def test_a_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="vocab_size 32"):
        train(TASK, ModelSpec(rule="comba", vocab_size=32), SPEC, [1])


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match="no GPU"):
        train(TASK, TINY, spec(device="cuda"), [1])
