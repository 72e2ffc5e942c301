"""Which proxy task at which size orders rules as real text at 16 times its compute does.

    platform study run transfer --profile gpu                        # first: the ladder of all tasks
    python benchmarks/order.py --study transfer:gpu --out order.json # Kendall's tau of each task and size
    python benchmarks/order.py --study transfer:gpu --page docs/transfer.md

Reads the ledger of a study with `scales`. Each task but `--real` at each size is a proxy. Its target is the size of
`--real` whose compute is nearest to `--times` that of the proxy, as the base's training counts it.

tau is Kendall's tau-b of the arms' mean scores, the base among them. Its interval is a 95% bootstrap: the seeds of the
proxy and those of the target are drawn with replacement, apart from each other. `ceiling` is the median tau of two
such draws of the target itself: with so few seeds, no proxy can be expected to do better.
"""

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltalab.cli_options import find_study
from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.study.ladder import Size
from deltalab.study.measured import results
from deltalab.study.report import report

Array = NDArray[np.float64]
RESAMPLES = 1000
REGION = re.compile(r"(<!-- order -->\n).*?(<!-- end -->)", flags=re.DOTALL)


@dataclass(frozen=True)
class Order:
    """How a proxy orders the arms, against its target. times: the target's compute over the proxy's."""

    proxy: str
    target: str
    times: float
    arms: int
    seeds: int
    tau: float
    low: float
    high: float
    ceiling: float


def tau(x: Array, y: Array) -> Array:
    """Kendall's tau-b of each pair of rows [.., n] and [.., n]; 0 where all of a row are equal.

    >>> tau(np.array([1.0, 2.0, 3.0]), np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])).tolist()
    [1.0, -1.0, 0.0]
    """
    above = np.triu_indices(x.shape[-1], 1)
    of_x, of_y = (np.sign(one[..., above[0]] - one[..., above[1]]) for one in (x, y))
    size = np.sqrt((of_x != 0).sum(-1) * (of_y != 0).sum(-1))
    found: Array = np.divide((of_x * of_y).sum(-1), size, out=np.zeros(np.shape(size)), where=size > 0)
    return found


def draws(scores: Array, random: np.random.Generator) -> Array:
    """Means of arms over seeds drawn with replacement [RESAMPLES, arms], for scores [arms, seeds]."""
    drawn = random.integers(scores.shape[1], size=(RESAMPLES, scores.shape[1]))
    means: Array = scores[:, drawn].mean(-1).T
    return means


def orders(scores: Mapping[str, Array], sizes: Mapping[str, Sequence[Size]], real: str, times: float) -> list[Order]:
    """The order of every proxy.

    scores: of a task at a size, by label: [arms, seeds], higher is better, the arms in one order. sizes: by task.
    Raises `InputError` where `real` is none of the tasks.
    """
    if real not in sizes:
        raise InputError(f"--real {real}: the study has a whole ladder of {', '.join(sizes) or 'no task'}")
    found = []
    for task, ladder in sizes.items():
        for size in ladder if task != real else ():
            wanted = math.log(times * size.compute)
            target = min(sizes[real], key=lambda other: abs(math.log(other.compute) - wanted))
            random = np.random.default_rng(0)
            x, y = scores[size.label], scores[target.label]
            drawn = tau(draws(x, random), draws(y, random))
            found.append(
                Order(
                    proxy=size.label,
                    target=target.label,
                    times=target.compute / size.compute,
                    arms=len(x),
                    seeds=x.shape[1],
                    tau=float(tau(x.mean(1), y.mean(1))),
                    low=float(np.quantile(drawn, 0.025)),
                    high=float(np.quantile(drawn, 0.975)),
                    ceiling=float(np.median(tau(draws(y, random), draws(y, random)))),
                )
            )
    return sorted(found, key=lambda order: -order.tau)


def measured(store: Store, study_id: int) -> tuple[dict[str, Array], dict[str, list[Size]]]:
    """Scores and sizes of a study's ladders, of the arms and seeds that all of them have."""
    ladders, found = report(store, study_id).ladders, results(store, study_id)
    labels = [size.label for ladder in ladders for size in ladder.sizes]
    arms = [row.arm for row in ladders[0].arms if all(row.arm in [r.arm for r in one.arms] for one in ladders)]
    seeds = [
        s for s in found[labels[0]].results[arms[0]] if all(s in found[at].results[a] for at in labels for a in arms)
    ]
    scores = {
        label: np.array([[found[label].results[arm][seed] for seed in seeds] for arm in arms])
        * (1 if found[label].maximize else -1)
        for label in labels
    }
    return scores, {ladder.task: ladder.sizes for ladder in ladders}


def markdown(found: Sequence[Order]) -> str:
    lines = ["| proxy | target | compute | tau | ceiling |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {one.proxy} | {one.target} | x{one.times:.3g} | {one.tau:+.2f} [{one.low:+.2f}, {one.high:+.2f}] "
        f"| {one.ceiling:+.2f} |"
        for one in found
    ]
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
    given = parser.parse_args(arguments)
    try:
        with Store.open(given.db, create=False) as store:
            scores, sizes = measured(store, find_study(store, given.study, None).id)
        found = orders(scores, sizes, given.real, given.times)
    except InputError as error:
        parser.error(str(error))
    text = markdown(found)
    if given.out:
        about: dict[str, Any] = {"study": given.study, "real": given.real, "times": given.times}
        given.out.write_text(json.dumps({**about, "orders": [asdict(one) for one in found]}, indent=1) + "\n")
    if given.page:
        page = given.page.read_text(encoding="utf-8")
        given.page.write_text(REGION.sub(lambda region: region[1] + text + region[2], page), encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
