"""A plan counts every model exactly, times few of them, and says what its times rest on."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.folders import ROOT

import deltalab
from deltalab import InputError, fast_weights
from deltalab.models import costs
from deltalab.models.costs import CostCounter
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.models.start import Normal
from deltalab.study.forecast import arm_times, step_time
from deltalab.study.forecast import estimate as estimates
from deltalab.study.forecast.estimate import Effect, Estimate, estimate
from deltalab.study.forecast.step_time import Training, gpu_rates, gpu_step
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.study_file import load_study
from deltalab.training.spec import TrainSpec
from deltalab.training.trainer import LockStep

THROUGHPUT = ROOT / "benchmarks" / "throughput_h200.json"
COMBA = ModelSpec(rule="comba", vocab_size=40, d_model=16, layers=3, heads=2, chunk_size=8)


def planned(study: str, profile: str | None = None) -> Plan:
    return make_plan(load_study(ROOT / "studies" / f"{study}.yaml", profile=profile), profile=profile)


def printed(found: Estimate) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(found.to_rich())
    return capture.get()


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[ModelSpec]:
    """The models of all trainers that a plan makes."""
    made: list[ModelSpec] = []

    class Counted(LockStep):
        def __init__(self, task: Any, members: Any, *rest: Any, **given: Any) -> None:
            made.append(members[0][0])
            super().__init__(task, members, *rest, **given)

    monkeypatch.setattr(step_time, "LockStep", Counted)
    return made


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize(
    "model",
    [
        COMBA,
        replace(COMBA, tie_embeddings=False, mlp=False, conv=0, output_gate=False),
        replace(COMBA, block="mamba", expand_v=2.0),
        replace(COMBA, readout="last"),
        replace(COMBA, attention=(1,)),
        replace(COMBA, attention=(0, 2), window=20),
        replace(COMBA, block="mamba", attention=(3,)),
        replace(COMBA, rule="attention"),
        replace(COMBA, qk_heads=1, rope=True, qk_norm=True, token_shift=True),
        replace(COMBA, output_norm="group", output_gate="silu", gate_rank=3),
        replace(COMBA, rule="attention", kv_heads=1, rope=True, conv=0, output_norm=False, output_gate=False),
        replace(COMBA, layers=("rule", {"name": "attention", "layer": {"kv_heads": 1, "rope": True}}, "gla", "rule")),
        replace(COMBA, layers=("rule", "kda"), block="mamba"),
        replace(COMBA, rule="gka"),
        replace(COMBA, rule="kda"),
    ],
    ids=str,
)
def test_parameters_and_state_are_those_of_the_whole_model(model: ModelSpec, length: int) -> None:
    network, found = build_model(model), CostCounter().costs(model, length)
    assert found.parameters == sum(p.numel() for p in network.parameters())
    assert found.cache == network.cache_size(length)


@pytest.mark.parametrize("length", [8, 40])
@pytest.mark.parametrize("rule", deltalab.list_rules())
def test_costs_are_those_of_operators_that_are_all_called(
    rule: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count without numbers finds the form of a result once; one that calls every operator finds the same."""
    model = replace(COMBA, rule=rule, conv=4, mlp=True, rope=rule == "attention")
    monkeypatch.setattr(costs, "MOST_COMPUTED", 0)
    monkeypatch.setattr(costs, "_forms", costs._Forms())
    found = CostCounter().costs(model, length)
    monkeypatch.setattr(costs, "_forms", costs._plain)
    assert found == CostCounter().costs(model, length)


@pytest.mark.parametrize("rule", ["miras", "titans", "ttt_linear", "ttt_mlp", "reformer"])
def test_the_first_count_of_a_process_is_that_of_later_ones(rule: str) -> None:
    """What a rule makes once in a process, such as start weights and hashes, is no cost of a pass."""
    fast_weights._start.cache_clear()
    sys.modules["deltalab_rules.reformer"].rotations.cache_clear()
    counts = [CostCounter().costs(replace(COMBA, rule=rule), 8) for _ in range(2)]
    assert counts[0] == counts[1]


def test_start_weights_of_a_large_state_are_made_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.Tensor, "normal_", lambda x, *of, **given: x if x.is_meta else pytest.fail("drew numbers")
    )
    model = replace(COMBA, rule={"name": "ttt_linear"}, d_model=8, heads=1, key_dim=4096, layers=1)
    assert CostCounter().costs(model, 8).cache.state >= 4096**2


def test_a_form_is_that_of_the_types_of_the_numbers() -> None:
    forms, whole = costs._Forms(), torch.ones(2, dtype=torch.long, device="meta")
    with torch.no_grad():
        results = [forms(torch.ops.aten.mul.Tensor, (whole, number), {}) for number in (1, 1.0, 1)]
    assert [one.dtype for one in results] == [torch.long, torch.float32, torch.long]


def test_a_change_in_place_leaves_a_known_form_as_it_is() -> None:
    forms, x = costs._Forms(), torch.ones(2, 3, device="meta")
    with torch.no_grad():
        for _ in range(3):
            assert forms(torch.ops.aten.exp.default, (x,), {}).unsqueeze_(0).shape == (1, 2, 3)


@pytest.mark.parametrize("rank", ["q_rank", "kv_rank", "gate_rank"])
def test_a_block_with_a_large_rank_is_counted_without_numbers(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*of: object) -> None:
        raise AssertionError("drew numbers that nobody reads")

    model = replace(COMBA, d_model=64, **{rank: 2**16})
    monkeypatch.setattr(Normal, "__call__", drawn)
    assert CostCounter().costs(model, 8).parameters > costs.MOST_COMPUTED


def test_a_block_with_a_large_state_is_counted_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first operator that writes such a state would take its memory before it is counted."""
    model = replace(COMBA, d_model=8, heads=1, key_dim=4096)
    monkeypatch.setattr(Normal, "__call__", lambda *of: pytest.fail("drew numbers that nobody reads"))
    assert CostCounter().costs(model, 8).cache.state == 3 * 4096**2


def test_an_image_is_counted_without_numbers_once_its_pass_writes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(COMBA, patches=(8, 8, 4), readout="position")
    found, devices = CostCounter().costs(model, 64), []
    monkeypatch.setattr(costs, "MOST_WRITTEN", 1000)
    count = costs._count_on
    monkeypatch.setattr(costs, "_count_on", lambda device, *of: devices.append(device.type) or count(device, *of))
    written = {"written_per_token": 0.0}  # PyTorch has other operators without numbers
    assert replace(CostCounter().costs(model, 64), **written) == replace(found, **written)
    assert devices == ["cpu", "meta"]


def test_a_rule_of_too_many_calls_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of other widths call operators as often; another rule, chunk or number of tokens does not."""
    monkeypatch.setattr(costs, "MOST_CALLS", 300)
    sizer, endless = CostCounter(), replace(COMBA, rule={"name": "gka", "iterations": 1000})
    for model, length, built in (
        (endless, 16, 1),
        (replace(endless, mlp_width=24), 16, 1),
        (replace(endless, key_dim=4), 16, 1),
        (replace(endless, chunk_size=4), 16, 2),
        (endless, 12, 3),
        (replace(endless, rule={"name": "gka", "iterations": 999}), 12, 4),
        (replace(COMBA, beside={"name": "gka", "iterations": 1000}), 12, 5),
    ):
        with pytest.raises(InputError, match=f"over {length} tokens takes over 300 calls"):
            sizer.costs(model, length)
        assert sizer.built == built


def test_equal_blocks_are_counted_once() -> None:
    sizer = CostCounter()
    for layers in (2, 8):
        for vocabulary in (16, 8192):
            for length in (64, 512):
                sizer.costs(replace(COMBA, layers=layers, vocab_size=vocabulary), length)
    assert sizer.built == 1


@pytest.mark.slow(keep="0.0-1")
@pytest.mark.parametrize(("seconds", "timed"), [(0.0, 1), (1e9, 8)])
def test_arms_are_timed_while_the_time_for_it_lasts(
    seconds: float, timed: int, trainers: list[ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm_times, "TIMING_SECONDS", seconds)
    found = estimate(planned("mqar_capacity"))
    assert len(trainers) == timed
    assert all(arm.seconds is not None and arm.seconds > 0 for arm in found.arms)
    assert found.where == "this machine"
    assert f"{timed} of 8 arms" in found.how


@pytest.mark.slow
def test_one_arm_of_each_rule_is_timed_first(trainers: list[ModelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_times, "TIMING_SECONDS", 1e9)
    estimate(planned("mqar_capacity"))
    names = [model.make_rule().name for model in trainers]
    assert names[:3] == ["deltanet", "linear_attention", "mamba2"]
    assert trainers[0].key_dim == 16, "the base's, not one of its variants'"


def test_a_model_of_many_blocks_is_not_timed(trainers: list[ModelSpec]) -> None:
    deep = load_study(
        ROOT / "studies" / "mqar_capacity.yaml", overrides={"base.model.layers": step_time.MOST_TIMED_BLOCKS + 1}
    )
    found = estimate(make_plan(deep))
    assert not trainers
    assert found.how == "No time is known: a step of each arm takes more than a plan spends on timing it."


def test_a_long_window_is_counted_without_numbers_and_not_timed(
    trainers: list[ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = list[str]()
    count_on = costs._count_on

    def told(device: torch.device, model: ModelSpec, length: int | None) -> costs._Blocks:
        devices.append(device.type)
        return count_on(device, model, length)

    monkeypatch.setattr(costs, "_count_on", told)
    rule = {"name": "window_linear", "window": 2**20}
    long = load_study(ROOT / "studies" / "mqar_capacity.yaml", overrides={"base.rule": rule, "arms": {}})
    found = estimate(make_plan(long))
    assert not trainers
    assert devices == ["meta"]
    assert found.arms[0].state_size is not None
    assert found.arms[0].state_size > 2**20


def test_parameters_that_do_nothing_are_looked_for_until_enough_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("quickstart")
    known = [arm.dead_parameters for arm in estimate(plan).arms]
    assert None not in known
    monkeypatch.setattr(estimates, "MOST_WRITTEN", 1000)
    found = estimate(plan)
    assert {arm.dead_parameters for arm in found.arms} == {None}
    said = [note for note in found.notes if "are not counted" in note]
    assert [note.split(":")[0] for note in said] == [", ".join(dict.fromkeys(arm.arm for arm in found.arms))]


def test_nothing_is_timed_for_a_gpu(no_gpu: None, trainers: list[ModelSpec]) -> None:
    found = estimate(planned("mqar_capacity", "paper"))
    assert not trainers
    kind = next(iter(gpu_rates()))
    assert found.where == f"an {kind}"
    assert found.how.startswith(f"No GPU here: times assume an {kind}.")
    assert found.seconds is not None
    assert found.seconds == pytest.approx(sum(arm.seconds or 0 for arm in found.arms))
    assert f"on an {kind} with 1 at a time" in printed(found)


def test_the_gpu_that_is_here_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("mqar_capacity", "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    totals = []
    for kind in gpu_rates():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda kind=kind: kind)
        found = estimate(plan)
        assert (found.where, "No GPU here" in found.how) == (f"an {kind}", False)
        totals.append(found.seconds)
    assert len(set(totals)) == len(gpu_rates())


def test_the_time_on_an_unmeasured_gpu_is_unknown(trainers: list[ModelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce 256")
    found = estimate(planned("mqar_capacity", "gpu"))
    assert not trainers
    assert found.seconds is None
    assert {arm.seconds for arm in found.arms} == {None}
    assert found.how == f"No rate was measured on NVIDIA GeForce 256, only on {', '.join(gpu_rates())}."
    assert f"{found.runs} runs, for a time that is unknown" in printed(found)
    assert json.loads(found.to_json())["seconds"] is None


def test_sizes_of_one_spread_share_a_line(no_gpu: None) -> None:
    effect = Effect("a", "accuracy", 0.2, 0.0, None, 0.1, "measured on proxies")
    tasks = ["a", "b", "c", "d", "e"]
    alike = [*(replace(effect, task=task) for task in tasks), replace(effect, task="f", effect=0.3)]
    text = " ".join(printed(replace(estimate(planned("mqar_capacity")), effects=alike)).split())
    assert "On a, b, c, 2 more that is 0.2 in accuracy" in text
    assert "On f that is 0.3 in accuracy" in text


def test_a_plan_of_many_tasks_has_a_row_for_each_arm(no_gpu: None) -> None:
    plan = estimate(planned("quickstart"))
    sizes = {"state_size": 30, "kv_cache": 10, "conv_cache": 0, "seconds": 60.0}
    cost = replace(plan.arms[0], arm="base", change="", parameters=1000, **sizes)
    costs = [replace(cost, task=f"t{n}", parameters=1000 + n, state_size=30 + n % 2) for n in range(40)]
    costs += [replace(each, arm="other", change=f"heads={n}", state_size=None) for n, each in enumerate(costs)]
    found = replace(plan, arms=costs)
    rows = [" ".join(line.split()) for line in printed(found).splitlines()]
    assert rows[1] == "40 tasks base 1,000 to 1,039 20 to 21 10 40 min"
    assert rows[2] == "40 tasks other differs by task 1,000 to 1,039 not known 10 40 min"
    assert rows[3] == "Each row is an arm on all its tasks; --json has each task."
    assert len(json.loads(found.to_json())["arms"]) == 80
    few = printed(replace(plan, arms=costs[:32] + costs[40:72])).splitlines()
    assert sum(line.startswith("t") for line in few[1:65]) == 64, "each row stands by itself"


def training(d_model: int, length: int, batch: int, vocabulary: int) -> Training:
    """As benchmarks/throughput.py trains."""
    task = deltalab.get_task("mqar", length=length, pairs=length // 16, vocab_size=vocabulary)
    heads = max(1, d_model // 64)
    model = ModelSpec(rule="gated_deltanet", vocab_size=vocabulary, d_model=d_model, layers=2, heads=heads, mlp=False)
    spec = TrainSpec(steps=10, batch_size=batch, lr=1e-3)
    return Training(task, model, spec, 1, CostCounter().costs(model, length).flops_per_token)


def test_shipped_rates_are_those_of_the_benchmark() -> None:
    rows = json.loads(THROUGHPUT.read_text())["rows"]
    large = [row for row in rows if row.get("rule") == "gated_deltanet" and row["stack"] >= 16]
    measured = {row["what"]: row for row in large}.values()
    assert len(measured) == 4
    for row in measured:
        shape = row["shape"]
        one = training(*(shape[name] for name in ("d_model", "length", "batch", "vocabulary")))
        # At d 64 there are two rows, and the rate is that of the larger batch.
        close = 0.01 if shape["batch"] != 128 or shape["d_model"] != 64 else 0.3
        assert gpu_step(one, "NVIDIA H200") == pytest.approx(row["ms_per_trial_and_step"] / 1e3, rel=close)


def test_a_rate_between_two_widths_lies_between_theirs() -> None:
    def rate(width: int) -> float:
        one = training(width, 64, 128, 64)
        return one.flops / gpu_step(one, "NVIDIA H200")

    found = [rate(width) for width in (64, 96, 128, 192, 256)]
    assert found == sorted(set(found))
    assert rate(32) == pytest.approx(found[0]), "beyond the widths that were measured, that of the nearest"
    assert rate(512) == pytest.approx(found[-1])


def test_the_passes_over_finite_data_are_said_once(no_gpu: None) -> None:
    assert [line for line in estimate(planned("text", "paper")).notes if "passes" in line] == [
        "text: a run makes 1,492 passes over 4,393,403 tokens of training data"
    ]
    assert not [line for line in estimate(planned("niah", "gpu")).notes if "passes" in line]


def test_the_hours_of_gpus_have_a_price(no_gpu: None) -> None:
    plan = planned("comba_ablation", "gpu")
    found = estimate(plan, price=2.5)
    assert found.seconds is not None
    share = plan.spec.resources.gpu
    assert found.gpu_hours == pytest.approx(found.seconds * found.workers * share / 3600)
    assert f"{found.gpu_hours * 2.5:,.2f} at 2.5 an hour" in " ".join(printed(found).split())
    assert estimate(planned("quickstart")).gpu_hours is None
    with pytest.raises(InputError, match="--price is that of a GPU's hour"):
        estimate(planned("quickstart"), price=2.5)


def test_evaluations_at_several_lengths_are_counted_once_for_the_test() -> None:
    task = deltalab.get_task("text", length=64, times=[2, 4])
    spec = TrainSpec(steps=100, batch_size=16, lr=1e-2, evaluations=5, eval_batches=3)
    training = Training(task, COMBA, spec, 1, 1.0)
    # 5 validations of 3 batches and a test of 9 as long ones; a batch's forward pass is a third of a step.
    assert estimates._seconds(training, 1.0) == pytest.approx(100 + (5 * 3 + 9) / 3)


def test_a_model_that_fails_is_named_with_its_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("one\ntwo")

    patched: list[tuple[Any, str, Callable[..., Any]]] = [
        (CostCounter, "costs", fails),
        (arm_times, "timed_step", fails),
    ]
    for owner, name, planted in patched:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, planted)
            with pytest.raises(deltalab.InputError, match="arm 'base' does not run on task 'mqar': RuntimeError: one;"):
                estimate(planned("quickstart"))


def test_knobs_that_another_rule_lacks_are_no_change_to_it() -> None:
    study = {
        "name": "other",
        "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 16}},
        "base": {
            "rule": "algebra",
            "model": {"d_model": 16, "layers": 1, "heads": 1, "key_dim": 8},
            "train": {"steps": 2, "batch_size": 2, "lr": 1e-2, "evaluations": 1},
        },
        "arms": {"gla": {"rule": "gla", "model": {"key_dim": None}}},
        "seeds": 6,
    }
    _, arm = estimate(make_plan(load_study(study))).arms
    assert arm.change == "rule.name=gla, rule.g=gla_decay(tau=16, rank=16), model.key_dim=None"
    model = {"layers": 2, "value_residual": {"rank": 2}}  # a setting of one key, and no gate
    _, arm = estimate(make_plan(load_study({**study, "arms": {"gated": {"model": model}}}))).arms
    assert arm.change == "model.layers=2, model.value_residual={'rank': 2}"


def test_a_plan_counts_the_supernet_that_places_attention(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's speed: a step takes 2 s here, so that each part of the time follows from the study."""
    monkeypatch.setattr(arm_times, "timed_step", lambda training: 2.0)
    plan = planned("placement")
    found = estimate(plan, workers=2)
    assert found.placing is not None
    assert found.seconds is not None
    assert (found.placing.scored, found.placing.trained) == (15, 6), "two layers of six; 3 best and 3 others"
    assert found.placing.supernet == 2.0 * 150
    task, train = plan.tasks["text"], plan.job(plan.arms[0], "confirm", 0, {}).specs[1]
    size, batches = task.evaluated(task, "validation", train.batch_size, train.eval_batches)
    assert found.placing.scoring == pytest.approx(15 * 2.0 * size * batches / train.batch_size / 3)
    base = found.arms[0].seconds
    assert base is not None
    parts = found.seconds + 6 * base / 2 + found.placing.supernet + found.placing.scoring
    assert found.placing.seconds == pytest.approx(parts)
    assert "deltalab place: one supernet trains for about 5" in printed(found)
    assert json.loads(found.to_json())["placing"]["scored"] == 15
    monkeypatch.setattr(arm_times, "timed_step", lambda training: None)
    unknown = estimate(plan, workers=2)
    assert unknown.placing is not None
    assert unknown.placing.seconds is None
    assert "for a time that is unknown" in printed(unknown).splitlines()[-1]


def test_a_plan_without_attention_to_place_says_nothing_of_a_supernet(no_gpu: None) -> None:
    assert estimate(planned("quickstart")).placing is None
