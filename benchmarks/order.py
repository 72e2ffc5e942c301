"""Measures which proxy task at which size orders rules as real text at 16 times its compute does.

    deltalab study run transfer --profile gpu                        # first: the ladder of all tasks
    python benchmarks/order.py --study transfer:gpu --out order.json # Kendall's tau of each task and size
    python benchmarks/order.py --study transfer:gpu --page docs/transfer.md
    python benchmarks/order.py --recorded order.json --page docs/transfer.md  # again, without the ledger
    python benchmarks/order.py --recorded order.json --without attention      # of the other arms

Reads the ledger of a study with `scales`. Each task but `--real` at each size is a proxy. Its target is the size of
`--real` whose compute is nearest to `--times` that of the proxy, as the base's training counts it.

`measured` is Kendall's tau-b of the arms' mean scores, the base among them. `tau` is the estimate for the arms' true
means, with its 95% interval, by `kendall.true_tau`. `own` and `ceiling` say how well the proxy and the target agree
with themselves: each is the median tau between the means of two halves of the seeds. A task does not tell the arms
apart if this median is near 0.
"""

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from kendall import tau, true_tau
from numpy.typing import NDArray

from deltalab.cli.options import find_study
from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.study.answers.ladder_trends import Size
from deltalab.study.answers.recorded_scores import scores_by_task
from deltalab.study.reports.report import report

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Order:
    """How a proxy orders the arms, against its target.

    Attributes:
        proxy: The label of the proxy.
        target: The label of the target.
        times: The target's compute over the proxy's.
        arms: Number of arms.
        seeds: Number of seeds.
        measured: Kendall's tau-b of the arms' mean scores.
        tau: The estimate of tau-b of the arms' true means; None if either task has no order.
        low: The lower end of tau's interval.
        high: The upper end of tau's interval.
        own: How well the proxy agrees with itself.
        ceiling: How well the target agrees with itself.
    """

    proxy: str
    target: str
    times: float
    arms: int
    seeds: int
    measured: float
    tau: float | None
    low: float
    high: float
    own: float
    ceiling: float


def repeated(scores: Array) -> float:
    """Median tau between the arms' means over two halves of the seeds, over all such halves, for scores [arms, seeds].

    >>> repeated(np.array([[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]]))
    1.0
    """
    count = scores.shape[1]
    taken = np.array([np.isin(np.arange(count), half) for half in combinations(range(count), count // 2)], dtype=float)
    first, second = (
        half_of_seeds @ scores.T / half_of_seeds.sum(1, keepdims=True) for half_of_seeds in (taken, 1 - taken)
    )
    return float(np.median(tau(first, second)))


def pairs(sizes: Mapping[str, Sequence[Size]], real: str, times: float) -> list[tuple[str, str, float]]:
    """Every proxy with its target, by label, and the target's compute over the proxy's.

    Args:
        sizes: The sizes of each task.
        real: The task whose order is to be predicted.
        times: The target's compute over the proxy's, as nearly as the sizes allow.

    Raises:
        InputError: `real` is none of the tasks.
    """
    if real not in sizes:
        raise InputError(f"--real {real}: the study has a whole ladder of {', '.join(sizes) or 'no task'}")
    found = []
    for task, ladder in sizes.items():
        for size in ladder if task != real else ():
            wanted = math.log(times * size.compute)
            target = min(sizes[real], key=lambda other: abs(math.log(other.compute) - wanted))
            found.append((size.label, target.label, target.compute / size.compute))
    return found


def orders(scores: Mapping[str, Array], compared: Sequence[tuple[str, str, float]]) -> list[Order]:
    """The order of every proxy, those with the highest lower end of tau first.

    Args:
        scores: The scores of a task at a size, [arms, seeds], by label. Higher is better, and all have the arms in the
            same order.
        compared: What `pairs` returns.
    """
    results = []
    for proxy, target, times in compared:
        x, y = scores[proxy], scores[target]
        found = true_tau(x, y)
        results.append(
            Order(
                proxy=proxy,
                target=target,
                times=times,
                arms=len(x),
                seeds=x.shape[1],
                measured=float(tau(x.mean(1), y.mean(1))),
                tau=None if math.isnan(found.tau) else found.tau,
                low=found.low,
                high=found.high,
                own=repeated(x),
                ceiling=repeated(y),
            )
        )
    return sorted(results, key=lambda order: (-order.low, -order.measured))


def measured(store: Store, study_id: int) -> tuple[list[str], dict[str, Array], dict[str, list[Size]]]:
    """The arms that all of a study's ladders have, their scores of the seeds that all have, and the ladders' sizes."""
    ladders, recorded = report(store, study_id).ladders, scores_by_task(store, store.study(study_id))
    labels = [size.label for ladder in ladders for size in ladder.sizes]
    arms = [row.arm for row in ladders[0].arms if all(row.arm in [r.arm for r in ladder.arms] for ladder in ladders)]
    seeds = [
        s
        for s in recorded[labels[0]].results[arms[0]]
        if all(s in recorded[at].results[a] for at in labels for a in arms)
    ]
    scores = {
        label: np.array([[recorded[label].results[arm][seed] for seed in seeds] for arm in arms])
        * (1 if recorded[label].maximize else -1)
        for label in labels
    }
    return arms, scores, {ladder.task: ladder.sizes for ladder in ladders}


def markdown(results: Sequence[Order]) -> str:
    """The table of orders."""
    lines = ["| proxy | target | compute | measured | tau | own | ceiling |", "| --- " * 7 + "|"]
    for order in results:
        estimate = "no order" if order.tau is None else f"{order.tau:+.2f} [{order.low:+.2f}, {order.high:+.2f}]"
        lines.append(
            f"| {order.proxy} | {order.target} | x{order.times:.3g} | {order.measured:+.2f} | {estimate} "
            f"| {order.own:+.2f} | {order.ceiling:+.2f} |"
        )
    return "\n".join(lines) + "\n"


def scores_table(arms: Sequence[str], scores: Mapping[str, Array], real: str) -> str:
    """Mean and standard deviation over seeds of each arm at the largest size of each task, best on `real` first."""
    largest = {label.partition(".")[0]: of_size for label, of_size in scores.items()}  # Sizes go up.
    tasks = [real, *(task for task in largest if task != real)]
    scores_of_tasks = [largest[task] for task in tasks]
    lines = [f"| arm | {' | '.join(tasks)} |", "| --- " * (len(tasks) + 1) + "|"]
    for n in np.argsort(-scores_of_tasks[0].mean(1)):
        cells = (f"{task_scores[n].mean():.3f} ± {task_scores[n].std(ddof=1):.3f}" for task_scores in scores_of_tasks)
        lines.append(f"| {arms[n]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def put(page: Path, region: re.Pattern[str], text: str) -> None:
    """Replaces what stands on a page between the two marks of a region."""
    content = page.read_text(encoding="utf-8")
    page.write_text(region.sub(lambda found: found[1] + text + found[2], content), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--study", help="NAME, NAME:PROFILE or the id")
    source.add_argument("--recorded", type=Path, help="a JSON file that --out wrote")
    parser.add_argument("--db", help="a file or URL; ./deltalab.db by default")
    parser.add_argument("--real", default="real_text", help="the task whose order is to be predicted")
    parser.add_argument("--times", type=float, default=16.0)
    parser.add_argument("--without", action="append", default=[], metavar="ARM", help="an arm to leave out; repeatable")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument(
        "--page", type=Path, help="a page, whose table between <!-- order STUDY --> and <!-- end --> is made anew"
    )
    options = parser.parse_args(arguments)
    try:
        if options.recorded:
            record = json.loads(options.recorded.read_text())
            study, real, times = (record[key] for key in ("study", "real", "times"))
            arms = [*next(iter(record["scores"].values()))]
            scores = {at: np.array([*of_arms.values()]) for at, of_arms in record["scores"].items()}
            compared = [tuple(order[key] for key in ("proxy", "target", "times")) for order in record["orders"]]
        else:
            study, real, times = options.study, options.real, options.times
            with Store.open(options.db, create=False) as store:
                arms, scores, sizes = measured(store, find_study(store, study, None).id)
            compared = pairs(sizes, real, times)
    except InputError as error:
        parser.error(str(error))
    if unknown_arms := [arm for arm in options.without if arm not in arms]:
        parser.error(f"--without: the study has no arm {unknown_arms[0]}, but {', '.join(arms)}")
    kept = [arm not in options.without for arm in arms]
    arms, scores = [arm for arm in arms if arm not in options.without], {at: of[kept] for at, of in scores.items()}
    results = orders(scores, compared)
    text = markdown(results) + "\n" + scores_table(arms, scores, real)
    if options.out:
        made: dict[str, Any] = {"study": study, "real": real, "times": times}
        made["orders"] = [asdict(result) for result in results]
        made["scores"] = {
            at: dict(zip(arms, arm_scores.round(4).tolist(), strict=True)) for at, arm_scores in scores.items()
        }
        options.out.write_text(json.dumps(made) + "\n")
    if options.page:
        put(options.page, re.compile(rf"(<!-- order {re.escape(study)} -->\n).*?(<!-- end -->)", re.DOTALL), text)
    print(text, end="")


if __name__ == "__main__":
    main()
