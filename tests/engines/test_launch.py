"""Training of exported folders: what the launcher refuses, the stream of batches, and the five commands at toy size."""

import hashlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from deltalab.data.token_shards import Packed
from deltalab.engines import checkpoints, launch, machines, preparation
from deltalab.engines.deltalab_train.batches import IGNORE, Batches, Rows, held_out
from deltalab.engines.machines import Nodes
from deltalab.engines.preparation import Launch, prepare
from deltalab.engines.progress_line import Progress
from deltalab.engines.torchtitan import files
from deltalab.errors import InputError
from deltalab.export.recipe import paper_recipe
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.models.model import Model, build_model, parameter_groups
from deltalab.models.spec import ModelSpec
from deltalab.training.recipe_keys import micro_batch, with_defaults

STUDY = {
    "name": "s",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "comba",
        "model": {"d_model": 16, "layers": 1, "heads": 2, "base_width": 4},
        "train": {"steps": 4, "batch_size": 4, "lr": 0.01, "evaluations": 2, "eval_batches": 1},
    },
    "arms": {"wide": {"model": {"conv": 2}}},
    "seeds": 1,
}
RECIPE = with_defaults({"steps": 4, "batch": {"sequences": 8, "length": 16}, "validation": {"sequences": 5}})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packed bytes and an exported model for both engines."""
    lab = tmp_path_factory.mktemp("lab")
    words = "".join(f"line {n}: {'abcdefghij'[n % 10] * (n % 7 + 3)}\n\n" for n in range(600))
    (lab / "text.txt").write_text(words)
    platform(lab, "data", "pack", "text.txt", "--out", "packed", "--separator", "\n\n", "--split", SPLIT)
    spec = ModelSpec.of({"rule": "comba", "vocab_size": 256, "d_model": 16, "heads": 2, "layers": 1, "base_width": 4})
    source = Source(spec, None, paper_recipe(spec), {"study": "s", "arm": "a"}, {}, "bytes")
    given = ["recipe.steps=4", "recipe.batch.sequences=8", "recipe.optimizer.lr=0.02"]
    export(source, lab / "model", to="torchtitan", given=given)
    export(source, lab / "plain", given=["recipe.steps=4", "recipe.batch.sequences=8"])
    (lab / "fla").mkdir()
    (lab / "fla/config.json").write_text('{"model_type": "gated_deltanet"}')
    (lab / "fla/recipe.yaml").write_text("optimizer: {}")
    return lab


SPLIT = "train=0.7,validation=0.2,test=0.1"


def platform(lab: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "deltalab", *command], cwd=lab, env=_environment(lab), capture_output=True, text=True
    )
    assert not check or done.returncode == 0, done.stderr + done.stdout
    return done


def _environment(lab: Path) -> dict[str, str]:
    return {**os.environ, "DELTALAB_DB": str(lab / "lab.db"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def rates(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Parameter -> lr and weight decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def prepared(lab: Path, folder: str = "model", **given: Any) -> Launch:
    settings = {"gpus": 0, "given": ["batch.length=16"], **given}
    return prepare(lab / folder, lab / "packed", **settings)


# ----------------------------------------------------------------------------------------------------------------------
# The stream of batches


@pytest.mark.slow
def test_processes_share_one_stream_of_rows(lab: Path) -> None:
    def tokens(world: int) -> list[torch.Tensor]:
        """The batches of 8 rows that all processes see together, three steps of them."""
        readers = [
            iter(Batches(Rows(Packed(lab / "packed").split("train"), 16, 0), RECIPE, 8 // world, rank, world))
            for rank in range(world)
        ]
        return [torch.cat([next(reader)[0]["tokens"] for reader in readers]) for _ in range(3)]

    for one, two, four in zip(tokens(1), tokens(2), tokens(4), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, four)


def test_a_reader_goes_on_from_its_state_with_another_number_of_processes(lab: Path) -> None:
    rows = Rows(Packed(lab / "packed").split("train"), 16, 0)
    alone = Batches(rows, RECIPE, 8, 0, 1)
    steps = iter(alone)
    next(steps)
    seen = alone.seen
    expected = next(steps)[0]["tokens"]
    halves = []
    for rank in range(2):
        again = Batches(rows, RECIPE, 4, rank, 2)
        again.seen = seen
        halves.append(next(iter(again))[0]["tokens"])
    assert torch.equal(torch.cat(halves), expected)


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order(lab: Path) -> None:
    rows = Rows(Packed(lab / "packed").split("train"), 16, 0)
    first = [rows[index][0].tobytes() for index in range(rows.size)]
    second = [rows[index][0].tobytes() for index in range(rows.size, 2 * rows.size)]
    assert first != second
    assert sorted(first) == sorted(second)


def test_documents_that_reset_bound_the_sequences_and_have_no_first_target(lab: Path) -> None:
    split = Packed(lab / "packed").split("train")
    reset = {**RECIPE, "batch": {**RECIPE["batch"], "documents": "reset"}}
    inputs, targets = next(iter(Batches(Rows(split, 16, 0), reset, 8, 0, 1)))
    bounds = inputs["cu_seqlens"].tolist()
    assert inputs["tokens"].shape == targets.shape == (1, 8 * 16)
    assert bounds[0] == 0
    assert bounds[-1] == 8 * 16
    assert bounds == sorted(set(bounds))
    assert {16 * row for row in range(8)} <= set(bounds), "rows never run into each other"
    inside = [bound for bound in bounds if bound % 16]
    assert inside
    assert all(targets[0, bound - 1] == IGNORE for bound in inside)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_validation_counts_each_row_once_on_any_number_of_processes(lab: Path, world: int) -> None:
    split = Packed(lab / "packed").split("validation")
    batches = [list(held_out(split, RECIPE, 1, rank, world)) for rank in range(world)]
    assert len({len(each) for each in batches}) == 1, "every process takes part in every collective"
    counted = [row for each in batches for _, targets in each for row in targets if (row != IGNORE).any()]
    assert sorted(row.tolist() for row in counted) == sorted(split.row(n, 16)[0][1:].tolist() for n in range(5))


def test_a_process_takes_at_once_what_fits_and_divides_its_share() -> None:
    given = with_defaults({"batch": {"sequences": 96, "length": 2048}})
    assert micro_batch(given, 1) == 16, "32768 tokens"
    assert micro_batch(given, 8) == 12
    with pytest.raises(ValueError, match="multiple of the 7 processes"):
        micro_batch(given, 7)


@pytest.mark.parametrize(("last", "status"), [(4, 0), (3, -signal.SIGABRT)])
def test_an_engine_that_aborts_after_its_last_checkpoint_has_trained(
    lab: Path, tmp_path: Path, last: int, status: int
) -> None:
    training = prepared(lab, run=tmp_path / "run")
    folder = tmp_path / f"run/checkpoints/step-{last}"
    code = f"import os, pathlib; p = pathlib.Path({str(folder)!r}); p.mkdir(parents=True); (p / '.metadata').touch(); "
    training.command = [sys.executable, "-c", code + "os.abort()"]
    assert launch.start(training, say=lambda line: None) == status


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"folder": "nothing"}, "nothing: no such folder"),
        ({"folder": "packed"}, "packed: not an exported folder: it has no recipe.yaml"),
        ({"folder": "fla"}, "not a model of deltalab; a checkpoint of FLA becomes such by `deltalab export .*/fla DIR"),
        ({"folder": "plain"}, "has no files for torchtitan: export it with --to torchtitan"),
        ({"engine": "titan"}, "--engine: unknown engine 'titan'; did you mean 'torchtitan'"),
        ({"gpus": 64}, "--gpus 64: this machine has 0"),
        ({"processes": 3}, "batch.sequences 8 must be a multiple of the 3 processes"),
        ({"given": ["optimiser.lr=1"]}, "--set: unknown setting 'optimiser.lr'; did you mean 'optimizer.lr'"),
        (
            {"given": ["graphs=true"]},
            "--set graphs: only a training on one GPU replays CUDA graphs, and this one has 0: leave it out",
        ),
        ({"given": ["graphs=true", "compile=true"]}, "--set graphs: there are no CUDA graphs with compile: true"),
        ({"given": ["precision=fp8"]}, "--set precision: unknown value 'fp8'"),
        ({"given": ["float8.enable=true"]}, "--set: no engine takes 'float8.enable': products are in bf16 or fp32"),
        ({"given": ["parallelism.cp=2"]}, "'parallelism.cp': GPUs share a sequence by the setting context_parallel"),
        ({"given": ["context_parallel=0"]}, "--set context_parallel: must be a whole number of at least 1"),
        ({"given": ["context_parallel=2"]}, "context_parallel 2 must divide the number of processes, 1"),
        (
            {"given": ["context_parallel=2", "batch.length=15"], "processes": 2},
            "context_parallel 2 must divide batch.length 15",
        ),
        (
            {"given": ["context_parallel=2", "batch.length=16"], "processes": 6},
            "batch.sequences 8 must be a multiple of the 3 groups of 2 processes",
        ),
        (
            {"given": ["context_parallel=2"], "processes": 2, "engine": "accelerate"},
            "context_parallel 2: accelerate gives each process whole sequences: take engine torchtitan",
        ),
        ({"given": ["milestones=0"]}, "--set milestones: must be a whole number of at least 1, not 0"),
        (
            {"given": ["milestones=3", "checkpoint.every=2"]},
            "--set milestones 3 must be a multiple of checkpoint.every 2",
        ),
        ({"given": ["optimizer.lr=fast"]}, "--set optimizer.lr: must be a number of at least 0, not 'fast'"),
        ({"given": ["schedule.kind=cosin"]}, "did you mean 'cosine'"),
        ({"given": ["checkpoint.keep=1"]}, "--set checkpoint.keep: must be a whole number of at least 2"),
        ({"given": ["schedule.warmup_steps=9"]}, "schedule.warmup_steps 9 exceed steps 4"),
        ({"given": ["steps"]}, "give settings as KEY=VALUE"),
        ({"given": ["batch.length=100000"]}, "make no row of batch.length 100000"),
        ({"nodes": Nodes(2)}, "--nodes: give --address HOST:PORT"),
        ({"nodes": Nodes(2, 5, "host:1")}, r"--node-rank 5: must be in 0\.\.1, as --nodes is 2"),
        ({"nodes": Nodes(1, 1)}, r"--node-rank 1: must be in 0\.\.0, as --nodes is 1"),
        *(
            ({"nodes": Nodes(2, 0, address)}, f"--address {address}: must be HOST:PORT")
            for address in ("foo", "foo:", ":29500", "foo:http", "http://foo:1", "::1:29500", "a b:1")
        ),
        ({"nodes": Nodes(2, 0, "foo:70000")}, r"--address foo:70000: the port must be in 1\.\.65535"),
    ],
)
def test_wrong_inputs_are_one_line_and_write_nothing(lab: Path, given: dict[str, Any], message: str) -> None:
    before = sorted(lab.rglob("*"))
    if not torch.cuda.is_available() or "gpus" not in given:
        with pytest.raises(InputError, match=message) as refused:
            prepared(lab, **given)
        assert "\n" not in str(refused.value)
    assert sorted(lab.rglob("*")) == before


def test_data_of_another_tokenizer_are_refused(lab: Path, tmp_path: Path) -> None:
    meta = json.loads((lab / "packed" / "meta.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for file in (lab / "packed").iterdir():
        (other / file.name).symlink_to(file)
    (other / "meta.json").unlink()
    meta["tokenizer"] = {**meta["tokenizer"], "name": "mine", "sha256": "f" * 64}
    (other / "meta.json").write_text(json.dumps(meta))
    prepare(lab / "model", other, gpus=0)  # the file gives the same ids
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").unlink()
    (other / "tokenizer.json").write_text(text.replace("<0x41>", "<0xZZ>"))
    with pytest.raises(InputError, match="packed with another tokenizer"):
        prepare(lab / "model", other, gpus=0)


def test_files_and_engines_that_hand_on_no_states_are_refused(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: dict[str, Any] = {"processes": 2, "given": ["batch.length=16", "context_parallel=2"]}
    assert prepared(lab, **shared).recipe["context_parallel"] == 2
    with pytest.raises(
        InputError, match=r"must divide the number of processes, 3; --set context_parallel=... changes it"
    ):
        prepared(lab, **{**shared, "processes": 3})
    shutil.copytree(lab / "model", tmp_path / "older")
    (tmp_path / "older/models_parts_context.py").unlink()
    with pytest.raises(
        InputError, match=r"context_parallel: .*/older has files for torchtitan that cannot hand on states"
    ):
        prepare(tmp_path / "older", lab / "packed", gpus=0, **shared)
    monkeypatch.setattr(preparation, "version_of", lambda engine: "0.2.2")
    with pytest.raises(InputError, match=r"torchtitan 0.2.2 cannot hand on states: install torchtitan 0.3$"):
        prepared(lab, **shared)


def test_a_release_with_another_setting_finds_the_folders_of_runs(lab: Path) -> None:
    ready = prepared(lab)
    before = {name: value for name, value in ready.recipe.items() if name not in ("context_parallel", "milestones")}
    text = json.dumps([ready.about["identity"], before], sort_keys=True, default=str)
    assert ready.run.name == f"torchtitan-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    assert prepared(lab, processes=2, given=["batch.length=16", "context_parallel=2"]).run != ready.run


def test_an_engine_that_is_not_installed_is_named_with_its_extra(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"engine torchtitan is not installed: pip install 'deltalab\[train\]'"):
        prepared(lab)


def test_torchtitan_refuses_models_that_predict_no_next_token() -> None:
    spec = ModelSpec.of({"rule": "comba", "vocab_size": 16, "d_model": 16, "heads": 2, "readout": "last"})
    with pytest.raises(InputError, match="predicts no next token"):
        files(spec, {})


def test_a_run_of_another_model_is_refused(lab: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    identity = prepared(lab).about["identity"]
    about = {
        "identity": {**identity, "model": "0" * 64},
        "export": "/there",
        "data": {"folder": "/d"},
        "engine": "torchtitan",
    }
    (run / "run.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match="its checkpoints are of another model"):
        prepared(lab, run=run)


def begun(lab: Path, run: Path, *settings: str, trained: int, steps: int = 20) -> Path:
    """A run of so many steps whose newest checkpoint is that of step `trained`; none if it is 0."""
    run.mkdir()
    given = ["batch.length=16", *settings]
    (run / "run.json").write_text(json.dumps(prepared(lab, run=run, steps=steps, given=given).about))
    if trained:
        (run / f"checkpoints/step-{trained}").mkdir(parents=True)
        (run / f"checkpoints/step-{trained}/.metadata").write_text("")
    return run


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.lr=0.1", "has trained 8 steps with optimizer.lr 0.02, now 0.1: give another --out, or leave"),
        ("batch.sequences=4", "has trained 8 steps with batch.sequences 8, now 4"),
        ("schedule.kind=constant", "has trained 8 steps with schedule.kind cosine, now constant"),
        ("steps=30", "with steps 20, now 30; the rates of schedule.kind cosine depend on the number of steps: give"),
    ],
)
def test_a_run_goes_on_only_with_what_it_was_trained_with(
    setting: str, message: str, lab: Path, tmp_path: Path
) -> None:
    given = ["steps=20", "batch.length=16", setting]
    run = begun(lab, tmp_path / "run", trained=8)
    with pytest.raises(InputError, match=message) as refused:
        prepared(lab, run=run, given=given)
    assert "\n" not in str(refused.value)
    assert prepared(lab, run=begun(lab, tmp_path / "new", trained=0), given=given).run == tmp_path / "new"


def test_a_run_in_place_of_an_exported_folder_is_named_as_such(lab: Path, tmp_path: Path) -> None:
    run = begun(lab, tmp_path / "run", trained=8)
    shutil.copy(lab / "model/recipe.yaml", run)
    with pytest.raises(
        InputError, match=f"run: is a run, .*; `deltalab train {lab}/model --out {run}` with the options"
    ):
        prepare(run, lab / "packed", gpus=0)


def test_steps_that_only_metrics_tell_of_count_as_trained(lab: Path, tmp_path: Path) -> None:
    run = begun(lab, tmp_path / "run", trained=0)
    lines = [json.dumps({"step": step, "split": "train", "name": "loss", "value": 1.0}) + "\n" for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(lines)[:-5])
    with pytest.raises(InputError, match=r"has trained 1 steps with optimizer\.lr"):
        prepared(lab, run=run, steps=20, given=["batch.length=16", "optimizer.lr=0.1"])


def test_a_run_goes_on_with_other_checkpoints_logs_and_micro_batches(lab: Path, tmp_path: Path) -> None:
    run = begun(lab, tmp_path / "run", trained=8)
    free = ["log.every=1", "checkpoint.keep=2", "validation.every=3", "batch.micro=2", "activation_checkpointing=true"]
    assert prepared(lab, run=run, steps=20, given=["batch.length=16", *free]).recipe["batch"]["micro"] == 2


@pytest.mark.parametrize(("kind", "trained", "goes"), [("constant", 20, True), ("wsd", 18, True), ("wsd", 19, False)])
def test_a_run_gets_more_steps_while_its_schedule_allows_it(
    kind: str, trained: int, goes: bool, lab: Path, tmp_path: Path
) -> None:
    given = [f"schedule.kind={kind}"]
    run = begun(lab, tmp_path / "run", *given, "schedule.warmup_steps=2", trained=trained)
    if goes:
        recipe = prepared(lab, run=run, steps=30, given=["batch.length=16", *given]).recipe
        assert (recipe["steps"], recipe["schedule"]["warmup_steps"]) == (30, 2), "the warm-up that was trained stays"
    else:
        with pytest.raises(InputError, match=r"with steps 20, now 30; the rates of schedule\.kind wsd depend"):
            prepared(lab, run=run, steps=30, given=["batch.length=16", *given, "schedule.warmup_steps=2"])


@pytest.mark.parametrize(("gpus", "message"), [(1, "is of several GPUs, .*: give --gpus"), (2, "is of one GPU, ")])
def test_the_trainer_refuses_checkpoints_that_it_cannot_read_on_so_many_gpus(
    gpus: int, message: str, lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    run = tmp_path / "run"
    checkpoint = run / "checkpoints/step-2"
    (checkpoint / "pytorch_model_fsdp_0" if gpus == 1 else checkpoint).mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    given: dict[str, Any] = {"run": run, "engine": "accelerate"}
    (run / "run.json").write_text(json.dumps(prepared(lab, engine="accelerate", gpus=gpus).about))
    assert prepared(lab, gpus=3 - gpus, **given).run == run
    with pytest.raises(InputError, match=f"step-2 {message}") as refused:
        prepared(lab, gpus=gpus, **given)
    assert "\n" not in str(refused.value)


def test_a_run_that_another_process_trains_is_refused(lab: Path, tmp_path: Path) -> None:
    from deltalab.engines.deltalab_train import lock

    (tmp_path / "run").mkdir()
    ready = prepared(lab, run=tmp_path / "run")
    held = lock.share(tmp_path / "run")
    with pytest.raises(InputError, match="another process is training it"):
        launch.start(ready)
    held.close()


STUBBORN = """
import signal, subprocess, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
own = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", own], stdout=subprocess.PIPE, start_new_session=True)
worker.stdout.readline()
print("workers", worker.pid, flush=True)
time.sleep(600)
"""
TRAIN = """
import sys
from deltalab.cli import app
from deltalab.engines import launch, preparation, stopping

stopping.GRACE_SECONDS = 0.5
preparation.command = lambda *_, **__: [sys.executable, "-c", STUBBORN]
app.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_engine_with_workers_in_sessions_of_their_own(
    number: signal.Signals, code: int, lab: Path, tmp_path: Path
) -> None:
    run, script = tmp_path / "run", TRAIN.replace("STUBBORN", repr(STUBBORN))
    given = ["train", "model", "--data", "packed", "--out", str(run), "--gpus", "0", "--set", "batch.length=16"]
    started = subprocess.Popen([sys.executable, "-c", script, *given], cwd=lab, env=_environment(lab))
    until = time.monotonic() + 60
    while not (run / "log.txt").exists() or "workers" not in (run / "log.txt").read_text():
        assert started.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    family = psutil.Process(started.pid).children(recursive=True)
    assert len(family) == 2
    started.send_signal(number)
    assert started.wait(30) == code
    assert psutil.wait_procs(family, timeout=5)[1] == []
    with launch._alone(run):
        pass


def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(lab: Path, tmp_path: Path) -> None:
    ready = prepared(lab, run=tmp_path / "run")
    good, torn = (tmp_path / "run" / "checkpoints" / name for name in ("step-2", "step-4"))
    for each in (good, torn):
        each.mkdir(parents=True)
    (good / ".metadata").write_text("")
    ready.command = [sys.executable, "-c", "raise OSError(28, 'No space left on device')"]
    with pytest.raises(InputError, match=r"the disk is full, .*step-2 is whole") as refused:
        launch.start(ready, say=lambda line: None)
    assert "\n" not in str(refused.value)
    assert checkpoints.complete_checkpoints(tmp_path / "run") == [good]
    assert not torn.exists()


@pytest.mark.parametrize(
    ("trained", "keep", "steps", "apart", "count"),
    [
        (0, 3, 20, "null", 4),
        (0, 5, 20, "null", 6),
        (0, 3, 2, "null", 2),
        (8, 3, 20, "null", 3),
        (19, 3, 20, "null", 1),
        (20, 3, 20, "null", 0),
        (0, 3, 20, "5", 8),
        (10, 3, 20, "5", 6),
        (0, 3, 6, "1", 6),
    ],
)
def test_the_disk_must_have_room_for_every_checkpoint_that_a_run_adds(
    trained: int,
    keep: int,
    steps: int,
    apart: str,
    count: int,
    lab: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["batch.length=16", f"checkpoint.keep={keep}", "checkpoint.every=1", f"milestones={apart}"]
    run = begun(lab, tmp_path / "run", trained=trained, steps=steps)
    size = prepared(lab, run=run, steps=steps, given=given).about["parameters"] * checkpoints.BYTES_A_PARAMETER
    usage = shutil.disk_usage(lab)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=count * size))
    prepared(lab, run=run, steps=steps, given=given)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=count * size - 1))
    if count:
        with pytest.raises(
            InputError, match=rf"\d KiB are free; {count} checkpoints of .*keep {keep}, .* [1-9]\S* KiB"
        ):
            prepared(lab, run=run, steps=steps, given=given)


def test_the_command_says_nodes_as_torchrun_does(lab: Path) -> None:
    text = prepared(lab, nodes=Nodes(2, 1, "host:1234"), processes=4).text()
    assert "--nnodes 2 --node-rank 1 --master-addr host --master-port 1234" in text
    assert f"DELTALAB_DATA={lab / 'packed'}" in text
    assert "--master-addr fe80::1 --master-port 1" in prepared(lab, nodes=Nodes(2, 1, "[fe80::1]:1")).text()


def test_the_same_command_means_the_same_run(lab: Path) -> None:
    assert prepared(lab).run == prepared(lab).run
    assert prepared(lab).run != prepared(lab, given=["batch.length=16", "optimizer.lr=0.1"]).run


def test_a_recipe_written_for_a_run_is_the_one_that_was_asked_for(lab: Path, tmp_path: Path) -> None:
    ready = prepared(lab, run=tmp_path / "run", steps=7, given=["batch.length=16", "optimizer.eps=1e-8"])
    ready.command = [sys.executable, "-c", ""]
    launch.start(ready, say=lambda line: None)
    written = with_defaults(yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text()))
    assert written == ready.recipe
    assert written["steps"] == 7
    assert written["optimizer"]["eps"] == 1e-8


def test_a_tied_model_trains_where_fsdp2_shards_its_embeddings_by_themselves() -> None:
    """As Accelerate does; they are then gathered only in calls of their own module, and the loss reads them, too."""
    spec = ModelSpec.of({"rule": "comba", "vocab_size": 32, "d_model": 16, "heads": 2, "layers": 1})
    tokens, targets = torch.arange(24).view(2, 12), torch.arange(1, 25).view(2, 12)

    def update(model: Model) -> list[float]:
        losses = []
        for _ in range(2):
            loss = model.cross_entropy(model.hidden(tokens)[0], targets) + model.step(tokens)[0].square().mean()
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            losses.append(loss.item())
        return losses

    expected = update(build_model(spec))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = build_model(spec)
        for part in (*model.blocks, model.embed, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        for method in ("hidden", "step"):
            register_fsdp_forward_method(model, method)
        assert update(model) == pytest.approx(expected)
    finally:
        torch.distributed.destroy_process_group()


def test_a_run_that_has_all_its_steps_does_not_start_the_engine(lab: Path, tmp_path: Path) -> None:
    ready = prepared(lab, run=tmp_path / "run")
    (tmp_path / "run/checkpoints/step-4").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-4/.metadata").write_text("")
    ready.command = [sys.executable, "-c", "raise SystemExit(1)"]
    said: list[str] = []
    assert launch.start(ready, say=said.append) == 0
    assert said == ["from step-4"]


@pytest.mark.slow
def test_the_ledger_has_a_run_from_its_start_and_also_after_an_interruption(lab: Path, tmp_path: Path) -> None:
    recorded = []

    def record(run: Path) -> None:
        recorded.append(sum(1 for _ in (run / "metrics.jsonl").open()) if (run / "metrics.jsonl").exists() else None)

    def interrupt(line: str) -> None:
        if line.startswith("step 3"):
            raise KeyboardInterrupt

    ready = prepared(lab, run=tmp_path / "run")
    lines = [{"step": 3, "split": "validation", "name": "loss", "value": 2.0}]
    script = f"open({str(tmp_path / 'run/metrics.jsonl')!r}, 'w').write({json.dumps(lines[0])!r} + chr(10))"
    ready.command = [sys.executable, "-c", f"{script}; import time; time.sleep(60)"]
    with pytest.raises(KeyboardInterrupt):
        launch.start(ready, say=interrupt, record=record)
    assert recorded == [None, 1]


def test_a_ledger_that_is_away_for_a_while_does_not_end_a_training(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, calls = [], []

    def record(run: Path) -> None:
        calls.append(run)
        if len(calls) == 2:
            raise ConnectionError("the server is away")

    monkeypatch.setattr(launch, "RECORD_SECONDS", 0.0)
    ready = prepared(lab, run=tmp_path / "run")
    ready.command = [sys.executable, "-c", "import time; time.sleep(1)"]
    assert launch.start(ready, say=said.append, record=record) == 0
    assert "the ledger was not brought up to date: the server is away" in said


def test_the_trainer_shards_blocks_without_words_that_transformers_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainingArguments

    from deltalab.engines.deltalab_train.with_trainer import _sharded

    def refused(*_: Any) -> None:
        raise AssertionError("fsdp is given as words")

    monkeypatch.setattr(TrainingArguments, "_apply_legacy_fsdp_to_config", staticmethod(refused))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **_sharded(2, on_gpu=True))
    assert args.fsdp_plugin_args["fsdp_version"] == 2
    assert args.fsdp_plugin_args["transformer_cls_names_to_wrap"] == "Block"
    assert args.fsdp_plugin_args["reshard_after_forward"] is True
    assert _sharded(1, on_gpu=True) == _sharded(2, on_gpu=False) == {}


@pytest.mark.parametrize("takes_a_model", [True, False], ids=["5.3", "5.2"])
def test_the_trainer_trains_matrices_as_base_width_asks(
    takes_a_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before transformers 5.3, a Trainer makes its optimizer for its own model alone."""
    from transformers import Trainer, TrainingArguments

    from deltalab.engines.deltalab_train.clock import Clock
    from deltalab.engines.deltalab_train.with_trainer import Deterministic
    from deltalab.export.modeling_deltalab import DeltaLabConfig, DeltaLabForCausalLM

    if not takes_a_model:
        made_by = Trainer.create_optimizer
        monkeypatch.setattr(Trainer, "create_optimizer", lambda self: made_by(self))
    spec = ModelSpec.of({"rule": "comba", "vocab_size": 16, "d_model": 16, "heads": 2, "layers": 1, "base_width": 4})
    model = DeltaLabForCausalLM(DeltaLabConfig(**vars(spec)))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, learning_rate=0.02, weight_decay=0.01)
    recipe = with_defaults({"optimizer": {"lr": 0.02, "weight_decay": 0.01}})
    made = Deterministic(recipe, Clock(None), model=model, args=args).create_optimizer()
    wanted = torch.optim.AdamW(model.parameter_groups(0.01, 0.02), lr=0.02)
    assert rates(model, made) == rates(model, wanted)
    assert len(set(rates(model, made).values())) == 3


def test_progress_names_the_step_of_a_loss_that_is_older_than_the_line() -> None:
    progress = Progress({"steps": 40, "batch": {"sequences": 2, "length": 16}})

    def line(*rows: tuple[int, str, float]) -> str:
        found = [{"name": "loss", "step": step, "split": split, "value": value} for step, split, value in rows]
        progress.read(io.StringIO("".join(json.dumps(row) + "\n" for row in found)))
        return progress.line()

    assert line((10, "train", 3.0), (10, "validation", 3.5)) == "step 10/40, loss 3.0000, validation 3.5000"
    assert line((15, "validation", 3.25)) == "step 15/40, loss 3.0000 (step 10), validation 3.2500"
    assert line((20, "train", 2.5)) == "step 20/40, loss 2.5000, validation 3.2500 (step 15)"


# ----------------------------------------------------------------------------------------------------------------------
# The five commands


def losses(run: Path) -> dict[tuple[int, str], float]:
    """(step, split) -> loss; the last line counts."""
    text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {(row["step"], row["split"]): row["value"] for row in rows if row["name"] == "loss"}


def as_a_study_trains(lab: Path, run: str) -> dict[int, float]:
    """The losses of the first 3 steps of a run, by a study's own learning rates of every parameter.

    The rates of steps are those that the engine says.
    """
    about = json.loads((lab / run / "run.json").read_text())
    recipe = about["recipe"]
    config = json.loads((Path(about["export"]) / "config.json").read_text())
    model = build_model({field.name: config[field.name] for field in fields(ModelSpec)}, seed=recipe["seed"])
    given, length, size = recipe["optimizer"], recipe["batch"]["length"], recipe["batch"]["sequences"]
    groups = parameter_groups(model, given["weight_decay"], given["lr"])
    assert len(groups) == 3, "matrices have a rate of their own"
    optimizer = torch.optim.AdamW(groups, lr=given["lr"], betas=given["betas"], eps=given["eps"])
    shares = [group["lr"] for group in optimizer.param_groups]
    lines = map(json.loads, (lab / run / "metrics.jsonl").read_text().splitlines())
    factors = {line["step"]: line["value"] / given["lr"] for line in lines if line["name"] == "lr"}
    rows, found = Rows(Packed(lab / "packed").split("train"), length, recipe["seed"]), {}
    for step in (1, 2, 3):
        tokens = torch.from_numpy(np.stack([rows[index][0] for index in range((step - 1) * size, step * size)]))
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
        for group, lr in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = lr * factors[step]
        optimizer.step()
        optimizer.zero_grad()
        found[step] = loss.item()
    return found


def train(run: str, engine: str, *more: str) -> list[str]:
    settings = {"checkpoint.every": 4, "log.every": 1, "validation.every": 4, "validation.sequences": 4}
    return [
        "train", "model", "--data", "packed", "--out", run, "--engine", engine, "--gpus", "0", "--processes", "2",
        *(each for key, value in settings.items() for each in ("--set", f"{key}={value}")), *more,
    ]  # fmt: skip


def kill_after(lab: Path, steps: int, run: str, command: list[str]) -> int:
    """Starts a command; ends its processes by SIGKILL once a checkpoint is whole and `steps` more were taken.

    Returns the step of the newest whole checkpoint.
    """
    started = subprocess.Popen(
        [sys.executable, "-m", "deltalab", *command], cwd=lab, env=_environment(lab), stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 300
    complete = checkpoints.complete_checkpoints
    while not (found := complete(lab / run)) or (_step(found[0]) + steps, "train") not in losses(lab / run):
        assert started.poll() is None, (lab / run / "log.txt").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.02)
    family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
    for process in family:
        if process.is_running():
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family)
    started.wait()
    return _step(checkpoints.complete_checkpoints(lab / run)[-1])


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@pytest.mark.slow
def test_five_commands_take_a_winner_to_an_evaluated_model(tmp_path: Path) -> None:
    lab = tmp_path
    (lab / "s.yaml").write_text(yaml.safe_dump(STUDY))
    words = "".join(f"line {n}: {'abcdefghij'[n % 10] * (n % 7 + 3)}\n\n" for n in range(600))
    (lab / "text.txt").write_text(words)
    platform(lab, "study", "run", "s.yaml", "--executor", "inline", "--unchecked")

    sizes = ["model.vocab_size=256", "recipe.batch.length=32", "recipe.batch.sequences=8", "recipe.steps=12"]
    given = [each for size in sizes for each in ("--set", size)]
    refused = platform(lab, "export", "s", "model", "--best", check=False)
    assert "arms base, wide have the same accuracy 0, so that none is best: name one with --arm" in refused.stderr
    platform(lab, "export", "s", "model", "--arm", "base", "--to", "torchtitan", "--tokenizer", "bytes", *given)
    platform(lab, "data", "pack", "text.txt", "--out", "packed", "--separator", "\n\n", "--split", SPLIT)

    newest = kill_after(lab, 2, "run", train("run", "torchtitan"))
    before = losses(lab / "run")
    done = platform(lab, *train("run", "torchtitan"))
    assert f"from step-{newest}" in done.stdout
    assert "torch.distributed.run" in done.stdout, "the engine's own command is printed"
    after = losses(lab / "run")
    assert max(after) == (12, "validation")
    again = [key for key in before if key[0] > newest]
    assert again
    for key in again:
        assert after[key] == pytest.approx(before[key], rel=1e-5), "resumed training has the losses of the unbroken one"
    for step, loss in as_a_study_trains(lab, "run").items():
        assert after[step, "train"] == pytest.approx(loss, rel=1e-5), "base_width scales the rates as in the study"
    assert after[12, "train"] < after[1, "train"] < 1.3 * math.log(256)

    platform(lab, "export", "run", "hf")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(lab / "hf", trust_remote_code=True)
    rows = [Packed(lab / "packed").split("validation").row(index, 32)[0] for index in range(4)]
    tokens = torch.from_numpy(np.stack(rows))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(after[12, "validation"], rel=1e-4), (
        "the folder holds the weights that were trained"
    )

    report = json.loads(platform(lab, "study", "report", "s", "--json").stdout)
    assert report


@pytest.mark.slow
def test_the_trainer_of_transformers_goes_on_where_it_was_killed(lab: Path) -> None:
    command = train("trainer", "accelerate", "--set", "batch.length=16", "--steps", "8")
    newest = kill_after(lab, 2, "trainer", command)
    before = losses(lab / "trainer")
    assert f"from step-{newest}" in platform(lab, *command).stdout
    after = losses(lab / "trainer")
    assert max(after)[0] == 8
    for step in range(newest + 1, max(before)[0] + 1):
        assert after[step, "train"] == pytest.approx(before[step, "train"], rel=1e-4)
    for step, loss in as_a_study_trains(lab, "trainer").items():
        assert after[step, "train"] == pytest.approx(loss, rel=1e-4), "base_width scales the rates as in the study"
    weights = checkpoints.read_checkpoint(checkpoints.complete_checkpoints(lab / "trainer")[-1])
    assert weights["embed.weight"].shape == (256, 16)


@pytest.mark.parametrize(("steps", "apart", "every"), [(500, 100, 50), (500, 60, 30), (500, 10, 10), (500, 97, 97)])
def test_checkpoints_fall_on_milestones(steps: int, apart: int, every: int) -> None:
    assert with_defaults({"steps": steps})["checkpoint"]["every"] == 50
    assert with_defaults({"steps": steps, "milestones": apart})["checkpoint"]["every"] == every


def test_files_that_keep_no_milestones_are_refused(lab: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"gpus": 0, "given": ["batch.length=16", "milestones=2"]}
    assert prepare(lab / "model", lab / "packed", **asked).recipe["milestones"] == 2
    shutil.copytree(lab / "model", tmp_path / "older")
    (tmp_path / "older/engines/deltalab_train/milestones.py").unlink()
    with pytest.raises(InputError, match=r"milestones: .*/older has files for torchtitan that cannot keep milestones"):
        prepare(tmp_path / "older", lab / "packed", **asked)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torchtitan", "accelerate"])
def test_an_engine_keeps_as_many_checkpoints_as_asked(engine: str, lab: Path, tmp_path: Path) -> None:
    given = ["batch.length=16", "checkpoint.every=1", "checkpoint.keep=3", "milestones=2"]
    ready = prepared(lab, run=tmp_path / "run", engine=engine, steps=6, given=given)
    most = []

    def count(run: Path) -> None:
        most.append(len(list((run / "checkpoints").glob("step-*"))))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch, "RECORD_SECONDS", 0.0)
        assert launch.start(ready, say=lambda line: None, record=count) == 0
    assert [_step(each) for each in checkpoints.complete_checkpoints(tmp_path / "run")] == [2, 4, 5, 6]
    assert max(most) <= 5, "one more while the newest is written"


SHARDED = """
import json
import os
import sys

from accelerate.state import AcceleratorState, DistributedType, PartialState
from deltalab_train import with_trainer

begin, sharded = AcceleratorState.__init__, with_trainer._sharded


def on_cpus(self, *given, fsdp_plugin=None, **more):
    # Accelerate shards on accelerators alone.
    begin(self, *given, fsdp_plugin=fsdp_plugin, **more)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


class Record(with_trainer.Record):
    def on_pre_optimizer_step(self, *_, model, optimizer, **more):
        names = {parameter: name.removeprefix("model.") for name, parameter in model.named_parameters()}
        rates = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert 2 * parameter.to_local().numel() == parameter.numel()
                rates[names[parameter]] = (group["initial_lr"], group["weight_decay"])
        with open(f"{sys.argv[1]}/rates-{os.environ['RANK']}.json", "w") as file:
            json.dump(rates, file)


AcceleratorState.__init__, with_trainer.Record = on_cpus, Record
with_trainer._sharded = lambda world, on_gpu: sharded(world, True)
with_trainer.main()
"""


@pytest.mark.slow
def test_a_sharded_trainer_trains_as_base_width_asks_and_goes_on_so(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARDED)
    said: list[str] = []

    given = ["batch.length=16", "checkpoint.every=2", "log.every=1", "validation.every=4"]
    ready = prepared(lab, run=lab / "sharded", engine="accelerate", processes=2, given=given)
    assert ready.command[-2:] == ["-m", "deltalab_train.with_trainer"]
    ready.command[-2:] = [str(tmp_path / "train.py"), str(tmp_path)]

    def trained() -> dict[tuple[int, str], float]:
        assert launch.start(ready, say=said.append) == 0, (lab / "sharded/log.txt").read_text()[-3000:]
        return losses(lab / "sharded")

    def seen() -> list[dict[str, tuple[float, float]]]:
        texts = [(tmp_path / f"rates-{rank}.json").read_text() for rank in range(2)]
        return [{name: tuple(value) for name, value in json.loads(text).items()} for text in texts]

    before = trained()
    for step, loss in as_a_study_trains(lab, "sharded").items():
        assert before[step, "train"] == pytest.approx(loss, rel=1e-5), "each matrix has its share of the rate"
    config = json.loads((lab / "model/config.json").read_text())
    model = build_model({field.name: config[field.name] for field in fields(ModelSpec)})
    lr, weight_decay = (ready.recipe["optimizer"][name] for name in ("lr", "weight_decay"))
    wanted = rates(model, torch.optim.AdamW(parameter_groups(model, weight_decay, lr), lr=lr))
    assert seen() == [wanted] * 2

    shutil.rmtree(lab / "sharded/checkpoints/step-4")
    assert trained() == pytest.approx(before, rel=1e-5)
    assert "from step-2" in said
    assert seen() == [wanted] * 2
