"""Checks of shortcuts to a task's answers: whether a table or a place gives them without what the task is about."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from deltalab.authoring.check import Measurement
from deltalab.authoring.task_checks.task_batches import ENOUGH, JUDGED, SIZE, STEPS, drawn, scored_in
from deltalab.tasks.task import IGNORE, Batch, Task

MOST_TOKENS = 2048
"""The size of the largest vocabulary that counts as small: its pairs of tokens can be counted."""
NEAR = 4
"""The inputs that a short convolution of a layer reads, the current one among them."""
MANY_STEPS, MANY_ROWS, MANY = 24, 256, 16
"""The batches of training from which a table of pairs of tokens is counted, their examples, and how many times `ENOUGH`
scored positions are counted."""
PLACES = 24
"""The number of places, from the first on and from the question back, at which the other token of a pair may stand."""


class _Questions(NamedTuple):
    """The scored positions of several examples.

    Attributes:
        inputs: The tokens of the examples, [B, T].
        row: The example of each scored position.
        place: The position of each scored position in its example.
        labels: The right answer at each scored position.
        all_inputs: Whether the model reads all inputs before it answers.
    """

    inputs: Tensor
    row: Tensor
    place: Tensor
    labels: Tensor
    all_inputs: bool

    @property
    def other_row(self) -> Tensor:
        """Another example for each scored position, which holds the answer by chance alone."""
        return (self.row + 1) % len(self.inputs)


def near_inputs(task: Task) -> Iterator[Measurement]:
    """Measures the share of answers that equal the input at the same position or at one of the three before it.

    For a small vocabulary, also measures the share of answers that the input at the same position decides.
    """
    for split, member in _judged_tasks(task):
        if member.readout != "position":
            continue
        questions = _questions(member, split)
        for back in range(NEAR):
            in_range = questions.place >= back
            named, labels = (
                questions.inputs[questions.row, questions.place - back][in_range],
                questions.labels[in_range],
            )
            share = float((named == labels).sum()) / len(questions.labels)
            where = f"{back} positions before" if back else "at the same position"
            what = f"share of answers of {split} that the input {where} names, beyond what unrelated tokens would,"
            yield Measurement(_beyond(share, _by_chance(named, labels)), what)
        if member.vocab_size <= MOST_TOKENS:
            what = f"share of answers of {split} that the input at the same position decides, whatever precedes it,"
            yield Measurement(_by_token(member, split, questions), what)


def one_input(task: Task) -> Iterator[Measurement]:
    """Measures the share of answers that equal the input at one fixed position.

    Also measures that share where the first, second, ... question of an example each have a position of their own. A
    task that declares "distance" may answer in the order of its inputs. So may one whose questions stand at the same
    places in all examples, as those of a reversal do, or whose answers are all read from the last hidden state.
    """
    for split, member in _judged_tasks(task):
        questions = _questions(member, split)
        causal = torch.arange(questions.inputs.shape[1]) <= questions.place[:, None]
        share, other_share = (
            ((questions.inputs[row] == questions.labels[:, None]) & (causal | (member.readout != "position")))
            .double()
            .mean(0)
            for row in (questions.row, questions.other_row)
        )
        position = int((share - other_share).argmax())
        where = f"the input at position {position} names, beyond the share in other examples,"
        what = f"share of answers of {split} that {where}"
        yield Measurement(_beyond(float(share[position]), float(other_share[position])), what)
        if member.readout == "position" and "distance" not in task.shortcuts:
            turn = _turns(questions)
            places = torch.zeros(int(turn.max()) + 1, dtype=torch.int64).scatter(0, turn, questions.place)
            if (places[turn] != questions.place).any():
                what = f"share of answers of {split} that the input at a position decided by the question's turn names,"
                yield Measurement(_by_turn(questions, _questions(member, split, seed=1)), what)


def _by_turn(asked: _Questions, known: _Questions) -> float:
    """Returns the share of answers that equal the input at a position fixed for each turn, beyond chance.

    The turn of a question is its place among the questions of its example. Its position is the best one in `known`.
    """
    length = min(asked.inputs.shape[1], known.inputs.shape[1])

    def named(questions: _Questions) -> tuple[Tensor, Tensor]:
        turn = _turns(questions)
        seen = torch.arange(length) <= questions.place[:, None]
        return turn, seen & (questions.inputs[questions.row, :length] == questions.labels[:, None])

    known_turn, known_same = named(known)
    turn, same = named(asked)
    counts = torch.zeros(int(max(turn.max(), known_turn.max())) + 1, length).index_add_(
        0, known_turn, known_same.float()
    )
    position = counts.argmax(1)[turn]
    share = same.gather(1, position[:, None]).double().mean()
    return _beyond(float(share), _by_chance(asked.inputs[asked.row, position], asked.labels))


def _turns(questions: _Questions) -> Tensor:
    """Returns for each question how many questions of its example stand before it."""
    index = torch.arange(len(questions.row))
    opens = torch.ones_like(questions.row, dtype=torch.bool)
    opens[1:] = questions.row[1:] != questions.row[:-1]
    return index - torch.where(opens, index, 0).cummax(0).values


def _by_chance(named: Tensor, labels: Tensor) -> float:
    """Returns the share of labels that would equal the tokens `named` if tokens and labels were independent."""
    if not len(labels):
        return 0.0
    most = int(max(named.max(), labels.max())) + 1
    counts = [torch.bincount(tokens, minlength=most).double() / len(tokens) for tokens in (named, labels)]
    return float((counts[0] * counts[1]).sum())


def _beyond(share: float, by_chance: float) -> float:
    """Returns a share on a scale from 0, for the share that chance reaches, to 1, for a share of 1."""
    return (share - by_chance) / (1 - by_chance) if by_chance < 1 else 0.0


def _judged_tasks(task: Task) -> Iterator[tuple[str, Task]]:
    """Yields each split of evaluation with each task that draws it."""
    return ((split, member) for split in JUDGED for member in drawn(task, split))


def _questions(task: Task, split: str, *, seed: int = 0, steps: int = STEPS, size: int = SIZE) -> _Questions:
    """Returns the scored positions of the first batches of a split: `ENOUGH` positions, or all of `steps` batches."""
    drawn_batches: list[Batch] = []
    while len(drawn_batches) < steps and (steps > STEPS or sum(map(scored_in, drawn_batches)) < ENOUGH):
        drawn_batches.append(task.batch(split, size, seed, len(drawn_batches)))
    inputs, targets = (torch.cat([getattr(batch, name) for batch in drawn_batches]) for name in ("inputs", "targets"))
    row, place = (targets != IGNORE).nonzero().unbind(1)
    most = (MANY if steps > STEPS else 2) * ENOUGH  # where each position is scored, some of them tell as much
    row, place = row[:: 1 + len(row) // most], place[:: 1 + len(place) // most]
    return _Questions(inputs, row, place, targets[row, place], task.readout != "position")


def _by_token(task: Task, split: str, questions: _Questions) -> float:
    """Returns the share of answers that a table predicts beyond the share of the most frequent answer.

    The table has the most frequent answer for each input token at the same position. It is counted at another seed than
    the seed of `questions`.
    """
    counts = torch.zeros(task.vocab_size**2, dtype=torch.int64)
    for step in range(STEPS):
        batch = task.batch(split, SIZE, 1, step)
        pair_ids = batch.inputs[batch.targets != IGNORE] * task.vocab_size + batch.labels
        counts += torch.bincount(pair_ids, minlength=len(counts))
    table = counts.view(task.vocab_size, -1)
    from_table, most = table.argmax(1)[questions.inputs[questions.row, questions.place]], table.sum(0).argmax()
    return _beyond(*(float((named == questions.labels).double().mean()) for named in (from_table, most)))


def distances(task: Task) -> Iterator[Measurement]:
    """Measures the share of answers that equal the input at one fixed distance before their position."""
    for split, member in _judged_tasks(task):
        if member.readout != "position" or "distance" in task.shortcuts:
            continue
        questions = _questions(member, split)
        for back in range(NEAR, questions.inputs.shape[1]):
            in_range = questions.place >= back
            named, labels = (
                questions.inputs[questions.row, questions.place - back][in_range],
                questions.labels[in_range],
            )
            share = float((named == labels).sum()) / len(questions.labels)
            what = f"share of answers of {split} that the input {back} positions before names, beyond chance,"
            yield Measurement(_beyond(share, _by_chance(named, labels)), what)


def order(task: Task) -> Iterator[Measurement]:
    """Measures how far the answers of an example, and those of a batch, stand in order.

    The figure is 1 if no answer is less than the one before it, or none is greater, and about 0 if they are drawn
    independently. Also measures how many examples of a batch share their first answer beyond those of two batches.
    """
    for split, member in _judged_tasks(task):
        questions = _questions(member, split)
        first = torch.ones_like(questions.row, dtype=torch.bool)
        first[1:] = questions.row[1:] != questions.row[:-1]
        by_row = questions.labels[first]
        rows = questions.row[first] // SIZE
        if len(by_row) > SIZE:
            shared, by_chance = (
                float((by_row[one:] == by_row[:-one])[(rows[one:] == rows[:-one]) == within].double().mean())
                for one, within in ((1, True), (SIZE, False))
            )
            what = (
                f"share of examples of {split} with the first answer of another of their batch, beyond other batches,"
            )
            yield Measurement(_beyond(shared, by_chance), what, "`draw` draws an answer once for a batch, not a row")
        for labels, groups, what, cause in (
            (questions.labels, questions.row, "an example", "`draw` sorts the answers of an example"),
            (by_row, rows, "a batch", "`draw` sorts examples by their answers: shuffle them"),
        ):
            same = groups[1:] == groups[:-1]
            step = (labels[1:] - labels[:-1])[same]
            moved = step[step != 0]
            if len(moved) > SIZE:
                ordered = abs(2 * float((moved > 0).double().mean()) - 1)
                yield Measurement(ordered, f"share of answers of {split} that stand in the order of {what}", cause)


def classes(task: Task) -> Iterator[Measurement]:
    """Measures the share of answers that one plain number decides: a sum, a count or a length.

    For each number, a table has the most frequent answer. It is counted at another seed.
    """
    for split, member in _judged_tasks(task):
        if "class" in task.shortcuts:
            continue
        asked, known = _questions(member, split), _questions(member, split, seed=1)
        for (name, of_asked), of_known in zip(_numbers(asked).items(), _numbers(known).values(), strict=True):
            figure = _Table.of(of_known, known.labels).beyond(of_asked, asked.labels)
            yield Measurement(figure, f"share of answers of {split} that {name} decides")


def _numbers(questions: _Questions) -> dict[str, Tensor]:
    """Returns plain numbers of the inputs up to each scored position; to the end, for a readout of all inputs."""
    inputs = questions.inputs[questions.row]
    place = torch.arange(inputs.shape[1])
    until = torch.full_like(questions.place, inputs.shape[1] - 1) if questions.all_inputs else questions.place
    seen = place <= until[:, None]
    ordered = torch.where(seen, inputs, -1).sort(1).values
    opens = torch.ones_like(seen)
    opens[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    run = torch.where(ordered >= 0, place - torch.where(opens, place, 0).cummax(1).values + 1, 0)
    longest, at = run.max(1)
    return {
        "the most frequent token": ordered.gather(1, at[:, None])[:, 0],
        "the number of different tokens": (opens & (ordered >= 0)).sum(1),
        "the number of tokens beside the most frequent": until + 1 - longest,
        "the largest token": ordered[:, -1],
        "the smallest token": torch.where(seen, inputs, inputs.max()).amin(1),
        "the first token": inputs[:, 0],
        "the last token": inputs.gather(1, until[:, None])[:, 0],
    }


def facts(task: Task) -> Iterator[Measurement]:
    """Measures the share of answers of evaluation that a table of pairs of tokens, counted in training, gives.

    A pair is the input at the scored position and one more input, at a fixed place or a fixed distance. A task that
    declares "distance" is not asked about distances: there, one input alone may be the answer.
    """
    if task.vocab_size > MOST_TOKENS or "facts" in task.shortcuts:
        return
    known = _questions(task, "train", steps=MANY_STEPS, size=MANY_ROWS)
    if not len(known.labels):
        return

    @cache
    def table(place_of: int) -> _Table:
        return _Table.of(_pair(known, place_of, task.vocab_size), known.labels)

    for split, member in _judged_tasks(task):
        asked = _questions(member, split)
        for where, place_of in _places(min(known.inputs.shape[1], asked.inputs.shape[1])):
            if place_of < 0 and "distance" in task.shortcuts:
                continue
            figure = table(place_of).beyond(_pair(asked, place_of, task.vocab_size), asked.labels)
            what = f"share of answers of {split} that the input at their position and the one {where} gave in training"
            yield Measurement(figure, what)


def _places(length: int) -> Iterator[tuple[str, int]]:
    """Yields each place of the other token of a pair in words and as a number; distances are below 0."""
    for i in range(min(PLACES, length)):
        yield f"at place {i}", i
        if i:
            yield f"{i} positions before", -i


def _pair(questions: _Questions, at: int, vocab_size: int) -> Tensor:
    """Returns a number for each scored position that tells its pair of tokens, -1 if the pair is not there yet."""
    last = torch.full_like(questions.place, questions.inputs.shape[1] - 1) if questions.all_inputs else questions.place
    place = torch.full_like(last, at) if at >= 0 else last + at
    there = (place >= 0) & (place <= last)
    other = questions.inputs[questions.row, place.clamp_min(0)]
    return torch.where(there, questions.inputs[questions.row, last] * vocab_size + other, -1)


class _Table(NamedTuple):
    """The most frequent answer to each number that questions have.

    Attributes:
        numbers: The numbers, in ascending order.
        answers: The answer to each.
        frequent: The most frequent answer to all questions.
    """

    numbers: Tensor
    answers: Tensor
    frequent: Tensor

    @classmethod
    def of(cls, numbers: Tensor, answers: Tensor) -> "_Table":
        """Counts a table from a number and the right answer of each question."""
        most = int(answers.max()) + 1
        different, index = numbers.unique(return_inverse=True)
        ids, counts = (index * most + answers).unique(return_counts=True)
        best = torch.zeros(len(different), dtype=torch.int64).scatter_reduce(0, ids // most, counts, "amax")
        is_best = counts == best[ids // most]
        table = torch.empty(len(different), dtype=torch.int64)
        table[(ids // most)[is_best]] = (ids % most)[is_best]
        return cls(different, table, torch.bincount(answers).argmax())

    def beyond(self, numbers: Tensor, labels: Tensor) -> float:
        """Returns the share of labels that the table gives for their numbers, beyond the most frequent answer."""
        at = torch.searchsorted(self.numbers, numbers.contiguous()).clamp_max(len(self.numbers) - 1)
        right = (self.answers[at] == labels) & (self.numbers[at] == numbers)
        return _beyond(*(float(hits.double().mean()) for hits in (right, labels == self.frequent)))
