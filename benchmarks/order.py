"""Measures which proxy task at which size orders rules as real text at 16 times its compute does.

    platform study run transfer --profile gpu                        # first: the ladder of all tasks
    python benchmarks/order.py --study transfer:gpu --out order.json # Kendall's tau of each task and size
    python benchmarks/order.py --study transfer:gpu --page docs/transfer.md

Reads the ledger of a study with `scales`. Each task but `--real` at each size is a proxy. Its target is the size of
`--real` whose compute is nearest to `--times` that of the proxy, as the base's training counts it.

tau is Kendall's tau-b of the arms' mean scores, the base among them. Its interval is a 95% bootstrap, which draws the
seeds of the proxy and those of the target with replacement, apart from each other. `own` and `ceiling` say how well the
proxy and the target agree with themselves: each is the median tau between the means of two halves of the seeds. A task
does not tell the arms apart if this median is near 0.
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
from numpy.typing import NDArray

from deltalab.cli.options import find_study
from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.study.answers.ladder_trends import Size
from deltalab.study.answers.recorded_scores import scores_by_task
from deltalab.study.reports.report import report

Array = NDArray[np.float64]
RESAMPLES = 1000
REGION = re.compile(r"(<!-- order -->\n).*?(<!-- end -->)", flags=re.DOTALL)


@dataclass(frozen=True)
class Order:
    """How a proxy orders the arms, against its target.

    Attributes:
        proxy: The label of the proxy.
        target: The label of the target.
        times: The target's compute over the proxy's.
        arms: Number of arms.
        seeds: Number of seeds.
        tau: Kendall's tau-b of the arms' mean scores.
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
    tau: float
    low: float
    high: float
    own: float
    ceiling: float


def tau(x: Array, y: Array) -> Array:
    """Kendall's tau-b of each pair of rows [.., n] and [.., n]; 0 if all numbers of a row are equal.

    >>> tau(np.array([1.0, 2.0, 3.0]), np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])).tolist()
    [1.0, -1.0, 0.0]
    """
    above = np.triu_indices(x.shape[-1], 1)
    of_x, of_y = (np.sign(scores[..., above[0]] - scores[..., above[1]]) for scores in (x, y))
    size = np.sqrt((of_x != 0).sum(-1) * (of_y != 0).sum(-1))
    taus: Array = np.divide((of_x * of_y).sum(-1), size, out=np.zeros(np.shape(size)), where=size > 0)
    return taus


def draws(scores: Array, random: np.random.Generator) -> Array:
    """Means of arms over seeds drawn with replacement [RESAMPLES, arms], for scores [arms, seeds]."""
    drawn = random.integers(scores.shape[1], size=(RESAMPLES, scores.shape[1]))
    means: Array = scores[:, drawn].mean(-1).T
    return means


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


def orders(scores: Mapping[str, Array], sizes: Mapping[str, Sequence[Size]], real: str, times: float) -> list[Order]:
    """The order of every proxy.

    Args:
        scores: The scores of a task at a size, [arms, seeds], by label. Higher is better, and all have the arms in the
            same order.
        sizes: The sizes of each task.
        real: The task whose order is to be predicted.
        times: The target's compute over the proxy's, as nearly as the sizes allow.

    Raises:
        InputError: `real` is none of the tasks.
    """
    if real not in sizes:
        raise InputError(f"--real {real}: the study has a whole ladder of {', '.join(sizes) or 'no task'}")
    results = []
    for task, ladder in sizes.items():
        for size in ladder if task != real else ():
            wanted = math.log(times * size.compute)
            target = min(sizes[real], key=lambda other: abs(math.log(other.compute) - wanted))
            random = np.random.default_rng(0)
            x, y = scores[size.label], scores[target.label]
            drawn = tau(draws(x, random), draws(y, random))
            results.append(
                Order(
                    proxy=size.label,
                    target=target.label,
                    times=target.compute / size.compute,
                    arms=len(x),
                    seeds=x.shape[1],
                    tau=float(tau(x.mean(1), y.mean(1))),
                    low=float(np.quantile(drawn, 0.025)),
                    high=float(np.quantile(drawn, 0.975)),
                    own=repeated(x),
                    ceiling=repeated(y),
                )
            )
    return sorted(results, key=lambda order: -order.tau)


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
    lines = ["| proxy | target | compute | tau | own | ceiling |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {order.proxy} | {order.target} | x{order.times:.3g} "
        f"| {order.tau:+.2f} [{order.low:+.2f}, {order.high:+.2f}] "
        f"| {order.own:+.2f} | {order.ceiling:+.2f} |"
        for order in results
    ]
    return "\n".join(lines) + "\n"


def scores_table(
    arms: Sequence[str], scores: Mapping[str, Array], sizes: Mapping[str, Sequence[Size]], real: str
) -> str:
    """Mean and standard deviation over seeds of each arm at the largest size of each task, best on `real` first."""
    tasks = [real, *(task for task in sizes if task != real)]
    scores_of_tasks = [scores[sizes[task][-1].label] for task in tasks]
    lines = [f"| arm | {' | '.join(tasks)} |", "| --- " * (len(tasks) + 1) + "|"]
    for n in np.argsort(-scores_of_tasks[0].mean(1)):
        cells = (f"{task_scores[n].mean():.3f} ± {task_scores[n].std(ddof=1):.3f}" for task_scores in scores_of_tasks)
        lines.append(f"| {arms[n]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", required=True, help="NAME, NAME:PROFILE or the id")
    parser.add_argument("--db", help="a file or URL; ./deltalab.db by default")
    parser.add_argument("--real", default="real_text", help="the task whose order is to be predicted")
    parser.add_argument("--times", type=float, default=16.0)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument(
        "--page", type=Path, help="a page, whose table between <!-- order --> and <!-- end --> is made anew"
    )
    options = parser.parse_args(arguments)
    try:
        with Store.open(options.db, create=False) as store:
            arms, scores, sizes = measured(store, find_study(store, options.study, None).id)
        results = orders(scores, sizes, options.real, options.times)
    except InputError as error:
        parser.error(str(error))
    text = markdown(results) + "\n" + scores_table(arms, scores, sizes, options.real)
    if options.out:
        record: dict[str, Any] = {"study": options.study, "real": options.real, "times": options.times}
        record["orders"] = [asdict(result) for result in results]
        record["scores"] = {
            at: dict(zip(arms, arm_scores.round(4).tolist(), strict=True)) for at, arm_scores in scores.items()
        }
        options.out.write_text(json.dumps(record) + "\n")
    if options.page:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(REGION.sub(lambda region: region[1] + text + region[2], page), encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
