"""Checks of a task's answers: whether they can be known, whether guesses find them, and how they are scored."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deltalab.authoring.check import Measurement
from deltalab.authoring.task_checks.task_batches import (
    JUDGED,
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

GUESSES, FEW_GUESSES = 16, 6
"""The numbers of guesses at each position: the first for a small vocabulary, the second for a large one."""
MOST_TOKENS = 2048
"""The size of the largest vocabulary that counts as small: its pairs of tokens can be counted."""


# --- how answers are scored ---------------------------------------------------------------------------------


def metrics(task: Task) -> Iterator[Measurement]:
    """Checks the form of what `measure` returns, and `bounds`."""
    for member, batch in batches(task, "validation"):
        measures = member.measure(batch, near_uniform(batch, task.vocab_size, seed=0))
        missing = sorted({task.metric, "loss"} - set(measures))
        yield Measurement(float(len(missing)), f"number of missing metrics, {missing},")
        for name, pair in measures.items():
            is_right = len(pair) == 2 and all(
                isinstance(x, Tensor) and x.shape == () and bool(x.isfinite()) for x in pair
            )
            yield Measurement(float(not is_right), f"mismatch between '{name}' ({pair}) and two finite 0-dim tensors")
        if task.bounds is not None and not missing:
            value, (low, high) = mean([measures[task.metric]]), task.bounds
            outside = not low <= value <= high
            what = f"mismatch between `bounds` {task.bounds} and the `metric` of a guess, {value:.3g},"
            yield Measurement(float(outside), what, "`bounds` are those of another metric")


def sums(task: Task) -> Iterator[Measurement]:
    """Measures whether totals and counts of two parts of a batch add up to the whole, and whether row order matters."""
    for member in drawn(task, "test"):
        batch = member.batch("test", SIZE, 0, 0)
        logits = _half_right(batch, task.vocab_size)
        whole = member.measure(batch, logits)
        few = replace(batch, inputs=batch.inputs[: SIZE // 4], targets=batch.targets[: SIZE // 4])
        rest = replace(batch, inputs=batch.inputs[SIZE // 4 :], targets=batch.targets[SIZE // 4 :])
        parts = member.measure(few, logits[: scored_in(few)]), member.measure(rest, logits[scored_in(few) :])
        in_order = list(logits.split((batch.targets != IGNORE).sum(1).tolist()))
        reversed_ = replace(batch, inputs=batch.inputs.flip(0), targets=batch.targets.flip(0))
        of_reversed = member.measure(reversed_, torch.cat(in_order[::-1]))
        for name in whole:
            for i, kind in enumerate(("total", "count")):
                added, in_reverse = float(sum(part[name][i] for part in parts)), float(of_reversed[name][i])
                yield Measurement(
                    _relative_error(added, float(whole[name][i])),
                    f"relative difference of the {kind} of '{name}', summed over two parts of a batch, to the whole's",
                )
                yield Measurement(
                    _relative_error(in_reverse, float(whole[name][i])),
                    f"relative difference of the {kind} of '{name}' with the rows in another order",
                    "`measure` takes logits for those of another row or position",
                )


def perfect(task: Task) -> Iterator[Measurement]:
    """Measures how far the metric and the loss are from their best values if all answers are right."""
    pairs = judged(task, "test")
    for name, best in ((task.metric, float(task.maximize)), ("loss", 0.0)):
        values = [member.measure(batch, certain(batch.labels, task.vocab_size))[name] for member, batch in pairs]
        value = mean(values)
        yield Measurement(
            abs(value - best), f"difference of '{name}' for the right answers, {value:.3g}, from {best:g}"
        )


def loss(task: Task) -> Iterator[Measurement]:
    """Measures the difference of the task's loss from the cross-entropy."""
    for split in JUDGED:
        for member in drawn(task, split):
            batch = member.batch(split, SIZE, 0, 0)
            for scale in (0.5, 5.0):
                logits = scale * _half_right(batch, task.vocab_size)
                nats = float(functional.cross_entropy(logits.double(), batch.labels))
                measured = mean([member.measure(batch, logits)["loss"]])
                yield Measurement(
                    _relative_error(measured, nats, 1e-6),
                    f"relative difference of 'loss' in {split}, {measured:.4g}, from the cross-entropy of the scored "
                    f"positions in nats, {nats:.4g},",
                    _loss_cause(measured, nats, batch, logits),
                )


def _loss_cause(measured: float, nats: float, batch: Batch, logits: Tensor) -> str:
    """Returns the cause of a wrong loss if it has the value of a known mistake, else an empty string."""
    known = {
        "'loss' is in bits: leave out the division by log 2": nats / math.log(2),
        "'loss' counts positions whose target is IGNORE": nats * scored_in(batch) / batch.targets.numel(),
        "'loss' is a share of wrong answers": float((logits.argmax(-1) != batch.labels).double().mean()),
    }
    return next((cause for cause, value in known.items() if _relative_error(measured, value, 1e-6) < 1e-4), "")


def _half_right(batch: Batch, vocab_size: int) -> Tensor:
    """Returns random logits, about half of which name the right answer."""
    generator = torch.Generator().manual_seed(0)
    count = scored_in(batch)
    logits = torch.randn(count, vocab_size, generator=generator)
    right = torch.where(torch.rand(count, 1, generator=generator) < 0.5, 6.0, 0.0)
    return logits.scatter_add_(1, batch.labels[:, None], right)


def _relative_error(measured: float, right: float, least: float = 1.0) -> float:
    """Returns the relative difference of two numbers."""
    return abs(measured - right) / max(abs(right), least)


# --- answers that guesses find --------------------------------------------------------------------------


def chance(task: Task) -> Iterator[Measurement]:
    """Measures how far `chance` is from the metric of guesses, in standard errors.

    The guesses are drawn from three sets: all tokens, the tokens that are an answer anywhere, and the tokens that are
    an answer at the same position.
    """
    pairs = judged(task, "validation")
    anywhere = torch.zeros(task.vocab_size, dtype=torch.bool)
    answers_at = {
        member: torch.zeros(batch.inputs.shape[1], task.vocab_size, dtype=torch.bool) for member, batch in pairs
    }
    always_scored = {member: torch.ones(batch.inputs.shape[1], dtype=torch.bool) for member, batch in pairs}
    for member, batch in pairs:
        scored = batch.targets != IGNORE
        anywhere[batch.targets[scored]] = True
        answers_at[member][scored.nonzero()[:, 1], batch.targets[scored]] = True
        always_scored[member] &= scored.all(dim=0)
    for member, answers in answers_at.items():
        answers[~always_scored[member]] = anywhere
    allowed_tokens = [
        [torch.ones_like(anywhere)] * len(pairs),
        [anywhere] * len(pairs),
        [answers_at[member][(batch.targets != IGNORE).nonzero()[:, 1]] for member, batch in pairs],
    ]
    guesses = [_guessed(task, pairs, allowed) for allowed in allowed_tokens]
    if _by_largest(task):  # a model may also have learned which answer is frequent
        guesses += [(value, standard_error) for _, value, standard_error in _fixed(task, "validation")]
    low, high = (edge(value for value, _ in guesses) for edge in (min, max))
    # With few examples, the metric is known to one example at best.
    standard_error = max(*(standard_error for _, standard_error in guesses), 1 / (SIZE * len(pairs)))
    outside = max(low - task.chance, task.chance - high, 0.0) / standard_error
    shown = f"`chance` {task.chance:.3g} from the metric of guesses, {low:.3g} to {high:.3g},"
    yield Measurement(outside, f"distance, in standard errors, of {shown}", _too_few(pairs, "validation"))


def _too_few(pairs: list[tuple[Task, Batch]], split: str) -> str:
    """Returns the cause if the batches repeat a few examples, whose answers are not those of the task, else ""."""
    longest = max(batch.inputs.shape[1] for _, batch in pairs)
    rows = torch.cat([functional.pad(batch.inputs, (0, longest - batch.inputs.shape[1])) for _, batch in pairs])
    different = len(rows.unique(dim=0))
    few = f"{split} has only {different} different examples among {len(rows)}: draw more, and leave `chance` as it is"
    return few if different < len(rows) / 2 else ""


def _guessed(task: Task, pairs: list[tuple[Task, Batch]], allowed: list[Tensor]) -> tuple[float, float]:
    """Returns the mean metric of guesses among the tokens `allowed` in each batch, and its standard error."""
    values = []
    for guess in range(GUESSES if task.vocab_size <= MOST_TOKENS else FEW_GUESSES):
        totals = []
        for i, (member, batch) in enumerate(pairs):
            logits = near_uniform(batch, task.vocab_size, seed=guess * len(pairs) + i)
            totals.append(member.measure(batch, logits.masked_fill(~allowed[i], -math.inf))[task.metric])
        values.append(mean(totals))
    return float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5


def _by_largest(task: Task) -> bool:
    """Returns whether the metric depends on the largest logits alone. Accuracy does, and a metric in nats does not."""
    member, batch = judged(task, "validation")[0]
    logits = _half_right(batch, task.vocab_size)
    soft, hard = (mean([member.measure(batch, scale * logits)[task.metric]]) for scale in (0.5, 5.0))
    return soft == hard


def fixed_answers(task: Task) -> Iterator[Measurement]:
    """Measures by how many standard errors the metric of fixed answers is better than `chance`."""
    if not _by_largest(task):
        return
    sign = 1 if task.maximize else -1
    for split in JUDGED:
        cause = _too_few(judged(task, split), split)
        for name, value, standard_error in _fixed(task, split):
            excess = max(0.0, sign * (value - task.chance)) / standard_error
            yield Measurement(
                excess,
                f"distance, in standard errors, of '{task.metric}' in {split} for {name}, {value:.3g}, "
                f"beyond `chance` {task.chance:.3g},",
                cause,
            )


def _fixed(task: Task, split: str) -> Iterator[tuple[str, float, float]]:
    """Yields (name, metric, standard error) for two kinds of fixed answers.

    They are the most frequent answer of all, and the most frequent answer at each position. The answers are counted on
    batches of one seed and judged on batches of another seed.
    """
    counts_of: dict[Task, Tensor] = {}
    for member, batch in judged(task, split, seed=1):
        row, place = (batch.targets != IGNORE).nonzero().unbind(1)
        counts = counts_of.setdefault(member, torch.zeros(batch.inputs.shape[1], task.vocab_size))
        counts.index_put_((place, batch.labels), torch.ones(len(row)), accumulate=True)
    everywhere = torch.stack([counts.sum(0) for counts in counts_of.values()]).sum(0)
    pairs = judged(task, split)
    at_position = {
        member: torch.where(member_counts.sum(1) > 0, member_counts.argmax(1), everywhere.argmax())
        for member, member_counts in counts_of.items()
    }
    answers_of = {
        f"the answer {int(everywhere.argmax())} everywhere": [
            everywhere.argmax().expand(scored_in(batch_)) for _, batch_ in pairs
        ],
        "the most frequent answer at each position": [
            at_position[member][(batch.targets != IGNORE).nonzero()[:, 1]] for member, batch in pairs
        ],
    }
    for name, answers in answers_of.items():
        totals = [
            member.measure(batch, certain(answer, task.vocab_size))[task.metric]
            for (member, batch), answer in zip(pairs, answers, strict=True)
        ]
        values = [mean([pair]) for pair in totals]
        standard_error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
        yield name, mean(totals), max(standard_error, 1 / (SIZE * len(pairs)))


# --- answers that nobody can know ---------------------------------------------------------------------------


@dataclass
class _Draws:
    """Records all draws of random numbers, and changes one number in each row of one draw.

    A change is another random number, or the next whole number, which `integers` makes of a word that is larger by 2.
    The next number shows what a draw hides in its lowest digits.

    Attributes:
        seen: The number of random numbers in a row, for each address and stream.
        change: The address and stream to change; None to change nothing.
        column: The random number to change in row 0. In row i, the number `column + i` is changed.
        nudges: Whether to take the next whole number.
    """

    seen: dict[tuple[str, str], int] = field(default_factory=dict)
    change: tuple[str, str] | None = None
    column: int = 0
    nudges: bool = False

    def __call__(self, random: Random, stream: str, *shape: int) -> Tensor:
        words, width = _WORDS(random, stream, *shape), math.prod(shape[1:])
        key = random.address, stream
        self.seen[key] = width
        if key != self.change or not width:
            return words
        changed_words, row = words.reshape(shape[0], width).clone(), torch.arange(shape[0])
        other_words = _WORDS(random, f"{stream}/changed", *shape).reshape(shape[0], width)
        if self.nudges:
            other_words = changed_words + 2
        columns = (self.column + row) % width
        changed_words[row, columns] = other_words[row, columns]
        return changed_words.view(shape)

    def batch(self, task: Task, split: str, seed: int) -> Batch:
        """Draws a batch of a task. Every draw of random numbers for it goes through this object."""
        with mock.patch.object(Random, "words", lambda *arguments: self(*arguments)):
            return task.batch(split, SIZE, seed, STEPS)


_WORDS = Random.words


def knowable(task: Task) -> Iterator[Measurement]:
    """Measures the share of answers that change with a random number although no input up to their position changes."""
    # A metric in nats or bits also measures predictions of answers that no input decides: do not check those tasks.
    if not _by_largest(task):
        return
    for split in JUDGED:
        answers = unseen = 0
        for member, batch, other in _with_one_change(task, split):
            scored = (batch.targets != IGNORE) & (other.targets != IGNORE)
            changed = scored & (batch.targets != other.targets)
            equal_so_far = (batch.inputs == other.inputs).long().cumprod(1).bool()
            if member.readout != "position":
                equal_so_far = equal_so_far[:, -1:].expand_as(equal_so_far)
            answers += int(changed.sum())
            unseen += int((changed & equal_so_far).sum())
        if answers:
            what = f"share of changed answers of {split}, each from one changed random number, of which no input up to"
            yield Measurement(unseen / answers, f"{what} the position tells")


def _with_one_change(task: Task, split: str) -> Iterator[tuple[Task, Batch, Batch]]:
    """Yields a task, a batch, and the same batch with one random number changed in each row."""
    shortest = min(task.evaluations().values(), key=lambda other: other.length)
    training = []
    for seed in (0, 1):
        draws = _Draws()
        draws.batch(task, "train", seed)
        training.append(set(draws.seen))
    facts = training[0] & training[1]  # a model can learn draws that are the same for all seeds
    draws = _Draws()
    batch = draws.batch(shortest, split, 0)
    for key, width in draws.seen.items():
        if key not in facts:
            for turn in range(min(4, 2 * math.ceil(width / SIZE))):
                for nudges in (False, True):
                    changed = _Draws(change=key, column=turn * SIZE, nudges=nudges).batch(shortest, split, 0)
                    yield shortest, batch, changed


# --- splits that are not alike ------------------------------------------------------------------------------


def alike(task: Task) -> Iterator[Measurement]:
    """Measures how much easier an evaluation is than training, and how different test and validation are."""
    for label, member in task.evaluations().items():
        train, validation, test = ([member.batch(split, SIZE, 0, step) for step in range(STEPS)] for split in SPLITS)
        place = f" at '{label}'" if label else ""
        of_train, of_validation, of_test = map(_features, (train, validation, test))
        for name, value in of_test.items():
            reference = of_validation[name]
            if value and reference:
                yield Measurement(
                    1 - min(value / reference, reference / value),
                    f"difference of test to validation{place} in {name}, {value:.3g} to {reference:.3g},",
                    "`draw` makes the test split easier or harder than validation",
                )
        same_number = math.isclose(of_train[SCORED], of_test[SCORED], rel_tol=0.05)
        for name in (*OF_INPUTS, *(OF_ANSWERS if same_number else ())):
            for split, value in (("validation", of_validation[name]), ("test", of_test[name])):
                if of_train[name] and value:
                    yield Measurement(
                        1 - value / of_train[name],
                        f"shortfall of {split}{place} to training in {name}, {value:.3g} to {of_train[name]:.3g},",
                        f"`draw` makes {split} easier than training: give easier settings in `evaluations`",
                    )


SCORED = "scored positions of an example"
LAST, DISTINCT, FILLED = "the last scored position", "different inputs of an example", "inputs beside the most frequent"
TOKENS, ANSWERS, DISTANCE = "different inputs (perplexity)", "different answers (perplexity)", "distance to the answer"
OF_INPUTS, OF_ANSWERS = (LAST, DISTINCT, FILLED, TOKENS), (ANSWERS, DISTANCE)


def _features(batches: list[Batch]) -> dict[str, float]:
    """Returns features that say how hard the examples of some batches are; NaN for a feature that is not defined."""
    inputs, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets"))
    scored = targets != IGNORE
    place = torch.arange(inputs.shape[1])
    last = last_scored(Batch(inputs, targets))
    asked = place <= last[:, None]
    ordered = torch.where(asked, inputs, -1).sort(1).values
    opens = torch.ones_like(asked)
    opens[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    distinct = (opens & (ordered >= 0)).sum(1)
    run_start = torch.where(opens, place, 0).cummax(1).values
    longest_run = torch.where(ordered >= 0, place - run_start + 1, 0).amax(1)
    return {
        SCORED: float(scored.sum(1).double().mean()),
        LAST: float((last + 1).double().mean()),
        DISTINCT: float(distinct.double().mean()),
        FILLED: float((last + 1 - longest_run).double().mean()),
        TOKENS: _perplexity(inputs[asked]),
        ANSWERS: _perplexity(targets[scored]),
        DISTANCE: _distance(inputs, targets),
    }


def _perplexity(tokens: Tensor) -> float:
    """Returns e to the entropy of the tokens' frequencies.

    If n different tokens occur and are equally frequent, this is n.
    """
    share = torch.bincount(tokens).double() / max(1, len(tokens))
    return float(torch.exp(-torch.xlogy(share, share).sum()))


def _distance(inputs: Tensor, targets: Tensor) -> float:
    """Returns the mean distance from a scored position to the last earlier input that equals its answer.

    Returns 0 if at most a quarter of the positions have such an input.
    """
    row, position = (targets != IGNORE).nonzero().unbind(1)
    sample = torch.arange(0, len(row), max(1, len(row) // 4096))
    row, position = row[sample], position[sample]
    place = torch.arange(inputs.shape[1])
    same = (inputs[row] == targets[row, position][:, None]) & (place < position[:, None])
    latest = torch.where(same, place, -1).amax(1)
    distances = (position - latest)[latest >= 0]
    return float(distances.double().mean()) if len(distances) > len(row) / 4 else 0.0
