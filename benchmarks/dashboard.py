"""Measures the dashboard on large ledgers: the first page of a server, every page's script, and the server's memory.

    python benchmarks/dashboard.py --out benchmarks/dashboard_cpu.json  # 10 minutes, 300 MB in --folder

The ledger has 200 studies, 20,000 trials and 3 million rows of metrics in SQLite. One study, `large`, has 2,000 trials:
20 arms with 100 candidates and 6 seeds, whose curves of one metric have 72,000 points. The others have 8 arms.
The figures are:

- first page: seconds from the browser's request until the answer is read, and until everything is drawn. The server was
  just started, and still imports. The same times follow for another tab without a cache, and for two headings alone.
- pages: seconds of a page's script in this process, by Streamlit's AppTest, at the first run and at a second one.
- server, MB: resident memory of the server after a browser visited every page of `large` and of two other studies.
- report: seconds of `deltalab study report discover:gpu --db shipped`, a process of its own.

The pages are those of `large`, of a study of 90 trials, and of the shipped discover, a search of 1,059 trials.
"""

import argparse
import json
import os
import platform
import random
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page
from streamlit.testing.v1 import AppTest

import deltalab_dashboard
from deltalab.store import Store
from deltalab.store.copies.shipped import SHIPPED, shipped_ledger
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.running.run import arm_records, provenance
from deltalab.study.specs.study_file import load_study
from deltalab_dashboard.app import VIEWS
from deltalab_dashboard.frame import DATABASE, STUDY
from deltalab_dashboard.picture import browser, served, settle
from deltalab_dashboard.serve import load
from deltalab_dashboard.text import label

APP = Path(deltalab_dashboard.__file__).parent / "app.py"
PAGES = tuple(f"{view.name}.py" for views in VIEWS.values() for view in views)

SPEC: dict[str, Any] = {
    "task": {"mqar": {"length": 32, "pairs": 4, "vocab_size": 64}},
    "base": {
        "rule": "comba",
        "model": {"d_model": 32, "layers": 1, "heads": 2},
        "train": {"steps": 600, "batch_size": 32, "lr": 2e-2},
    },
    "seeds": 6,
}
STUDIES, TRIALS = 200, 20_000
LARGE, LARGE_ARMS, LARGE_SEEDS, LARGE_POINTS = 2_000, 20, 6, 6
ARMS, SEEDS = 8, 4
SEARCH = "discover:gpu"


def spec(name: str, arms: int, candidates: int, seeds: int) -> dict[str, Any]:
    """Returns the file of a study."""
    return {
        **SPEC,
        "name": name,
        "arms": {f"decay_{i}": {"train": {"weight_decay": 0.1 + i / 100}} for i in range(1, arms)},
        "tune": {"train.lr": {"log_uniform": [7e-3, 6e-2]}, "trials": candidates},
        "seeds": seeds,
    }


def metrics(draw: random.Random, arm: int, points: int, others: int) -> list[tuple[str, str, int, float]]:
    """Draws the metrics of a run.

    Args:
        draw: The source of random numbers.
        arm: The number of the arm.
        points: The number of values of validation accuracy, and of validation loss.
        others: The number of values of the training loss.
    """
    rate, noise = 2e-3 * (1 + arm / 10), 0.05 * draw.random()
    rows = []
    for i in range(1, points + 1):
        step = 600 * i // points
        accuracy = 1 - 0.9 * 2 ** (-step * rate) - noise
        rows += [("validation", "accuracy", step, accuracy), ("validation", "loss", step, 4 * (1 - accuracy))]
    rows += [("train", "loss", 600 * i // others, 4 * 2 ** (-i / others)) for i in range(1, others + 1)]
    rows += [("test", "accuracy", 600, accuracy - 0.01), ("test", "loss", 600, 4 * (1 - accuracy))]
    return [*rows, ("cost", "flops_per_token", 600, 1e5 + arm), ("cost", "state_size", 600, 64.0)]


def build(file: Path) -> None:
    """Writes the ledger: studies by the store, their trials in bulk."""
    draw = random.Random(0)
    with Store.open(file) as store, closing(sqlite3.connect(file)) as connection:
        for number in range(STUDIES):
            large = number == STUDIES // 2
            trials = LARGE if large else (TRIALS - LARGE) // (STUDIES - 1) + (number < (TRIALS - LARGE) % (STUDIES - 1))
            arms, seeds, points = (LARGE_ARMS, LARGE_SEEDS, LARGE_POINTS) if large else (ARMS, SEEDS, 12)
            study_file = spec("large" if large else f"study_{number}", arms, -(-trials // arms), seeds)
            plan = make_plan(load_study(study_file))
            study = store.begin_study(
                study_file["name"], None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan),
                provenance(plan, {}),
            )  # fmt: skip
            add(connection, plan, study, [(i % arms, i // arms) for i in range(trials)], seeds, points, draw)
            store.finish_study(study, "done")


def add(
    connection: sqlite3.Connection,
    plan: Plan,
    study: int,
    trials: list[tuple[int, int]],
    seeds: int,
    points: int,
    draw: random.Random,
) -> None:
    """Adds the trials (arm, number) of a study, as `Store.record_trial` writes them."""
    [first] = connection.execute("SELECT min(id) FROM arm WHERE study_id = ?", [study]).fetchone()
    [last] = connection.execute("SELECT coalesce(max(id), 0) FROM trial").fetchone()
    [run] = connection.execute("SELECT coalesce(max(id), 0) FROM run").fetchone()
    sha = "0" * 64
    connection.execute("INSERT OR IGNORE INTO rule_version VALUES (1, 'comba', ?, 'class Comba: ...')", [sha])
    configs = [plan.job(arm, "confirm", 0, {"train.lr": 0.01}).config for arm in plan.arms]
    hardware, day = json.dumps({"device": "NVIDIA H100", "host": "here", "torch": "2.13", "stack": 6}), "2026-01-01"
    rows: dict[str, list[tuple[Any, ...]]] = {"trial": [], "arm_trial": [], "run": [], "metric": []}
    for trial, (arm, number) in enumerate(trials, last + 1):
        lr = 7e-3 * 8.6 ** draw.random()
        config = configs[arm] | {"train": configs[arm]["train"] | {"lr": lr}}
        time_of_day = f"{trial // 3600 % 24:02d}:{trial // 60 % 60:02d}:{trial % 60:02d}.000000"
        rows["trial"].append(
            (trial, f"{trial:064x}", "mqar", 1, "confirm", json.dumps(config), "done", None,
             f"{day} 00:00:00.000000", f"{day} {time_of_day}", 60.0, 10_000, 64, 1e5, hardware, 1)
        )  # fmt: skip
        rows["arm_trial"].append((first + arm, trial, number, json.dumps({"train.lr": lr})))
        for seed in range(1, seeds + 1):
            run += 1
            diverged = draw.random() < 0.002
            rows["run"].append((run, trial, seed, "diverged" if diverged else "done", 300 if diverged else None))
            values = metrics(draw, arm, points, others=8)
            rows["metric"] += [(run, *row) for row in values if not diverged or row[2] <= 300]
    for table, values in rows.items():
        connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
    connection.commit()


def by_script(file: Path, study: str, trial: str) -> dict[str, dict[str, float]]:
    """Measures the seconds of each page's script in this process, at a first run and at a second one.

    Args:
        file: The ledger.
        study: The label of the study.
        trial: The key of a trial of the study.
    """
    os.environ[DATABASE] = str(file)
    load()
    times = {}
    for page in PAGES:
        seconds, cpu = [], []
        for _ in range(2):
            start = time.perf_counter(), time.process_time()
            app = AppTest.from_file(APP, default_timeout=300)
            app.query_params[STUDY] = study
            if page == "trial.py":
                app.query_params["trial"] = trial
            app.switch_page(f"views/{page}").run()
            seconds.append(time.perf_counter() - start[0])
            cpu.append(time.process_time() - start[1])
            assert not app.exception, (page, app.exception)
        times[page] = {
            "first": round(seconds[0], 2), "first, CPU": round(cpu[0], 2),
            "again": round(seconds[1], 2), "again, CPU": round(cpu[1], 2),
        }  # fmt: skip
        print(page, times[page], flush=True)
    return times


def by_browser(file: Path, studies: list[str]) -> dict[str, Any]:
    """Measures the first page of a new server in a browser, and the server's memory after every page of `studies`."""
    with served(file) as url, browser() as opened, opened.new_page() as page:
        first = opening(page, url)
        loaded = resident()
        with opened.new_page() as another:
            again = opening(another, url)
        for study in studies:
            for name in PAGES:
                path = "" if name == "answer.py" else Path(name).stem
                page.goto(f"{url}/{path}?{urlencode({STUDY: study})}", timeout=120_000)
                settle(page)
        return {
            "first page": first,
            "first page of another tab": again,
            "a title alone in Streamlit, another tab": empty(opened),
            "server, MB, after it": round(loaded),
            "server, MB, after every page": round(resident()),
        }


def by_report() -> float:
    """Measures the seconds of a second report of the shipped search in a terminal."""
    command = [sys.executable, "-m", "deltalab", "study", "report", SEARCH, "--db", SHIPPED]
    for _ in range(2):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
    return round(time.perf_counter() - start, 2)


def opening(page: Page, url: str) -> dict[str, float]:
    """Measures the seconds until the first heading below the title is seen, and until the page's last change."""
    page.goto(url)
    page.locator("[data-testid=stHeading]").nth(1).wait_for()
    seen = page.evaluate("() => performance.now() / 1000")
    settle(page)
    return {"answer": round(seen, 2), "all": round(page.evaluate("() => window.settling.since / 1000"), 2)}


def empty(opened: Browser) -> dict[str, float]:
    """Measures the same seconds for a page of two headings, by a server that has drawn the page before."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        file = Path(folder) / "empty.py"
        file.write_text("import streamlit as st\nst.title('title')\nst.header('heading')\n")
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        options = ["--server.port", port, "--server.headless", "true", "--browser.gatherUsageStats", "false"]
        server = subprocess.Popen([sys.executable, "-m", "streamlit", "run", str(file), *options])
        try:
            time.sleep(10)
            for _ in range(2):
                with opened.new_page() as page:
                    times = opening(page, f"http://127.0.0.1:{port}")
            return times
        finally:
            server.terminate()


def resident() -> float:
    """Returns the resident memory in MB of the dashboard that this process runs."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            stat = (folder / "stat").read_text() if (folder / "stat").exists() else ""
            if stat and int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                command = (folder / "cmdline").read_text()
                if str(APP) in command:
                    pages = int((folder / "statm").read_text().split()[1])
                    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    raise RuntimeError("no dashboard runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="needs 300 MB")
    parser.add_argument("--db", type=Path, help="a ledger that this script built; None builds one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = options.db or Path(folder) / "lab.db"
        if not options.db:
            build(file)
        with Store.open(file, create=False) as store, closing(sqlite3.connect(file)) as connection:
            labels = {study.name: label(study) for study in store.studies()}
            trials = {name: store.trials(store.study(name).id)[0].key for name in ("large", "study_7")}
            tables = ("study", "trial", "run", "metric")
            count = {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
        figures: dict[str, Any] = {"rows": count}
        figures["browser"] = by_browser(file, [labels["large"], labels["study_7"], labels["study_8"]])
        print(figures["browser"], flush=True)
        for title, name in (("large", "large"), ("a study of 90 trials", "study_7")):
            figures[f"pages of {title}"] = by_script(file, labels[name], trials[name])
        shipped = shipped_ledger(print)
        with Store.open(shipped, create=False) as store:
            search = store.study(SEARCH)
            trial = store.trials(search.id)[0].key
        figures["pages of the shipped discover"] = by_script(shipped, label(search), trial)
        figures["report of it"] = by_report()
        figures["about"] = {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "streamlit": version("streamlit"),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if options.out:
            options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
