"""From a study's winner to a trained and evaluated model, by the commands that a user types.

    python benchmarks/winner.py --out DIR                 one or two GPUs, no network: 340M parameters
    python benchmarks/winner.py --out DIR --toy           the same at toy size on two CPU cores

`--stages` selects stages, each of which may be repeated:
    study    the ablation of winner.yaml
    pack     text and a tokenizer trained on it
    export   the winner and two baselines at 340M
    train    the winner; every process is killed in the middle, and the same command goes on
    double   the same training on two GPUs
    compare  the baselines
    hf       the newest checkpoint as a model of transformers
    eval     lm-evaluation-harness on a local task, and the loss
DIR/lab.db is the ledger of all of it; DIR/winner.json holds what was measured. `--limit` bounds each command.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from deltalab.engines.checkpoints import complete

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "benchmarks" / "winner.yaml"
PLATFORM = [sys.executable, "-m", "deltalab"]
STAGES = ("study", "pack", "export", "train", "double", "compare", "hf", "eval")
BASELINES = ("gated_deltanet", "transformer")


class Lab:
    """The folder of one run of this script."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.out = given, given.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.measured: dict[str, Any] = {}

    def run(self, *command: object, check: bool = True) -> float:
        """Runs a command of the platform; returns its seconds."""
        full = [*PLATFORM, *map(str, command)]
        print("$ platform", *map(str, command), flush=True)
        began = time.monotonic()
        done = subprocess.run(full, cwd=self.out, env=self.environment(), timeout=self.given.limit)
        seconds = time.monotonic() - began
        print(f"({seconds:.0f} s, exit {done.returncode})", flush=True)
        if check and done.returncode:
            raise SystemExit(f"winner.py: {command[0]} failed")
        return seconds

    def environment(self) -> dict[str, str]:
        paths = [str(ROOT / part) for part in ("platform", "plugins", "dashboard")]
        given = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        return {**os.environ, "DELTALAB_DB": str(self.out / "lab.db"), "PYTHONPATH": os.pathsep.join([*paths, *given])}

    def note(self, **values: Any) -> None:
        file = self.out / "winner.json"
        if file.exists():  # stages may run at once on different GPUs
            self.measured = json.loads(file.read_text())
        self.measured |= values
        file.write_text(json.dumps(self.measured, indent=2) + "\n")

    # ------------------------------------------------------------------------------------------------------------------

    def study(self) -> None:
        profile = ["--profile", "toy"] if self.given.toy else []
        self.note(study_seconds=self.run("study", "run", STUDY, "--executor", "inline", "--unchecked", *profile))

    def pack(self) -> None:
        text = self.out / "text"
        text.mkdir(exist_ok=True)
        bundled = sorted((ROOT / "platform" / "deltalab" / "tasks" / "kjv_jargon").glob("*.txt"))
        most = 60_000 if self.given.toy else None
        for file in bundled:
            (text / file.name).write_text(file.read_text(encoding="utf-8")[:most], encoding="utf-8")
        texts = [text / file.name for file in bundled]
        library = [] if self.given.toy else [*_library(), "--files", "*.py"]
        tokenizer = self.out / "tokenizer"
        self.run("data", "tokenizer", *texts, *library, "--out", tokenizer, "--vocab", 512 if self.given.toy else 32000)
        shares = "train=0.9,validation=0.05,test=0.05"
        seconds = self.run(
            "data", "pack", *texts, *library, "--out", self.out / "packed", "--tokenizer", tokenizer, "--split", shares,
            "--separator", "\n\n",
        )  # fmt: skip
        splits = json.loads((self.out / "packed" / "meta.json").read_text())["splits"]
        self.note(pack_seconds=seconds, tokens={name: split["tokens"] for name, split in splits.items()})

    def export(self) -> None:
        name = "winner:toy" if self.given.toy else "winner"
        size = (
            ["--set", "model.vocab_size=512", "--set", "model.d_model=32", "--set", "recipe.optimizer.lr=0.005"]
            if self.given.toy
            else ["--scale", "340M"]
        )
        batch = {"sequences": 8, "length": 64} if self.given.toy else {"sequences": 16, "length": 4096}
        recipe = [f"recipe.steps={self.given.steps}", *(f"recipe.batch.{key}={value}" for key, value in batch.items())]
        settings = [each for pair in recipe for each in ("--set", pair)]
        for folder, chosen in (("best", ["--best"]), *((name, ["--arm", name]) for name in BASELINES)):
            shutil.rmtree(self.out / folder, ignore_errors=True)
            self.run(
                "export", name, self.out / folder, *chosen, "--to", "torchtitan", *size, *settings, "--no-weights",
                "--tokenizer", self.out / "packed",
            )  # fmt: skip

    def training(self, folder: str, run: str, gpus: int, *, every: int) -> list[str]:
        """The command that trains an exported folder."""
        device = ["--gpus", "0", "--processes", str(gpus)] if self.given.toy else ["--gpus", str(gpus)]
        settings = {
            "checkpoint.every": every,
            "checkpoint.keep": 2,
            "validation.every": every,
            "log.every": 1 if self.given.toy else 5,
        }
        settings |= {"validation.sequences": 8 if self.given.toy else 32}
        return [
            "train", str(self.out / folder), "--data", str(self.out / "packed"), "--out", str(self.out / "runs" / run),
            *device, *(each for key, value in settings.items() for each in ("--set", f"{key}={value}")),
            *(each for pair in self.given.set for each in ("--set", pair)),
        ]  # fmt: skip

    def train(self) -> None:
        """Trains, kills every process, trains on, and compares the losses of the steps that were trained twice."""
        run = self.out / "runs" / "one"
        every = max(2, self.given.steps // 4)
        command = self.training("best", "one", 2 if self.given.toy else 1, every=every)
        print("$ platform", *command, flush=True)
        child = subprocess.Popen([*PLATFORM, *command], cwd=self.out, env=self.environment())
        began = time.monotonic()
        more = 1 if self.given.toy else 5
        while not (whole := complete(run)) or _losses(run).keys() <= set(range(_step(whole[0]) + more)):
            if child.poll() is not None or time.monotonic() - began > self.given.limit:
                raise SystemExit("winner.py: the training did not come to the point where it is killed")
            time.sleep(0.05)
        family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
        for process in family:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family)
        child.wait()
        before, newest = _losses(run), _step(complete(run)[-1])
        print(f"killed {len(family)} processes after step {max(before)}", flush=True)
        seconds = self.run(*command)
        after = _losses(run)
        twice = _twice(run)
        self.note(
            killed_after=max(before),
            whole_checkpoint=newest,
            trained_on_seconds=seconds,
            steps_trained_twice=len(twice),
            largest_difference=max((abs(one - other) for one, other in twice), default=None),
            one=_speed(run),
            last_loss=after[max(after)],
        )

    def double(self) -> None:
        if not self.given.toy and torch.cuda.device_count() < 2:
            print("winner.py: one GPU here, no training on two", flush=True)
            return
        self.run(*self.training("best", "two", 1 if self.given.toy else 2, every=self.given.steps))
        one, two = _losses(self.out / "runs" / "one"), _losses(self.out / "runs" / "two")
        both = sorted(set(one) & set(two))
        self.note(
            two=_speed(self.out / "runs" / "two"), one_and_two={step: [one[step], two[step]] for step in both[-3:]}
        )

    def compare(self) -> None:
        gpus = 2 if self.given.toy else max(1, min(2, torch.cuda.device_count()))
        for name in BASELINES:
            self.run(*self.training(name, name, gpus, every=self.given.steps))
            self.note(**{name: _speed(self.out / "runs" / name)})

    def hf(self) -> None:
        shutil.rmtree(self.out / "hf", ignore_errors=True)
        self.run("export", self.out / "runs" / "one", self.out / "hf")

    def eval(self) -> None:
        tasks = self.out / "tasks"
        tasks.mkdir(exist_ok=True)
        verses = (self.out / "text" / "test.txt").read_text(encoding="utf-8").split("\n\n")
        cloze = [words[-40:] for verse in verses if len(words := verse.split()) > 12][:100]
        (tasks / "cloze.jsonl").write_text(
            "".join(json.dumps({"text": " ".join(w[:-1]), "last": " " + w[-1]}) + "\n" for w in cloze), encoding="utf-8"
        )
        local = {
            "task": "last_word",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tasks / "cloze.jsonl")}},
            "test_split": "test",
            "output_type": "loglikelihood",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{last}}",
            "metric_list": [
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            ],
        }
        (tasks / "last_word.yaml").write_text(yaml.safe_dump(local))
        limit = 20 if self.given.toy else 100
        tasks_given = f"loss,{tasks / 'last_word.yaml'}"
        self.run("eval", self.out / "hf", "--tasks", tasks_given, "--data", self.out / "packed", "--limit", limit)
        self.run("study", "report", "winner:toy" if self.given.toy else "winner")


def _library() -> list[Path]:
    """Python's standard library, without what is installed beside it and without its tests."""
    left_out = ("site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__")
    return [
        each
        for each in sorted(Path(sysconfig.get_paths()["stdlib"]).iterdir())
        if each.suffix == ".py" or (each.is_dir() and each.name not in left_out and any(each.rglob("*.py")))
    ]


def _lines(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _losses(run: Path) -> dict[int, float]:
    """step -> training loss; the last value counts."""
    return {row["step"]: row["value"] for row in _lines(run) if (row["split"], row["name"]) == ("train", "loss")}


def _twice(run: Path) -> list[tuple[float, float]]:
    """The first and the last loss of the steps that stand twice in `metrics.jsonl`."""
    found: dict[int, list[float]] = {}
    for row in _lines(run):
        if (row["split"], row["name"]) == ("train", "loss"):
            found.setdefault(row["step"], []).append(row["value"])
    return [(values[0], values[-1]) for values in found.values() if len(values) > 1]


def _speed(run: Path) -> dict[str, float]:
    """Medians over the second half of a training."""
    found: dict[str, list[float]] = {}
    for row in _lines(run):
        if row["name"] in ("tokens_per_second", "mfu", "memory_gib"):
            found.setdefault(row["name"], []).append(row["value"])
    return {
        name: sorted(values[len(values) // 2 :])[len(values[len(values) // 2 :]) // 2] for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="toy size, on two processes of the CPU")
    parser.add_argument("--steps", type=int, help="of each training: 200, or 12 at toy size")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a command may take")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every training's recipe")
    given = parser.parse_args()
    given.steps = given.steps or (12 if given.toy else 200)
    lab = Lab(given)
    for stage in given.stages.split(","):
        if stage not in STAGES:
            parser.error(f"unknown stage '{stage}'; allowed: {', '.join(STAGES)}")
        began = time.monotonic()
        getattr(lab, stage)()
        print(f"== {stage}: {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(lab.measured, indent=2))


if __name__ == "__main__":
    main()
