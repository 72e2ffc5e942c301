"""Checks of a task's answers: whether they can be known, whether they must be learned, and how they are scored."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deltalab.authoring.check import Measured
from deltalab.authoring.task_batches import (
    ENOUGH,
    SIZE,
    STEPS,
    batches,
    certain,
    drawn,
    judged,
    last_scored,
    mean,
    near_uniform,
    scored_in,
)
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, SPLITS, Batch, Task

GUESSES, FEW_GUESSES = 16, 6  # guesses at each position; the fewer where a vocabulary is large
MOST_TOKENS = 2048  # of a vocabulary that is not large: its pairs can be counted
NEAR = 4  # the inputs, the current one among them, that a short convolution of a layer reads
JUDGED = ("validation", "test")


# --- how answers are scored ---------------------------------------------------------------------------------


def metrics(task: Task) -> Iterator[Measured]:
    for one, batch in batches(task, "validation"):
        found = one.measure(batch, near_uniform(batch, task.vocab_size, seed=0))
        missing = sorted({task.metric, "loss"} - set(found))
        yield Measured(float(len(missing)), f"number of missing metrics, {missing},")
        for name, pair in found.items():
            right = len(pair) == 2 and all(isinstance(x, Tensor) and x.shape == () and bool(x.isfinite()) for x in pair)
            yield Measured(float(not right), f"mismatch between '{name}' ({pair}) and two finite 0-dim tensors")
        if task.bounds is not None and not missing:
            value, (low, high) = mean([found[task.metric]]), task.bounds
            outside = not low <= value <= high
            what = f"mismatch between `bounds` {task.bounds} and the `metric` of a guess, {value:.3g},"
            yield Measured(float(outside), what, "`bounds` are those of another metric")


def sums(task: Task) -> Iterator[Measured]:
    for one in drawn(task, "test"):
        batch = one.batch("test", SIZE, 0, 0)
        logits = _half_right(batch, task.vocab_size)
        whole = one.measure(batch, logits)
        few = replace(batch, inputs=batch.inputs[: SIZE // 4], targets=batch.targets[: SIZE // 4])
        rest = replace(batch, inputs=batch.inputs[SIZE // 4 :], targets=batch.targets[SIZE // 4 :])
        parts = one.measure(few, logits[: scored_in(few)]), one.measure(rest, logits[scored_in(few) :])
        in_order = list(logits.split((batch.targets != IGNORE).sum(1).tolist()))
        turned = replace(batch, inputs=batch.inputs.flip(0), targets=batch.targets.flip(0))
        other = one.measure(turned, torch.cat(in_order[::-1]))
        for name in whole:
            for i, which in enumerate(("total", "count")):
                added, back = float(sum(part[name][i] for part in parts)), float(other[name][i])
                yield Measured(
                    _relative(added, float(whole[name][i])),
                    f"relative difference of the {which} of '{name}', summed over two parts of a batch, to the whole's",
                )
                yield Measured(
                    _relative(back, float(whole[name][i])),
                    f"relative difference of the {which} of '{name}' with the rows in another order",
                    "`measure` takes logits for those of another row or position",
                )


def perfect(task: Task) -> Iterator[Measured]:
    found = judged(task, "test")
    for name, best in ((task.metric, float(task.maximize)), ("loss", 0.0)):
        values = [one.measure(batch, certain(batch.labels, task.vocab_size))[name] for one, batch in found]
        value = mean(values)
        yield Measured(abs(value - best), f"difference of '{name}' for the right answers, {value:.3g}, from {best:g}")


def loss(task: Task) -> Iterator[Measured]:
    for split in JUDGED:
        for one in drawn(task, split):
            batch = one.batch(split, SIZE, 0, 0)
            for scale in (0.5, 5.0):
                logits = scale * _half_right(batch, task.vocab_size)
                nats = float(functional.cross_entropy(logits.double(), batch.labels))
                found = mean([one.measure(batch, logits)["loss"]])
                yield Measured(
                    _relative(found, nats, 1e-6),
                    f"relative difference of 'loss' in {split}, {found:.4g}, from the cross-entropy of the scored "
                    f"positions in nats, {nats:.4g},",
                    _loss_cause(found, nats, batch, logits),
                )


def _loss_cause(found: float, nats: float, batch: Batch, logits: Tensor) -> str:
    """What a wrong loss is, where it is recognized; else nothing."""
    known = {
        "'loss' is in bits: leave out the division by log 2": nats / math.log(2),
        "'loss' counts positions whose target is IGNORE": nats * scored_in(batch) / batch.targets.numel(),
        "'loss' is a share of wrong answers": float((logits.argmax(-1) != batch.labels).double().mean()),
    }
    return next((cause for cause, value in known.items() if _relative(found, value, 1e-6) < 1e-4), "")


def _half_right(batch: Batch, vocab_size: int) -> Tensor:
    """Random logits, of which about half name the right answer."""
    generator = torch.Generator().manual_seed(0)
    count = scored_in(batch)
    logits = torch.randn(count, vocab_size, generator=generator)
    right = torch.where(torch.rand(count, 1, generator=generator) < 0.5, 6.0, 0.0)
    return logits.scatter_add_(1, batch.labels[:, None], right)


def _relative(found: float, right: float, least: float = 1.0) -> float:
    return abs(found - right) / max(abs(right), least)


# --- answers that need no learning --------------------------------------------------------------------------


def chance(task: Task) -> Iterator[Measured]:
    found = judged(task, "validation")
    anywhere = torch.zeros(task.vocab_size, dtype=torch.bool)
    there = {one: torch.zeros(batch.inputs.shape[1], task.vocab_size, dtype=torch.bool) for one, batch in found}
    always = {one: torch.ones(batch.inputs.shape[1], dtype=torch.bool) for one, batch in found}
    for one, batch in found:
        scored = batch.targets != IGNORE
        anywhere[batch.targets[scored]] = True
        there[one][scored.nonzero()[:, 1], batch.targets[scored]] = True
        always[one] &= scored.all(dim=0)
    for one, at in there.items():
        at[~always[one]] = anywhere
    # Guess among all tokens, among those that are the answer anywhere, and among those that are it at this position.
    among = [
        [torch.ones_like(anywhere)] * len(found),
        [anywhere] * len(found),
        [there[one][(batch.targets != IGNORE).nonzero()[:, 1]] for one, batch in found],
    ]
    guesses = [_guessed(task, found, allowed) for allowed in among]
    if _by_largest(task):  # a model may also have learned which answer is frequent
        guesses += [(value, error) for _, value, error in _fixed(task, "validation")]
    low, high = (edge(value for value, _ in guesses) for edge in (min, max))
    # From few examples, the metric is known no better than to one example.
    error = max(*(error for _, error in guesses), 1 / (SIZE * len(found)))
    outside = max(low - task.chance, task.chance - high, 0.0) / error
    shown = f"`chance` {task.chance:.3g} from the metric of guesses, {low:.3g} to {high:.3g},"
    yield Measured(outside, f"distance, in standard errors, of {shown}")


def _guessed(task: Task, found: list[tuple[Task, Batch]], allowed: list[Tensor]) -> tuple[float, float]:
    """The mean of the task's metric for guesses among the tokens `allowed` in each batch, and its standard error."""
    values = []
    for guess in range(GUESSES if task.vocab_size <= MOST_TOKENS else FEW_GUESSES):
        pairs = []
        for i, (one, batch) in enumerate(found):
            logits = near_uniform(batch, task.vocab_size, seed=guess * len(found) + i)
            pairs.append(one.measure(batch, logits.masked_fill(~allowed[i], -math.inf))[task.metric])
        values.append(mean(pairs))
    return float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5


def _by_largest(task: Task) -> bool:
    """Whether the metric depends on the largest logits alone, like accuracy; a metric in nats or bits does not."""
    one, batch = judged(task, "validation")[0]
    logits = _half_right(batch, task.vocab_size)
    soft, hard = (mean([one.measure(batch, scale * logits)[task.metric]]) for scale in (0.5, 5.0))
    return soft == hard


def fixed_answers(task: Task) -> Iterator[Measured]:
    if not _by_largest(task):
        return
    sign = 1 if task.maximize else -1
    for split in JUDGED:
        for name, value, error in _fixed(task, split):
            beaten = max(0.0, sign * (value - task.chance)) / error
            yield Measured(
                beaten,
                f"distance, in standard errors, of '{task.metric}' in {split} for {name}, {value:.3g}, "
                f"beyond `chance` {task.chance:.3g},",
            )


def _fixed(task: Task, split: str) -> Iterator[tuple[str, float, float]]:
    """The metric, and its standard error, of the most frequent answer, and of the most frequent one at each position.

    They are counted at another seed than they are judged at.
    """
    known: dict[Task, Tensor] = {}
    for one, batch in judged(task, split, seed=1):
        row, place = (batch.targets != IGNORE).nonzero().unbind(1)
        counts = known.setdefault(one, torch.zeros(batch.inputs.shape[1], task.vocab_size))
        counts.index_put_((place, batch.labels), torch.ones(len(row)), accumulate=True)
    everywhere = torch.stack([counts.sum(0) for counts in known.values()]).sum(0)
    found = judged(task, split)
    at_position = {one: torch.where(n.sum(1) > 0, n.argmax(1), everywhere.argmax()) for one, n in known.items()}
    of = {
        f"the answer {int(everywhere.argmax())} everywhere": [
            everywhere.argmax().expand(scored_in(b)) for _, b in found
        ],
        "the most frequent answer at each position": [
            at_position[one][(batch.targets != IGNORE).nonzero()[:, 1]] for one, batch in found
        ],
    }
    for name, answers in of.items():
        pairs = [
            one.measure(batch, certain(answer, task.vocab_size))[task.metric]
            for (one, batch), answer in zip(found, answers, strict=True)
        ]
        values = [mean([pair]) for pair in pairs]
        error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
        yield name, mean(pairs), max(error, 1 / (SIZE * len(found)))


def near_inputs(task: Task) -> Iterator[Measured]:
    for split, one in _each(task):
        if one.readout != "position":
            continue
        asked = _asked(one, split)
        for back in range(NEAR):
            there = asked.place >= back
            named, labels = asked.inputs[asked.row, asked.place - back][there], asked.labels[there]
            same = float((named == labels).sum()) / len(asked.labels)
            where = f"{back} positions before" if back else "at the same position"
            what = f"share of answers of {split} that the input {where} names, beyond what unrelated tokens would,"
            yield Measured(_beyond(same, _by_chance(named, labels)), what)
        if one.vocab_size <= MOST_TOKENS:
            what = f"share of answers of {split} that the input at the same position decides, whatever precedes it,"
            yield Measured(_by_token(one, split, asked), what)


def one_input(task: Task) -> Iterator[Measured]:
    for split, one in _each(task):
        asked = _asked(one, split)
        causal = torch.arange(asked.inputs.shape[1]) <= asked.place[:, None]
        same, other = (
            ((asked.inputs[row] == asked.labels[:, None]) & (causal | (one.readout != "position"))).double().mean(0)
            for row in (asked.row, asked.other_row)
        )
        at = int((same - other).argmax())
        what = f"share of answers of {split} that the input at position {at} names, beyond the share in other examples,"
        yield Measured(_beyond(float(same[at]), float(other[at])), what)


def _by_chance(named: Tensor, labels: Tensor) -> float:
    """The share of labels that the tokens would name if they were independent of them."""
    if not len(labels):
        return 0.0
    most = int(max(named.max(), labels.max())) + 1
    counts = [torch.bincount(tokens, minlength=most).double() / len(tokens) for tokens in (named, labels)]
    return float((counts[0] * counts[1]).sum())


def _beyond(share: float, by_chance: float) -> float:
    """0 for a share that is reached by chance, 1 for a share of 1."""
    return (share - by_chance) / (1 - by_chance) if by_chance < 1 else 0.0


class _Asked(NamedTuple):
    """Inputs [B, T], and row, position and answer of each scored position."""

    inputs: Tensor
    row: Tensor
    place: Tensor
    labels: Tensor

    @property
    def other_row(self) -> Tensor:
        """Another example for each scored position, which holds its answer by chance alone."""
        return (self.row + 1) % len(self.inputs)


def _each(task: Task) -> Iterator[tuple[str, Task]]:
    return ((split, one) for split in JUDGED for one in drawn(task, split))


def _asked(task: Task, split: str) -> _Asked:
    found: list[Batch] = []
    while len(found) < STEPS and sum(map(scored_in, found)) < ENOUGH:
        found.append(task.batch(split, SIZE, 0, len(found)))
    inputs, targets = (torch.cat([getattr(batch, name) for batch in found]) for name in ("inputs", "targets"))
    row, place = (targets != IGNORE).nonzero().unbind(1)
    return _Asked(inputs, row, place, targets[row, place])


def _by_token(task: Task, split: str, asked: _Asked) -> float:
    """The share of answers that a table from the input at the position names, beyond that of the most frequent answer.

    The table is counted at another seed than it is judged at.
    """
    counts = torch.zeros(task.vocab_size**2, dtype=torch.int64)
    for step in range(STEPS):
        batch = task.batch(split, SIZE, 1, step)
        at = batch.inputs[batch.targets != IGNORE] * task.vocab_size + batch.labels
        counts += torch.bincount(at, minlength=len(counts))
    table = counts.view(task.vocab_size, -1)
    known, most = table.argmax(1)[asked.inputs[asked.row, asked.place]], table.sum(0).argmax()
    return _beyond(*(float((named == asked.labels).double().mean()) for named in (known, most)))


# --- answers that nobody can know ---------------------------------------------------------------------------


@dataclass
class _Draws:
    """Takes part in all draws of random numbers: records them, and changes one number in each row of one draw.

    seen: for each address and stream, the random numbers in a row. change: the address and stream to change, at
    number `column + row`.
    """

    seen: dict[tuple[str, str], int] = field(default_factory=dict)
    change: tuple[str, str] | None = None
    column: int = 0

    def __call__(self, given: Random, stream: str, *shape: int) -> Tensor:
        words, width = _WORDS(given, stream, *shape), math.prod(shape[1:])
        drawn = given.address, stream
        self.seen[drawn] = width
        if drawn != self.change or not width:
            return words
        changed, row = words.reshape(shape[0], width).clone(), torch.arange(shape[0])
        other = _WORDS(given, f"{stream}/changed", *shape).reshape(shape[0], width)
        at = (self.column + row) % width
        changed[row, at] = other[row, at]
        return changed.view(shape)

    def batch(self, task: Task, split: str, seed: int) -> Batch:
        with mock.patch.object(Random, "words", lambda *given: self(*given)):
            return task.batch(split, SIZE, seed, STEPS)


_WORDS = Random.words


def knowable(task: Task) -> Iterator[Measured]:
    if not _by_largest(task):  # a metric in nats or bits measures predictions of what is not decided, too
        return
    for split in JUDGED:
        moved = unseen = 0
        for one, batch, other in _with_one_change(task, split):
            both = (batch.targets != IGNORE) & (other.targets != IGNORE)
            turned = both & (batch.targets != other.targets)
            same = (batch.inputs == other.inputs).long().cumprod(1).bool()
            if one.readout != "position":
                same = same[:, -1:].expand_as(same)
            moved += int(turned.sum())
            unseen += int((turned & same).sum())
        if moved:
            what = f"share of changed answers of {split}, each from one changed random number, of which no input up to"
            yield Measured(unseen / moved, f"{what} the position tells")


def _with_one_change(task: Task, split: str) -> Iterator[tuple[Task, Batch, Batch]]:
    """Batches beside the same ones with one random number changed in each row: the task, batch, changed batch."""
    one = min(task.evaluations().values(), key=lambda other: other.length)
    training = []
    for seed in (0, 1):
        draws = _Draws()
        draws.batch(task, "train", seed)
        training.append(set(draws.seen))
    facts = training[0] & training[1]  # the same for all seeds, so that weights can know them
    draws = _Draws()
    batch = draws.batch(one, split, 0)
    for drawn_at, width in draws.seen.items():
        if drawn_at not in facts:
            for turn in range(min(4, 2 * math.ceil(width / SIZE))):
                yield one, batch, _Draws(change=drawn_at, column=turn * SIZE).batch(one, split, 0)


# --- splits that are not alike ------------------------------------------------------------------------------


def alike(task: Task) -> Iterator[Measured]:
    for label, one in task.evaluations().items():
        train, validation, test = ([one.batch(split, SIZE, 0, step) for step in range(STEPS)] for split in SPLITS)
        at = f" at '{label}'" if label else ""
        of_train, of_validation, of_test = map(_features, (train, validation, test))
        for name, value in of_test.items():
            other = of_validation[name]
            if value and other:
                yield Measured(
                    1 - min(value / other, other / value),
                    f"difference of test to validation{at} in {name}, {value:.3g} to {other:.3g},",
                    "`draw` makes the test split easier or harder than validation",
                )
        asked = math.isclose(of_train[SCORED], of_test[SCORED], rel_tol=0.05)
        for name in (*OF_INPUTS, *(OF_ANSWERS if asked else ())):
            for split, value in (("validation", of_validation[name]), ("test", of_test[name])):
                if of_train[name] and value:
                    yield Measured(
                        1 - value / of_train[name],
                        f"shortfall of {split}{at} to training in {name}, {value:.3g} to {of_train[name]:.3g},",
                        f"`draw` makes {split} easier than training: give easier settings in `evaluations`",
                    )


SCORED = "scored positions of an example"
LAST, DISTINCT, FILLED = "the last scored position", "different inputs of an example", "inputs beside the most frequent"
TOKENS, ANSWERS, DISTANCE = "different inputs (perplexity)", "different answers (perplexity)", "distance to the answer"
OF_INPUTS, OF_ANSWERS = (LAST, DISTINCT, FILLED, TOKENS), (ANSWERS, DISTANCE)


def _features(found: list[Batch]) -> dict[str, float]:
    """Means over examples that say how hard they are; nan where one is not defined."""
    inputs, targets = (torch.cat([getattr(batch, name) for batch in found]) for name in ("inputs", "targets"))
    scored = targets != IGNORE
    place = torch.arange(inputs.shape[1])
    last = last_scored(Batch(inputs, targets))
    known = place <= last[:, None]
    ordered = torch.where(known, inputs, -1).sort(1).values
    opens = torch.ones_like(known)
    opens[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    distinct = (opens & (ordered >= 0)).sum(1)
    begun = torch.where(opens, place, 0).cummax(1).values
    often = torch.where(ordered >= 0, place - begun + 1, 0).amax(1)
    return {
        SCORED: float(scored.sum(1).double().mean()),
        LAST: float((last + 1).double().mean()),
        DISTINCT: float(distinct.double().mean()),
        FILLED: float((last + 1 - often).double().mean()),
        TOKENS: _perplexity(inputs[known]),
        ANSWERS: _perplexity(targets[scored]),
        DISTANCE: _distance(inputs, targets),
    }


def _perplexity(tokens: Tensor) -> float:
    """e to the entropy of the tokens' frequencies: their number, where all are equally frequent."""
    share = torch.bincount(tokens).double() / max(1, len(tokens))
    return float(torch.exp(-torch.xlogy(share, share).sum()))


def _distance(inputs: Tensor, targets: Tensor) -> float:
    """The mean distance from a scored position to the last earlier input that equals its answer; 0 if there is none."""
    row, at = (targets != IGNORE).nonzero().unbind(1)
    some = torch.arange(0, len(row), max(1, len(row) // 4096))
    row, at = row[some], at[some]
    place = torch.arange(inputs.shape[1])
    same = (inputs[row] == targets[row, at][:, None]) & (place < at[:, None])
    latest = torch.where(same, place, -1).amax(1)
    found = (at - latest)[latest >= 0]
    return float(found.double().mean()) if len(found) > len(row) / 4 else 0.0
