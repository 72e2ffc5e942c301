"""Holds the scores of single items, and keeps them in files, by which a later evaluation takes them up."""

import gzip
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltalab.errors import InputError
from deltalab.evaluation.results import Result

FOLDER = "items"


@dataclass(frozen=True)
class Items:
    """The scores of a metric by item. The metric is the ratio of the sums of totals and weights, or its exponential.

    Attributes:
        ids: The hash of each item. Equal items have equal ids.
        totals: What each item adds.
        weights: What each item counts; 1 in a mean. All are positive.
        is_log: Whether the metric is the exponential of the ratio, as perplexity is.
    """

    ids: list[str]
    totals: list[float]
    weights: list[float]
    is_log: bool = False

    @classmethod
    def mean(cls, ids: list[str], scores: list[float]) -> "Items":
        """Makes the items of a metric that is the mean of their scores."""
        return cls(ids, scores, [1.0] * len(scores))

    @property
    def ratio(self) -> float:
        """The sum of the totals, divided by that of the weights."""
        return math.fsum(self.totals) / math.fsum(self.weights)

    @property
    def value(self) -> float:
        """The metric."""
        ratio = self.ratio
        if self.is_log:
            return math.exp(ratio) if ratio < 700 else math.inf
        return ratio

    @property
    def stderr(self) -> float | None:
        """The standard error of the ratio over the choice of items; None for a single item, and if it is not finite."""
        n = len(self.ids)
        if n < 2:
            return None
        moves = np.asarray(self.totals) - self.ratio * np.asarray(self.weights)
        error = float(math.sqrt(n / (n - 1) * (moves**2).sum()) / math.fsum(self.weights))
        return error if math.isfinite(error) else None

    @property
    def array(self) -> NDArray[np.float64]:
        """The totals and the weights, [n, 2]."""
        return np.stack([self.totals, self.weights], 1).astype(np.float64)


def of_items(step: int | None, task: str, metric: str, items: Items) -> Result:
    """Makes the result that items sum up to, with its standard error."""
    return Result(step, task, metric, items.ratio, len(items.ids), items.stderr, items)


def item_id(*parts: bytes | str) -> str:
    """Returns the id of an item that consists of parts."""
    digest = hashlib.sha256()
    for part in parts:
        whole = part.encode() if isinstance(part, str) else part
        digest.update(len(whole).to_bytes(8, "big") + whole)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class ItemFiles:
    """The files of the items of one model, each with the results of one task.

    A file's name has the hash of all that its results depend on, so that whoever finds the file need not measure.

    Attributes:
        folder: The folder of the files.
        model: What tells the model from others.
        step: The step of the model's checkpoint, which results name.
    """

    folder: Path
    model: Mapping[str, Any]
    step: int | None

    def find(self, task: str, about: Mapping[str, Any]) -> list[Result] | None:
        """Returns the results of a task with their items; None if no file has them.

        Raises:
            InputError: If the file is no file of items.
        """
        file = self.file(task, about)
        try:
            kept = json.loads(gzip.decompress(file.read_bytes()))
            return [_result(row, kept["ids"], self.step) for row in kept["results"]]
        except FileNotFoundError:
            return None
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: is no file of items ({type(error).__name__}); delete it") from None

    def keep(self, task: str, about: Mapping[str, Any], results: Sequence[Result]) -> None:
        """Writes the results of a task with their items, whole or not at all."""
        ids: list[list[str]] = []
        rows = []
        for result in results:
            row: dict[str, Any] = result.row()
            if (items := result.items) is not None:
                if items.ids not in ids:
                    ids.append(items.ids)
                row["items"] = {
                    "ids": ids.index(items.ids),
                    "totals": items.totals,
                    "weights": None if set(items.weights) == {1.0} else items.weights,
                    "is_log": items.is_log,
                }
            rows.append(row)
        content = {"about": {**self.model, **about}, "ids": ids, "results": rows}
        file = self.file(task, about)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
        partial.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
        partial.replace(file)

    def file(self, task: str, about: Mapping[str, Any]) -> Path:
        """Returns the file of a task's results, which may not exist."""
        known = json.dumps({"task": task, **self.model, **about}, sort_keys=True)
        name = re.sub(r"[^\w.-]+", "_", Path(task).stem if task.endswith((".yaml", ".yml")) else task)
        return self.folder / f"{name}-{item_id(known)}.json.gz"


def _result(row: Mapping[str, Any], ids: list[list[str]], step: int | None) -> Result:
    """The result of a row in a file of items."""
    given = dict(row)
    kept = given.pop("items", None)
    result = replace(Result(**given), step=step)
    if kept is None:
        return result
    its = ids[kept["ids"]]
    weights = [1.0] * len(its) if kept["weights"] is None else kept["weights"]
    return replace(result, items=Items(its, kept["totals"], weights, kept["is_log"]))
