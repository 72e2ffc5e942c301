"""Measures the ledger as it grows: the times of a running study's operations, of a report and of a copy.

    python benchmarks/ledger.py --out ledger.json  # SQLite: 10 minutes, 2 GB in --folder
    python benchmarks/ledger.py --out ledger.json --postgresql postgresql:///empty  # also in an empty database

The ledger has 100,000 trials and 10 million rows of metrics, written by SQL: studies of 100 trials, each with a run of
90 rows, and one study, `asked`, of 8 arms with 8 candidates and 8 seeds, whose 512 runs have 2,000 rows each. The
figures are:

- operations: ms of each operation of a running study (the median of 50), with 1,000, 10,000 and 100,000 trials in the
  ledger.
- report: seconds from the database to the JSON in a running process (the median of 3), and of the whole command.
  `seconds without the ledger` is the time of `deltalab version`, which is that of Python and its imports.
- import, export, vacuum: seconds of these commands on the whole ledger.

CPU times are those of this process. Wall times also depend on the other work of the machine.
"""

import argparse
import json
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.reports.report import report
from deltalab.study.running.run import arm_records, provenance
from deltalab.study.specs.study_file import load_study

ASKED: dict[str, Any] = {
    "name": "asked",
    "task": {"mqar": {"length": 32, "pairs": 4, "vocab_size": 64}},
    "base": {
        "rule": "comba",
        "model": {"d_model": 32, "layers": 1, "heads": 2},
        "train": {"steps": 1000, "batch_size": 32, "lr": 2e-2},
    },
    "arms": {f"decay_{i}": {"train": {"weight_decay": i / 100}} for i in range(1, 8)},
    "tune": {"train.lr": {"log_uniform": [7e-3, 6e-2]}, "trials": 8},
    "seeds": 8,
}
ROWS_ASKED = 2000
TRIALS, ROWS_OF_OTHERS = 100_000, 90
SIZES = (1_000, 10_000, 100_000)

OTHERS = """
WITH RECURSIVE n(i) AS (SELECT :low UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :high)
INSERT INTO {table} ({columns}) SELECT {values} FROM n {where}
"""
PER_STUDY = 100
TABLES = {
    "study": (
        "id, name, identity, spec, state, created_at, provenance",
        "10 + :shift + i / 100, 'other_' || (i / 100), 'other_' || (i / 100), '{}', 'done', "
        "'2026-01-01 00:00:00.000000', '{}'",
        "WHERE i % 100 = 0",
    ),
    "arm": (
        "id, study_id, name, is_base, position, change, config",
        "100 + :shift + i / 100, 10 + :shift + i / 100, 'base', 1, 0, '{}', '{}'",
        "WHERE i % 100 = 0",
    ),
    "trial": (
        "id, key, task, task_version, stage, config, state, started_at, finished_at, seconds, hardware, "
        "rule_version_id",
        "1000 + :shift + i, printf('%064x', i), 'mqar', 1, 'confirm', :config, 'done', '2026-01-01 00:00:00.000000', "
        "'2026-01-01 00:01:00.000000', 60.0, '{}', (SELECT min(id) FROM rule_version)",
        "",
    ),
    "arm_trial": ('arm_id, trial_id, number, "values"', "100 + :shift + i / 100, 1000 + :shift + i, i % 100, '{}'", ""),
    "run": ("id, trial_id, seed, state", "10000 + :shift + i, 1000 + :shift + i, 1, 'done'", ""),
    "metric": (
        "run_id, split, name, step, value",
        "10000 + :shift + i, CASE s.k % 3 WHEN 0 THEN 'train' WHEN 1 THEN 'validation' ELSE 'test' END, "
        "CASE s.k / 3 % 2 WHEN 0 THEN 'loss' ELSE 'accuracy' END, s.k, 0.5 + s.k / 1000.0",
        ", (WITH RECURSIVE s(k) AS (SELECT 0 UNION ALL SELECT k + 1 FROM s WHERE k + 1 < :rows) SELECT k FROM s) AS s",
    ),
}


def begin(store: Store, plan: Plan) -> int:
    """Begins the study `asked`, and returns its id."""
    return store.begin_study(
        "asked", None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan), provenance(plan, {})
    )


def asked_trials(plan: Plan) -> list[tuple[str, TrialRecord, int, dict[str, Any]]]:
    """Returns the arm, the trial, the number and the values of each trial of the study `asked`.

    The scores differ by arm and seed.
    """
    draw = random.Random(0)
    trials = []
    for position, arm in enumerate(plan.arms):
        for number in range(8):
            values = {"train.lr": 1e-2 * 1.2**number}
            job = plan.job(arm, "confirm", number, values)
            runs = []
            for seed in job.seeds:
                score = 0.5 + 0.01 * position + 0.1 * draw.random()
                metrics = [("train", "loss", step, 3 - step / 1000) for step in range(ROWS_ASKED - 4)]
                metrics += [(split, "accuracy", 1000, score) for split in ("validation", "test")]
                metrics += [("cost", "flops_per_token", 1000, 1e5), ("test", "loss", 1000, 1.0)]
                runs.append(RunRecord(seed, "done", None, metrics, []))
            rule = RuleRecord("comba", "0" * 64, "class Comba: ...")
            record = TrialRecord(
                job.key, job.task, job.task_version, "confirm", job.config, "done", 1e9, 1e9 + 60, 60.0, rule,
                parameters=10_000, state_size=64, tokens_per_second=1e5, hardware={"cpu": "x"}, runs=runs,
            )  # fmt: skip
            trials.append((arm.name, record, number, values))
    return trials


def add_others(file: Path, low: int, high: int, config: str) -> None:
    """Adds the trials from number `low` to `high`, in several transactions, so that the journal stays small."""
    with closing(sqlite3.connect(file)) as connection:
        for start in range(low, high, 10_000):
            # The shift leaves room for ids of rows that `operations` adds between two sizes.
            parameters = {
                "shift": 100 * high,
                "low": start,
                "high": min(start + 10_000, high),
                "config": config,
                "rows": ROWS_OF_OTHERS,
            }
            for table, (columns, values, where) in TABLES.items():
                connection.execute(OTHERS.format(table=table, columns=columns, values=values, where=where), parameters)
            connection.commit()


def milliseconds(operation: Callable[[int], object], repeats: int = 50) -> dict[str, float]:
    """Measures the median wall and CPU time of an operation, which gets the number of the repeat."""
    wall, cpu = [], []
    for i in range(repeats):
        start = time.perf_counter(), time.process_time()
        operation(i)
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return {"ms": round(1e3 * statistics.median(wall), 2), "ms, CPU": round(1e3 * statistics.median(cpu), 2)}


def operations(where: str, keys: list[str], mark: str) -> dict[str, dict[str, float]]:
    """Measures the operations of a running study of 60 trials, each with 8 seeds and 90 rows a seed.

    Args:
        where: The file or the URL of the ledger.
        keys: The keys of 500 trials in the ledger.
        mark: The name of the study, which is also the prefix of its trials' keys.
    """
    rows = [("train", "loss", step, 1.0) for step in range(86)]
    rows += [(split, name, 100, 0.5) for split in ("validation", "test") for name in ("loss", "accuracy")]
    rule = RuleRecord("comba", "1" * 64, "class Comba: ...")

    def record(i: int) -> None:
        runs = [RunRecord(seed, "done", None, rows, []) for seed in range(8)]
        trial = TrialRecord(f"{mark}{i}", "mqar", 1, "confirm", {}, "done", 1e9, 1e9, 1.0, rule, runs=runs)
        store.record_trial(study, "base", trial, i, {})

    with Store.open(where) as store:
        study = store.begin_study(mark, None, mark, {}, [ArmRecord("base", True, {}, {})], {})
        result = {
            "record_trial": milliseconds(record),
            "known_trials of 1": milliseconds(lambda i: store.known_trials([f"{mark}{i}"])),
            "known_trials of 500": milliseconds(lambda i: store.known_trials(keys), 10),
            "attach": milliseconds(lambda i: store.attach(study, "base", keys[i], 100 + i, {})),
            "study": milliseconds(lambda i: store.study(study)),
            "trials": milliseconds(lambda i: store.trials(study)),
        }
    result["open"] = milliseconds(lambda i: Store.open(where, create=False).close(), 10)
    return result


def command(*words: str) -> float:
    """Runs a command of the platform, and returns its seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "deltalab", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure_report(where: str) -> dict[str, float]:
    """Measures the report of the study `asked`."""

    def print_report(_: int) -> None:
        with Store.open(where, create=False) as store:
            report(store, store.study("asked").id).to_json()

    times = milliseconds(print_report, 3)
    return {
        "seconds": times["ms"] / 1e3,
        "seconds, CPU": times["ms, CPU"] / 1e3,
        "seconds of the command": min(command("study", "report", "asked", "--json", "--db", where) for _ in range(3)),
        "seconds without the ledger": min(command("version") for _ in range(3)),
    }


def save(figures: dict[str, Any], file: Path | None) -> None:
    """Adds the versions and the machine to the figures, and writes the figures if there is a file."""
    figures["about"] = {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{name: version(name) for name in ("sqlalchemy", "psycopg")},
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="needs 4 GB")
    parser.add_argument("--postgresql", help="the URL of an empty database")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    plan = make_plan(load_study(ASKED))
    trials = asked_trials(plan)
    config = json.dumps(trials[0][1].config)
    keys = [f"{i:064x}" for i in range(500)]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = Path(folder) / "lab.db"
        with Store.open(file) as store:
            study = begin(store, plan)
            for arm, record, number, values in trials:
                store.record_trial(study, arm, record, number, values)
            store.finish_study(study, "done")
        low = 0
        for high in [size for size in SIZES if size < options.trials] + [options.trials]:
            add_others(file, low, high, config)
            low = high
            times = operations(str(file), keys, f"at_{high}_")
            figures.setdefault("sqlite", {}).setdefault("operations", {})[f"{high} trials"] = times
            print(high, times, flush=True)
        figures["sqlite"]["report"] = measure_report(str(file))
        with closing(sqlite3.connect(file)) as connection:
            count = {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}
        figures["rows"] = count
        figures["sqlite"]["megabytes"] = file.stat().st_size / 1e6
        print(figures["rows"], figures["sqlite"], flush=True)
        save(figures, options.out)
        if options.postgresql:
            postgresql = figures["postgresql"] = {}
            postgresql["import, seconds"] = command("db", "import", str(file), "--db", options.postgresql)
            postgresql["operations"] = {f"{low} trials": operations(options.postgresql, keys, "postgresql")}
            postgresql["report"] = measure_report(options.postgresql)
            back = str(Path(folder) / "back.db")
            postgresql["export, seconds"] = command("db", "export", back, "--db", options.postgresql)
            print(postgresql, flush=True)
        figures["sqlite"]["vacuum, seconds"] = command("db", "vacuum", "--db", str(file))
    save(figures, options.out)


if __name__ == "__main__":
    main()
