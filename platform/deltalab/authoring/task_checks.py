"""The checks of a task: a comparison on data that is not what the task declares is worthless.

A check measures a task with its parameters and yields figures; the table `CHECKS` at the end gives each its limit.
"""

import itertools
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deltalab.authoring.check import Check, CheckResult, Measured, run_checks
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, SPLITS, Batch, Task

SIZE, STEPS = 64, 8  # examples in a batch, and batches of a split
ENOUGH, GUESSES = 2048, 16  # scored positions for an estimate of chance, and guesses at each


def check_task(task: Task, *, forked: bool = False) -> list[CheckResult]:
    """Checks a task. Checks that do not apply to the task are left out.

    forked: run each check in a process of its own, so that a crash fails one check instead of ending this process.

    >>> from deltalab.tasks import MQAR
    >>> all(result.passed for result in check_task(MQAR(length=32, pairs=4, vocab_size=64)))
    True
    """
    with _generators_kept():
        return run_checks(CHECKS, partial(_run, task), where=task.name, forked=forked)


def _run(task: Task, check: Check[Task]) -> CheckResult | None:
    try:
        found = list(check.measure(task))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: it would end the command as if all checks had passed
        return check.raised(error, task.name)
    if not found:
        return None
    return check.judge(min(found, key=lambda measured: check.slack(measured.figure)), task.name)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restores the global random generators, which a check seeds."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


# --- measurements -------------------------------------------------------------------------------------------


def _mismatches(found: list[tuple[str, object, bool]]) -> Iterator[Measured]:
    for what, value, right in found:
        yield Measured(float(not right), f"mismatch between {what} and {value!r}")


def _whole(value: object) -> bool:
    return type(value) is int and value >= 1


def declaration(task: Task) -> Iterator[Measured]:
    chance = isinstance(task.chance, int | float) and math.isfinite(task.chance)
    labels = [*task.evaluations()]
    yield from _mismatches(
        [
            ("`version` (a whole number of at least 1)", task.version, _whole(task.version)),
            ("`metric` (a word)", task.metric, isinstance(task.metric, str) and task.metric.isidentifier()),
            ("`maximize` (True or False)", task.maximize, isinstance(task.maximize, bool)),
            ("`chance` (a finite number)", task.chance, chance),
            ("`vocab_size` (a whole number of at least 1)", task.vocab_size, _whole(task.vocab_size)),
            ("`length` (a whole number of at least 1)", task.length, _whole(task.length)),
            ("`fingerprint()` (a string)", task.fingerprint(), isinstance(task.fingerprint(), str)),
            (
                "`evaluations()` (at least one, with a string for each label)",
                labels,
                bool(labels) and all(isinstance(label, str) for label in labels),
            ),
        ]
    )
    for label, other in task.evaluations().items():
        size = other.vocab_size
        what = f"mismatch between `vocab_size` at '{label}' ({size}) and the task's ({task.vocab_size})"
        yield Measured(float(size != task.vocab_size), what)


def parameters(task: Task) -> Iterator[Measured]:
    given = asdict(task)
    other = type(task)(**json.loads(json.dumps(given)))
    what = f"mismatch between the parameters that a worker restores ({asdict(other)}) and the given ones ({given})"
    yield Measured(float(other != task), what)


def form(task: Task) -> Iterator[Measured]:
    for split in SPLITS:
        for one, size in itertools.product(_drawn(task, split), (1, SIZE)):
            batch = one.batch(split, size, 0, 0)
            for name, tokens in (("inputs", batch.inputs), ("targets", batch.targets)):
                shown = f"{list(tokens.shape)} {tokens.dtype} on {tokens.device}"
                right = f"{[size, one.length]} torch.int64 on cpu"
                what = f"mismatch between the {name} of {split} ({shown}) and the required form ({right})"
                yield Measured(float(shown != right), what)


def token_range(task: Task) -> Iterator[Measured]:
    for split in SPLITS:
        for _, batch in _batches(task, split):
            tokens = {"inputs": batch.inputs, "targets": batch.labels}
            for name, values in tokens.items():
                outside = values[(values < 0) | (values >= task.vocab_size)].unique().tolist()
                what = f"number of {name} outside [0, vocab_size = {task.vocab_size}) in {split}, {outside[:5]},"
                yield Measured(float(len(outside)), what)


def scored(task: Task) -> Iterator[Measured]:
    for split in SPLITS:
        fewest = min(_scored(batch) for _, batch in _batches(task, split))
        yield Measured(float(fewest), f"number of scored positions in a batch of {split}")


def most_scored(task: Task) -> Iterator[Measured]:
    most = max(int((batch.targets != IGNORE).sum(1).max()) for _, batch in _batches(task, "train"))
    yield Measured(
        float(max(0, most - task.most_scored)),
        f"number of scored positions of a training example above {task.most_scored}",
    )


def shift(task: Task) -> Iterator[Measured]:
    causes = {
        0: "a target is the input token at its own position: targets are not shifted",
        2: "targets are shifted twice",
    }
    for split, (ahead, cause) in itertools.product(SPLITS, causes.items()):
        same = total = 0
        for one, batch in _batches(task, split):
            if one.readout == "position":
                inputs = batch.inputs[:, ahead:]
                targets = batch.targets[:, : inputs.shape[1]]
                same += int((targets == inputs).sum())
                total += int((targets != IGNORE).sum())
        where = f"{ahead} positions later" if ahead else "at the same position"
        if total:
            yield Measured(same / total, f"share of targets of {split} that equal the input {where}", cause)


def repeatability(task: Task) -> Iterator[Measured]:
    _seed_generators(1)
    first = task.batch("train", SIZE, 3, 5)
    _seed_generators(2)
    task.batch("validation", SIZE + 1, 0, 1)
    before = _generators()
    again = {"from the same task": task, "from an equal task": replace(task)}
    for name, other in again.items():
        what = f"number of tokens that differ in a batch drawn again {name}"
        yield Measured(_different(other.batch("train", SIZE, 3, 5), first), what)
    moved = _generators() != before
    yield Measured(float(moved), "use of a global random generator, 1 for yes,")
    if torch.cuda.is_available():
        there = task.batch("train", SIZE, 3, 5, "cuda")
        there = replace(there, inputs=there.inputs.cpu(), targets=there.targets.cpu())
        yield Measured(_different(there, first), "number of tokens that differ between CPU and GPU")


def pool(task: Task) -> Iterator[Measured]:
    if task.train_examples is not None:
        rows, cpu = torch.arange(SIZE), torch.device("cpu")
        forth, back = (task.draw("train", SIZE, Random("check", cpu, one)) for one in (rows, rows.flip(0)))
        back = replace(back, inputs=back.inputs.flip(0), targets=back.targets.flip(0))
        yield Measured(
            _different(forth, back), "number of tokens of training examples that depend on their place in the batch"
        )


def addresses(task: Task) -> Iterator[Measured]:
    for split in SPLITS:
        for one in _drawn(task, split):
            seen = [_rows(one.batch(split, SIZE, seed, step)) for seed in (0, 1) for step in (0, 1)]
            same = len(seen) - len(set(seen))
            what = f"number of batches of {split} that are equal to a batch of another seed or step"
            yield Measured(float(same), what)


def splits(task: Task) -> Iterator[Measured]:
    seen = {split: {row for _, batch in _batches(task, split) for row in _rows(batch)} for split in SPLITS}
    for a, b in itertools.combinations(SPLITS, 2):
        both = len(seen[a] & seen[b]) / len(seen[b])
        yield Measured(both, f"share of examples of {b} that are also in {a}")


def metrics(task: Task) -> Iterator[Measured]:
    for one, batch in _batches(task, "validation"):
        found = one.measure(batch, _near_uniform(batch, task.vocab_size, seed=0))
        missing = sorted({task.metric, "loss"} - set(found))
        yield Measured(float(len(missing)), f"number of missing metrics, {missing},")
        for name, pair in found.items():
            right = len(pair) == 2 and all(isinstance(x, Tensor) and x.shape == () and bool(x.isfinite()) for x in pair)
            yield Measured(float(not right), f"mismatch between '{name}' ({pair}) and two finite 0-dim tensors")


def sums(task: Task) -> Iterator[Measured]:
    for one in _drawn(task, "test"):
        batch = one.batch("test", SIZE, 0, 0)
        logits = torch.randn(_scored(batch), task.vocab_size, generator=torch.Generator().manual_seed(0))
        few = replace(batch, inputs=batch.inputs[: SIZE // 4], targets=batch.targets[: SIZE // 4])
        rest = replace(batch, inputs=batch.inputs[SIZE // 4 :], targets=batch.targets[SIZE // 4 :])
        parts = one.measure(few, logits[: _scored(few)]), one.measure(rest, logits[_scored(few) :])
        for name, whole in one.measure(batch, logits).items():
            for which, of_whole, *of_parts in zip(
                ("total", "count"), whole, *(part[name] for part in parts), strict=True
            ):
                error = abs(float(sum(of_parts)) - float(of_whole)) / max(abs(float(of_whole)), 1.0)
                what = (
                    f"relative difference of the {which} of '{name}', summed over two parts of a batch, to the whole's"
                )
                yield Measured(error, what)


def chance(task: Task) -> Iterator[Measured]:
    batches = _judged(task, "validation")
    anywhere = torch.zeros(task.vocab_size, dtype=torch.bool)
    there = {one: torch.zeros(batch.inputs.shape[1], task.vocab_size, dtype=torch.bool) for one, batch in batches}
    always = {one: torch.ones(batch.inputs.shape[1], dtype=torch.bool) for one, batch in batches}
    for one, batch in batches:
        scored = batch.targets != IGNORE
        anywhere[batch.targets[scored]] = True
        there[one][scored.nonzero()[:, 1], batch.targets[scored]] = True
        always[one] &= scored.all(dim=0)
    for one, at in there.items():
        at[~always[one]] = anywhere
    # Guess among all tokens, among those that are the answer anywhere, and among those that are it at this position.
    among = [
        [torch.ones_like(anywhere)] * len(batches),
        [anywhere] * len(batches),
        [there[one][(batch.targets != IGNORE).nonzero()[:, 1]] for one, batch in batches],
    ]
    guesses = [_guessed(task, batches, allowed) for allowed in among]
    low, high = (edge(mean for mean, _ in guesses) for edge in (min, max))
    # From few examples, the metric is known no better than to one example.
    error = max(*(error for _, error in guesses), 1 / (SIZE * len(batches)))
    outside = max(low - task.chance, task.chance - high, 0.0) / error
    shown = f"`chance` {task.chance:.3g} from the metric of guesses, {low:.3g} to {high:.3g},"
    yield Measured(outside, f"distance, in standard errors, of {shown}")


def perfect(task: Task) -> Iterator[Measured]:
    batches = _judged(task, "test")
    for name, best in ((task.metric, float(task.maximize)), ("loss", 0.0)):
        found = []
        for one, batch in batches:
            targets = batch.labels
            logits = torch.full((len(targets), task.vocab_size), -1e4).scatter_(1, targets[:, None], 0.0)
            found.append(one.measure(batch, logits)[name])
        value = _mean(found)
        yield Measured(abs(value - best), f"difference of '{name}' for the right answers, {value:.3g}, from {best:g}")


def device(task: Task) -> Iterator[Measured]:
    # Tensors on the meta device have no values, so code that reads one, and would wait for a GPU, raises an error.
    for split in SPLITS:
        for one in _drawn(task, split):
            try:
                batch = one.batch(split, SIZE, 0, 0, "meta")
                problem = "" if batch.inputs.is_meta and batch.targets.is_meta else "the batch is on another device"
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            yield Measured(
                float(bool(problem)), f"number of problems in drawing {split} on a device, {problem or 'none'},"
            )


# --- batches and their comparison ---------------------------------------------------------------------------


def _drawn(task: Task, split: str) -> list[Task]:
    """The tasks that draw a split: for training the task itself, else the tasks that it is evaluated on."""
    return [task] if split == "train" else [*task.evaluations().values()]


def _batches(task: Task, split: str) -> list[tuple[Task, Batch]]:
    return [(one, one.batch(split, SIZE, 0, step)) for one in _drawn(task, split) for step in range(STEPS)]


def _judged(task: Task, split: str) -> list[tuple[Task, Batch]]:
    """Batches of a split with `ENOUGH` scored positions, of those evaluations that make the unlabelled metric."""
    evaluations = task.evaluations()
    found = []
    for one in [evaluations[""]] if "" in evaluations else evaluations.values():
        positions = 0
        for step in range(STEPS):
            if positions < ENOUGH:
                found.append((one, one.batch(split, SIZE, 0, step)))
                positions += _scored(found[-1][1])
    return found


def _rows(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, torch.cat([batch.inputs, batch.targets], dim=1).tolist()))


def _different(a: Batch, b: Batch) -> float:
    if a.inputs.shape != b.inputs.shape:
        return math.inf
    return float((a.inputs != b.inputs).sum() + (a.targets != b.targets).sum())


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _generators() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False)), random.getstate()


def _scored(batch: Batch) -> int:
    return int((batch.targets != IGNORE).sum())


def _near_uniform(batch: Batch, vocab_size: int, seed: int) -> Tensor:
    """Logits that are almost equal, so that the largest one is a random guess."""
    return 1e-4 * torch.rand(_scored(batch), vocab_size, generator=torch.Generator().manual_seed(seed))


def _mean(found: list[tuple[Tensor, Tensor]]) -> float:
    count = sum(float(count) for _, count in found)
    return sum(float(total) for total, _ in found) / count if count else math.nan


def _guessed(task: Task, batches: list[tuple[Task, Batch]], allowed: list[Tensor]) -> tuple[float, float]:
    """The mean of the task's metric for guesses among the tokens `allowed` in each batch, and its standard error."""
    values = []
    for guess in range(GUESSES):
        found = []
        for i, (one, batch) in enumerate(batches):
            logits = _near_uniform(batch, task.vocab_size, seed=guess * len(batches) + i)
            found.append(one.measure(batch, logits.masked_fill(~allowed[i], -math.inf))[task.metric])
        values.append(_mean(found))
    return float(np.mean(values)), float(np.std(values, ddof=1)) / GUESSES**0.5


CHECKS: tuple[Check[Task], ...] = (
    Check("declaration", declaration, 0.0, "a declared value is missing or has the wrong type"),
    Check("parameters", parameters, 0.0, "`__post_init__` changes a parameter, or JSON cannot store one"),
    Check("form", form, 0.0, "`length` is not the length of the sequences, or the tokens are not int64"),
    Check("token range", token_range, 0.0, "`vocab_size` does not count all tokens"),
    Check("scored", scored, 1.0, "every target is IGNORE", at_least=True),
    Check("most scored", most_scored, 0.0, "`most_scored` is less than the scored positions of some examples"),
    Check("shift", shift, 0.99, ""),
    Check("repeatability", repeatability, 0.0, "`draw` uses randomness other than its argument `random`"),
    Check("pool", pool, 0.0, "`draw` lets a row depend on more than the same row of `random`"),
    Check("addresses", addresses, 0.0, "`draw` does not use its argument `random`"),
    # Two splits of text may share a few short windows, such as a line of dashes.
    Check("splits", splits, 0.01, "`draw` treats all splits alike, or there are too few different examples"),
    Check("metrics", metrics, 0.0, "`measure` does not return a pair (total, count) for each metric"),
    Check("sums", sums, 1e-6, "`measure` returns a mean instead of a total"),
    Check("chance", chance, 5.0, "`chance` is that of another metric, or assumes other answers"),
    Check("perfect", perfect, 1e-6, "`measure` compares logits with the wrong targets"),
    Check("device", device, 0.0, "`draw` reads a value, indexes by a mask, or leaves a tensor on the CPU"),
)
