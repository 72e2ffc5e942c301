"""Kills a study that an engine trains, again and again, and counts how often its numbers stay what they were.

    python benchmarks/engine_kills.py --engine torchtitan --kills 30 --out kills.json

A toy study trains one run of each of two arms on two CPU processes: first once without a kill, then in studies with up
to `STRIKES` kills each, at random moments. A kill is SIGKILL of the driver, of its child, of torchrun or of a rank, or
a full disk, which gets room again after some seconds (as root, on a disk of its own; else it is left out). A study
counts if all losses and metrics of its ledger equal those of the whole one to the last bit, and if no process of the
engine is left. docs/decisions/213 has the result.
"""

import argparse
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

STRIKES = 3
MIB = 24
"""The size of the small disk."""
VICTIMS = {"driver": "study run", "torchrun": "distributed.run", "rank": "deltalab_train", "child": "", "disk": ""}
"""What is struck, with a part of the command of its process."""


def study(engine: str) -> dict[str, Any]:
    """Returns the study: 400 steps with a checkpoint at every 40th."""
    train = {"steps": 400, "batch_size": 8, "lr": 0.01, "evaluations": 4, "eval_batches": 2}
    return {
        "name": "kills",
        "task": {"text": {"length": 16, "corpus": "packed", "times": [2]}},
        "base": {"rule": "gated_deltanet", "model": {"d_model": 16, "layers": 1, "heads": 2}, "train": train},
        "arms": {"comba": {"rule": "comba"}},
        "seeds": 1,
        "engine": {"name": engine, "processes": 2, "settings": {"checkpoint.every": 40, "log.every": 10}},
    }


class Lab:
    """A folder with packed bytes, the study, and its ledgers."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder = folder
        lines = (f"line {n}: {'abcdefghij'[n % 10] * (n % 7 + 3)}\n\n" for n in range(6000))
        (folder / "text.txt").write_text("".join(lines))
        shares = ["--separator", "\n\n", "--split", "train=0.8,validation=0.1,test=0.1"]
        pack = [sys.executable, "-m", "deltalab", "data", "pack", "text.txt", "--out", "packed", *shares]
        subprocess.run(pack, cwd=folder, check=True, capture_output=True)
        (folder / "s.yaml").write_text(yaml.safe_dump(study(engine)))

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Starts the driver, whose ledger is NAME.db and whose weights lie in the folder NAME."""
        options = ["--executor", "inline", "--unchecked", "--db", f"{name}.db", "--storage", str(self.folder / name)]
        command = [sys.executable, "-m", "deltalab", "study", "run", "s.yaml", *options]
        log = (self.folder / f"{name}.log").open("ab")
        return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def numbers(self, name: str) -> dict[tuple[Any, ...], float]:
        """Returns the losses and the scores in a ledger: (trial, seed, split, metric, step) -> value."""
        query = (
            "SELECT key, seed, split, name, step, value FROM metric JOIN run ON run.id = run_id "
            "JOIN trial ON trial.id = trial_id WHERE name LIKE '%loss%' OR name LIKE '%bits_per_byte%'"
        )
        with closing(sqlite3.connect(self.folder / f"{name}.db")) as ledger:
            return {tuple(row[:-1]): row[-1] for row in ledger.execute(query)}


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a small disk at a folder for the length of the block, and says whether this process may."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MIB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def strike(driver: subprocess.Popen[bytes], disk: Path, victim: str) -> bool:
    """Strikes a victim of a running study. Returns whether there was one."""
    if victim == "disk":
        ballast = disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(4)
        ballast.unlink()
        return True
    with suppress(psutil.NoSuchProcess):
        me = psutil.Process(driver.pid)
        family = {process: " ".join(process.cmdline()) for process in [me, *me.children(recursive=True)]}
        torchrun = [process for process, line in family.items() if VICTIMS["torchrun"] in line]
        found = [process for process, line in family.items() if VICTIMS[victim] in line]
        if victim == "rank":
            found = [process for process in found if process not in torchrun]
        elif victim == "child":
            found = [parent for process in torchrun if (parent := process.parent())]
        if found:
            found[-1].send_signal(signal.SIGKILL)
            return True
    return False


def struck(lab: Lab, name: str, seconds: float, most: int, draw: random.Random) -> list[str]:
    """Runs a study to its end with up to `most` strikes. Returns what was struck."""
    done: list[str] = []
    with small_disk(lab.folder / name) as mounted:
        victims = [victim for victim in VICTIMS if victim != "disk" or mounted]
        while True:
            driver = lab.start(name)
            while driver.poll() is None:
                wait = time.monotonic() + draw.uniform(0.1, 0.8) * seconds
                while driver.poll() is None and time.monotonic() < wait:
                    time.sleep(0.1)
                victim = draw.choice(victims)
                if driver.poll() is None and len(done) < most and strike(driver, lab.folder / name, victim):
                    done.append(victim)
            if driver.returncode == 0:
                return done
            if len(done) == most and driver.returncode != -signal.SIGKILL:
                done.append("again")  # the command itself gave up, as after four losses of a stack
                most += 1


def left_over(folder: str) -> int:
    """Counts the processes of engines that still train in a folder."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            count += folder in process.environ().get("DELTALAB_RUN", "")
    return count


def main() -> None:
    """Strikes studies until there were as many kills as asked, and prints each study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("torchtitan", "accelerate"), default="torchtitan")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as temporary:
        lab = Lab(Path(temporary), given.engine)
        began = time.monotonic()
        if lab.start("whole").wait():
            raise SystemExit((lab.folder / "whole.log").read_text()[-2000:])
        seconds, expected = time.monotonic() - began, lab.numbers("whole")
        print(f"{given.engine}: {len(expected)} numbers, {seconds:.0f} s without a kill", flush=True)
        rows: list[dict[str, Any]] = []
        while sum(len(row["struck"]) for row in rows) < given.kills:
            name = f"study_{len(rows)}"
            done = struck(lab, name, seconds, STRIKES, draw)
            time.sleep(3)  # ranks look once a second for their launcher
            rows.append({"struck": done, "equal": lab.numbers(name) == expected, "left": left_over(temporary)})
            print(rows[-1], flush=True)
    whole = sum(row["equal"] and not row["left"] for row in rows)
    kills = sum(len(row["struck"]) for row in rows)
    print(f"{given.engine}: {whole} of {len(rows)} studies as without a kill, after {kills} kills")
    if given.out:
        given.out.write_text(json.dumps({"engine": given.engine, "numbers": len(expected), "studies": rows}) + "\n")


if __name__ == "__main__":
    main()
