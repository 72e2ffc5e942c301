"""Takes a study's winner to a trained and evaluated model, by the commands that a user types.

    python benchmarks/winner.py --out DIR                 one or two GPUs, no network: 340M parameters
    python benchmarks/winner.py --out DIR --toy           the same at toy size on two CPU cores

`--stages` selects stages. A stage may be repeated:
    study    the ablation of winner.yaml
    pack     text and a tokenizer trained on it
    export   the winner and two baselines at 340M
    train    the winner; in the middle, all processes are killed, and the same command goes on
    double   the same training on two GPUs
    compare  the baselines
    hf       the newest checkpoint as a model of transformers
    eval     lm-evaluation-harness on a local task, and the loss
DIR/lab.db is the ledger of all stages, and DIR/winner.json holds the measurements. `--limit` bounds each command.
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

from deltalab.engines.checkpoints import complete_checkpoints

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "benchmarks" / "winner.yaml"
PLATFORM = [sys.executable, "-m", "deltalab"]
STAGES = ("study", "pack", "export", "train", "double", "compare", "hf", "eval")
BASELINES = ("gated_deltanet", "transformer")


class Lab:
    """The folder of one run of this script."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.measured: dict[str, Any] = {}

    def run(self, *command: object, check: bool = True) -> float:
        """Runs a command of the platform, and returns its seconds."""
        full = [*PLATFORM, *map(str, command)]
        print("$ platform", *map(str, command), flush=True)
        began = time.monotonic()
        done = subprocess.run(full, cwd=self.out, env=self.environment(), timeout=self.options.limit)
        seconds = time.monotonic() - began
        print(f"({seconds:.0f} s, exit {done.returncode})", flush=True)
        if check and done.returncode:
            raise SystemExit(f"winner.py: {command[0]} failed")
        return seconds

    def environment(self) -> dict[str, str]:
        """Returns the environment of the platform's commands."""
        paths = [str(ROOT / part) for part in ("platform", "plugins", "dashboard")]
        others = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        return {**os.environ, "DELTALAB_DB": str(self.out / "lab.db"), "PYTHONPATH": os.pathsep.join([*paths, *others])}

    def note(self, **values: Any) -> None:
        """Adds values to winner.json."""
        file = self.out / "winner.json"
        if file.exists():  # stages may run at once on different GPUs
            self.measured = json.loads(file.read_text())
        self.measured |= values
        file.write_text(json.dumps(self.measured, indent=2) + "\n")

    # ------------------------------------------------------------------------------------------------------------------

    def study(self) -> None:
        """Runs the study."""
        profile = ["--profile", "toy"] if self.options.toy else []
        self.note(study_seconds=self.run("study", "run", STUDY, "--executor", "inline", "--unchecked", *profile))

    def pack(self) -> None:
        """Trains a tokenizer, and packs text by it."""
        text = self.out / "text"
        text.mkdir(exist_ok=True)
        bundled = sorted((ROOT / "platform" / "deltalab" / "tasks" / "kjv_jargon").glob("*.txt"))
        most = 60_000 if self.options.toy else None
        for file in bundled:
            (text / file.name).write_text(file.read_text(encoding="utf-8")[:most], encoding="utf-8")
        texts = [text / file.name for file in bundled]
        library = [] if self.options.toy else [*_library(), "--files", "*.py"]
        tokenizer, vocabulary = self.out / "tokenizer", 512 if self.options.toy else 32000
        self.run("data", "tokenizer", *texts, *library, "--out", tokenizer, "--vocab", vocabulary)
        shares = "train=0.9,validation=0.05,test=0.05"
        seconds = self.run(
            "data", "pack", *texts, *library, "--out", self.out / "packed", "--tokenizer", tokenizer, "--split", shares,
            "--separator", "\n\n",
        )  # fmt: skip
        splits = json.loads((self.out / "packed" / "meta.json").read_text())["splits"]
        self.note(pack_seconds=seconds, tokens={name: split["tokens"] for name, split in splits.items()})

    def export(self) -> None:
        """Exports the winner and the baselines."""
        name = "winner:toy" if self.options.toy else "winner"
        size = (
            ["--set", "model.vocab_size=512", "--set", "model.d_model=32", "--set", "recipe.optimizer.lr=0.005"]
            if self.options.toy
            else ["--scale", "340M"]
        )
        batch = {"sequences": 8, "length": 64} if self.options.toy else {"sequences": 16, "length": 4096}
        recipe = [f"recipe.batch.{key}={value}" for key, value in batch.items()]
        recipe = [f"recipe.steps={self.options.steps}", *recipe]
        settings = [word for pair in recipe for word in ("--set", pair)]
        for folder, chosen in (("best", ["--best"]), *((name, ["--arm", name]) for name in BASELINES)):
            shutil.rmtree(self.out / folder, ignore_errors=True)
            self.run(
                "export", name, self.out / folder, *chosen, "--to", "torchtitan", *size, *settings, "--no-weights",
                "--tokenizer", self.out / "packed",
            )  # fmt: skip

    def training(self, folder: str, run: str, gpus: int, *, every: int) -> list[str]:
        """Returns the command that trains an exported folder."""
        device = ["--gpus", "0", "--processes", str(gpus)] if self.options.toy else ["--gpus", str(gpus)]
        settings = {
            "checkpoint.every": every,
            "checkpoint.keep": 2,
            "validation.every": every,
            "log.every": 1 if self.options.toy else 5,
        }
        settings |= {"validation.sequences": 8 if self.options.toy else 32}
        return [
            "train", str(self.out / folder), "--data", str(self.out / "packed"), "--out", str(self.out / "runs" / run),
            *device, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
            *(word for pair in self.options.set for word in ("--set", pair)),
        ]  # fmt: skip

    def train(self) -> None:
        """Trains, kills every process, trains on, and compares the losses of the steps that were trained twice."""
        run = self.out / "runs" / "one"
        every = max(2, self.options.steps // 4)
        command = self.training("best", "one", 2 if self.options.toy else 1, every=every)
        print("$ platform", *command, flush=True)
        child = subprocess.Popen([*PLATFORM, *command], cwd=self.out, env=self.environment())
        began = time.monotonic()
        more = 1 if self.options.toy else 5
        while not (saved := complete_checkpoints(run)) or _losses(run).keys() <= set(range(_step(saved[0]) + more)):
            if child.poll() is not None or time.monotonic() - began > self.options.limit:
                raise SystemExit("winner.py: the training did not come to the point where it is killed")
            time.sleep(0.05)
        family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
        for process in family:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family)
        child.wait()
        before, newest = _losses(run), _step(complete_checkpoints(run)[-1])
        print(f"killed {len(family)} processes after step {max(before)}", flush=True)
        seconds = self.run(*command)
        after = _losses(run)
        pairs = _losses_of_repeated_steps(run)
        self.note(
            killed_after=max(before),
            whole_checkpoint=newest,
            trained_on_seconds=seconds,
            steps_trained_twice=len(pairs),
            largest_difference=max((abs(first - last) for first, last in pairs), default=None),
            one=_speed(run),
            last_loss=after[max(after)],
        )

    def double(self) -> None:
        """Trains the winner on two GPUs."""
        if not self.options.toy and torch.cuda.device_count() < 2:
            print("winner.py: one GPU here, no training on two", flush=True)
            return
        self.run(*self.training("best", "two", 1 if self.options.toy else 2, every=self.options.steps))
        one, two = _losses(self.out / "runs" / "one"), _losses(self.out / "runs" / "two")
        both = sorted(set(one) & set(two))
        self.note(
            two=_speed(self.out / "runs" / "two"), one_and_two={step: [one[step], two[step]] for step in both[-3:]}
        )

    def compare(self) -> None:
        """Trains the baselines."""
        gpus = 2 if self.options.toy else max(1, min(2, torch.cuda.device_count()))
        for name in BASELINES:
            self.run(*self.training(name, name, gpus, every=self.options.steps))
            self.note(**{name: _speed(self.out / "runs" / name)})

    def hf(self) -> None:
        """Exports the newest checkpoint of the winner."""
        shutil.rmtree(self.out / "hf", ignore_errors=True)
        self.run("export", self.out / "runs" / "one", self.out / "hf")

    def eval(self) -> None:
        """Evaluates the exported checkpoint."""
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
        limit = 20 if self.options.toy else 100
        task_list = f"loss,{tasks / 'last_word.yaml'}"
        self.run("eval", self.out / "hf", "--tasks", task_list, "--data", self.out / "packed", "--limit", limit)
        self.run("study", "report", "winner:toy" if self.options.toy else "winner")


def _library() -> list[Path]:
    """The files and folders of Python's standard library, without installed packages and tests."""
    left_out = ("site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__")
    return [
        path
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).iterdir())
        if path.suffix == ".py" or (path.is_dir() and path.name not in left_out and any(path.rglob("*.py")))
    ]


def _lines(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl` that are complete."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _losses(run: Path) -> dict[int, float]:
    """The training loss by step. If a step stands twice, the last value counts."""
    return {row["step"]: row["value"] for row in _lines(run) if (row["split"], row["name"]) == ("train", "loss")}


def _losses_of_repeated_steps(run: Path) -> list[tuple[float, float]]:
    """The first and the last loss of each step that stands several times in `metrics.jsonl`."""
    losses: dict[int, list[float]] = {}
    for row in _lines(run):
        if (row["split"], row["name"]) == ("train", "loss"):
            losses.setdefault(row["step"], []).append(row["value"])
    return [(values[0], values[-1]) for values in losses.values() if len(values) > 1]


def _speed(run: Path) -> dict[str, float]:
    """The medians of speed and memory over the second half of a training."""
    series: dict[str, list[float]] = {}
    for row in _lines(run):
        if row["name"] in ("tokens_per_second", "mfu", "memory_gib"):
            series.setdefault(row["name"], []).append(row["value"])
    halves = {name: sorted(values[len(values) // 2 :]) for name, values in series.items()}
    return {name: values[len(values) // 2] for name, values in halves.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="toy size, on two processes of the CPU")
    parser.add_argument("--steps", type=int, help="of each training: 200, or 12 at toy size")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a command may take")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every training's recipe")
    options = parser.parse_args()
    options.steps = options.steps or (12 if options.toy else 200)
    lab = Lab(options)
    for stage in options.stages.split(","):
        if stage not in STAGES:
            parser.error(f"unknown stage '{stage}'; allowed: {', '.join(STAGES)}")
        began = time.monotonic()
        getattr(lab, stage)()
        print(f"== {stage}: {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(lab.measured, indent=2))


if __name__ == "__main__":
    main()
