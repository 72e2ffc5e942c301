"""Compares evaluated models with the first of them, item by item."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from deltalab.evaluation.items import Items
from deltalab.evaluation.results import Result, Setting
from deltalab.statistics.paired_items import LEAST, ItemPairs, compare_items, too_skewed

NO_ITEMS = "no mean over items, nor a function of sums over them"


@dataclass(frozen=True)
class Comparison(Setting):
    """The difference of a model to the first one, over the items that both have.

    Attributes:
        model: The model, as the user named it.
        task: The name of the task.
        metric: The name of the metric.
        is_log: Whether the logarithms of the metric are compared, as of perplexity.
        difference: The model's value less the first model's.
        low: The lower end of the interval.
        high: The upper end of the interval.
        p: The p-value of "no difference" in the whole family.
        items: The number of items.
        family: The number of differences whose intervals hold together.
        reference_other_data: The packed data of the first model's value, as its setting has them.
    """

    model: str
    task: str
    metric: str
    is_log: bool
    difference: float
    low: float
    high: float
    p: float
    items: int
    family: int
    reference_other_data: str | None = None

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Compared:
    """What a comparison found.

    Attributes:
        comparisons: The differences.
        left_out: By task, model and reason the metrics that are not compared.
        partly: Lines on metrics of which the models share some items alone.
        too_skewed: Lines on metrics whose interval may be too short.
    """

    comparisons: list[Comparison]
    left_out: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    partly: list[str] = field(default_factory=list)
    too_skewed: list[str] = field(default_factory=list)


def compare(results: Mapping[str, Sequence[Result]]) -> Compared:
    """Compares models on every metric that has items, with intervals that hold together over tasks and models.

    Args:
        results: The results of each model, that of the first one first.
    """
    (_, first), *others = results.items()
    of_first = {(result.task, result.metric): result for result in first}
    found = Compared([])
    paired: list[tuple[str, Result, Result, ItemPairs]] = []
    for model, measured in others:
        for result in measured:
            reference = of_first.get((result.task, result.metric))
            pair = reason = None
            if reference is None:
                reason = "the first model has no such result"
            elif reference.items is None or result.items is None:
                reason = NO_ITEMS
            else:
                pair = _paired(reference.items, result.items)
                different = len(set(pair.ids))
                if not different:
                    reason = "the models share no item: their texts, tokens or limits differ"
                elif different < LEAST:
                    reason = f"an interval takes {LEAST} common items, and there are {different}"
                elif not all(math.isfinite(value) for side in (pair.first, pair.other) for value in side.sum(0)):
                    reason = "a score is not finite"
            if reason is not None or pair is None or reference is None or reference.items is None:
                found.left_out.setdefault((result.task, model, reason or ""), []).append(result.metric)
                continue
            paired.append((model, reference, result, pair))
            if too_skewed(pair):
                found.too_skewed.append(
                    f"{result.task} {result.metric}: {model}: {different} items, skewed: the interval may be too short"
                )
            most = max(len(reference.items.ids), len(pair.ids), result.examples or 0)
            if len(pair.ids) < most:
                found.partly.append(
                    f"{result.task} {result.metric}: {model} and the first model have {len(pair.ids)} items in common "
                    f"of {most}, and their difference is that of these"
                )
    for (model, reference, result, _), one in zip(paired, compare_items([pair for *_, pair in paired]), strict=True):
        is_log = result.items is not None and result.items.is_log
        found.comparisons.append(
            Comparison(
                model=model,
                task=result.task,
                metric=result.metric,
                is_log=is_log,
                difference=one.mean,
                low=one.low,
                high=one.high,
                p=one.p,
                items=one.n,
                family=len(paired),
                reference_other_data=reference.other_data,
                **{part.name: getattr(result, part.name) for part in fields(Setting)},
            )
        )
    return found


def _paired(first: Items, other: Items) -> ItemPairs:
    """The items that both have. Of equal items, the nth of the one meets the nth of the other."""
    of_first, of_other = ({key: row for row, key in enumerate(_numbered(items.ids))} for items in (first, other))
    common = [key for key in of_first if key in of_other]
    return ItemPairs(
        [item for item, _ in common],
        first.array[[of_first[key] for key in common]],
        other.array[[of_other[key] for key in common]],
    )


def _numbered(ids: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yields each id with how often it stood before."""
    seen = Counter[str]()
    for item in ids:
        yield item, seen[item]
        seen[item] += 1
