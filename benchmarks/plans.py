"""Plans study files that nobody should write, and measures how long each of them takes.

    python benchmarks/plans.py plans.jsonl --out plans.json              # 2,000 files
    python benchmarks/plans.py plans.jsonl --again --out plans.json      # those that were wrong before, once more
    python benchmarks/plans.py more.jsonl --seed more --out more.json    # 2,000 other files

Each file is planned by `deltalab study plan` in a process that is forked after deltalab's imports, on one thread, and
killed after 20 s, or over 1 GB. PLANS.jsonl gets a line for each file as soon as it is planned, and a second run goes
on after the last one. The figures of a plan are:

- wall: seconds of wall time.
- seconds: wall time without that in which the process was ready to run and other processes had the cores.
- cpu: seconds of processor time.

`slowness` is how many times as long as a usual core this one took for a loop, and is measured anew after each plan of
over 3 s. A file counts as slow if `seconds` are over 5 times that. `import seconds` are the processor time of
deltalab's imports, which a command takes beside its plan.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.hostile import hostile  # noqa: E402
from tests.support.watched import MOST_SECONDS, Answer, Watched, slowness  # noqa: E402

MEASURED_ANEW = 3.0
"""Seconds of a plan after which the speed of the core is measured again: other processes change it."""
SLOWEST = 10
"""How many files the summary names."""


def text(seed: str, number: int) -> bytes:
    """Returns the file of a number."""
    return hostile(random.Random(f"{seed}/{number}"))


def recorded(file: Path) -> dict[int, dict[str, Any]]:
    """Reads the last line of each number."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["number"]: row for row in map(json.loads, lines)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the counts of what became of the files, and the quantiles of their times."""
    times = {}
    for name in ("wall", "seconds", "cpu"):
        cuts = statistics.quantiles([row[name] for row in rows], n=100, method="inclusive")
        most = max(row[name] for row in rows)
        times[name] = {f"{q}%": round(cuts[q - 1], 2) for q in (50, 90, 99)} | {"most": round(most, 2)}
    slowest = sorted(rows, key=lambda row: -row["seconds"])[:SLOWEST]
    return {
        "files": len(rows),
        "planned": sum(row["code"] == 0 for row in rows),
        "refused": sum(row["code"] == 2 for row in rows),
        "slow": sum(row["seconds"] > MOST_SECONDS * row["slowness"] for row in rows),
        "slow by processor time": sum(row["cpu"] > MOST_SECONDS * row["slowness"] for row in rows),
        "wrong": {str(row["number"]): row["wrong"] for row in rows if row["wrong"]},
        "refused because": dict(Counter(row["said"][:60] for row in rows if row["code"] == 2).most_common(5)),
        "seconds of a plan": times,
        "slowest": [{name: row[name] for name in ("number", "code", "seconds", "cpu", "slowness")} for row in slowest],
    }


def import_seconds() -> float:
    """Returns the processor time of a process that only imports what a plan needs."""
    path = os.pathsep.join(str(ROOT / name) for name in ("platform", "plugins"))
    command = [sys.executable, "-c", "import deltalab.study.forecast.estimate"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)


def main() -> None:
    """Plans the files and writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, metavar="PLANS.jsonl")
    parser.add_argument("--files", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="the number of the first file; default: %(default)s")
    parser.add_argument("--seed", default="plans", help="a word that makes the files; default: %(default)s")
    parser.add_argument("--again", action="store_true", help="plan the files that were wrong once more")
    parser.add_argument("--out", type=Path, required=True, help="the file of the summary")
    given = parser.parse_args()
    known = recorded(given.lines)
    numbers = [i for i in range(given.first, given.files) if i not in known or (given.again and known[i]["wrong"])]
    with tempfile.TemporaryDirectory() as folder, given.lines.open("a") as lines:
        watched = Watched(Path(folder))
        try:
            for done, number in enumerate(numbers):
                answer = watched.plan(text(given.seed, number))
                if answer.cpu > MEASURED_ANEW:
                    slowness.cache_clear()
                print(json.dumps(row(number, answer)), file=lines, flush=True)
                if answer.wrong or done % 100 == 99:
                    print(f"{done + 1} of {len(numbers)}: file {number}: {answer.wrong or 'right'}", flush=True)
        finally:
            watched.close()
    rows = [known for number, known in sorted(recorded(given.lines).items()) if number < given.files]
    found = {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores shared with others",
        "torch": version("torch"),
        "seed": given.seed,
        "import seconds": import_seconds(),
        **summary(rows),
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")


def row(number: int, answer: Answer) -> dict[str, Any]:
    """Returns the line of a file."""
    figures = {name: round(getattr(answer, name), 3) for name in ("wall", "seconds", "cpu")}
    return {
        "number": number, "code": answer.code, **figures, "megabytes": round(answer.extra / 1e6),
        "slowness": round(slowness(), 2), "wrong": answer.wrong, "said": answer.said[:200],
    }  # fmt: skip


if __name__ == "__main__":
    main()
