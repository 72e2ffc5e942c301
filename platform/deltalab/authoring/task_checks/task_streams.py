"""Checks of a task's streams: each seed and step has its own examples, and they are the same in every process."""

import importlib
import itertools
import json
import math
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from hashlib import sha256
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from deltalab.authoring.check import Measurement
from deltalab.authoring.task_checks.task_batches import SIZE, STEPS, batches, different, drawn, last_scored
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, SPLITS, Batch, Task

FEW = 4
"""The number of examples that are drawn at each of many addresses."""
SEEDS = (*range(1, 8), 10, 42, 100, 123, 1000, 1234, 10_000, 100_000, 1_000_000)
NEXT_STEPS = (*range(1, 257), *(round(10 ** (n / 4)) for n in range(10, 25)))
NEAR = 2
"""The most tokens in which an example differs from one that it is a near copy of."""
MOST_COMPARED = 2**26
"""The most tokens that are compared to find the near copies of a split, with all pairs of examples."""
ONE_OF = 20.0
"""A number of nats. A thousand examples drawn from e^20 have an equal pair in one case of a thousand."""


def repeatability(task: Task) -> Iterator[Measurement]:
    """Counts the tokens that differ if a batch is drawn again, after other batches, from an equal task or on a GPU."""
    _seed_generators(1)
    first = task.batch("train", SIZE, 3, 5)
    _seed_generators(2)
    task.batch("validation", SIZE + 1, 0, 1)
    before = _generators()
    redrawn = {"from the same task": task, "from an equal task": replace(task)}
    for name, other in redrawn.items():
        what = f"number of tokens that differ in a batch drawn again {name}"
        yield Measurement(different(other.batch("train", SIZE, 3, 5), first), what)
    was_used = _generators() != before
    yield Measurement(float(was_used), "use of a global random generator, 1 for yes,")
    if torch.cuda.is_available():
        on_gpu = task.batch("train", SIZE, 3, 5, "cuda")
        on_gpu = replace(on_gpu, inputs=on_gpu.inputs.cpu(), targets=on_gpu.targets.cpu())
        yield Measurement(different(on_gpu, first), "number of tokens that differ between CPU and GPU")


def _seed_generators(seed: int) -> None:
    """Seeds the global random generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _generators() -> tuple[object, ...]:
    """Returns the states of the global random generators."""
    return torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False)), random.getstate()


def processes(task: Task) -> Iterator[Measurement]:
    """Checks that another process, in which Python hashes text differently, draws the same batches."""
    kind = type(task)
    code = [getattr(value, "__code__", None) for value in vars(kind).values()]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or next((c.co_filename for c in code if c), "")
    if not file.endswith(".py"):  # a class that was typed into an interpreter
        return
    # Python hashes text differently in each process, so that sets of text have another order.
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = (
        "import sys; from deltalab.authoring.task_checks.task_streams import print_digest; print_digest(sys.argv[1])"
    )
    request = json.dumps([kind.__module__, file, kind.__name__, asdict(task)])
    command = [sys.executable, "-P", "-c", program, request]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    problem = (process.stderr.strip().splitlines() or ["no message"])[-1] if process.returncode else ""
    what = (
        f"failure to draw a batch in another process ({problem})" if problem else "change of a batch in another process"
    )
    cause = "the task needs what only this process has" if problem else ""
    yield Measurement(float(process.stdout.strip() != digest(task)), f"{what}, 1 for yes,", cause)


def print_digest(request: str) -> None:
    """Prints the `digest` of a task.

    Args:
        request: JSON of a list: the module, the file and the name of the task's class, and the task's parameters.
    """
    module, file, name, parameters = json.loads(request)
    try:
        definitions = vars(importlib.import_module(module))
    except ImportError:  # the module is a plugin's file
        definitions = runpy.run_path(file, run_name="deltalab_task_check")
    print(digest(definitions[name](**parameters)))


def digest(task: Task) -> str:
    """Returns a hash of a batch of each split."""
    drawn_batches = [member.batch(split, FEW, 3, 5) for split in SPLITS for member in drawn(task, split)]
    return sha256(
        json.dumps([[batch.inputs.tolist(), batch.targets.tolist()] for batch in drawn_batches]).encode()
    ).hexdigest()


def pool(task: Task) -> Iterator[Measurement]:
    """Counts the tokens of training examples that depend on their place in the batch, or on the batch's size.

    The check applies to tasks with a finite number of training examples.
    """
    if task.train_examples is None:
        return
    rows, cpu = torch.arange(SIZE), torch.device("cpu")
    some = rows[1::3]
    forward, back, few = (
        task.draw("train", len(index), Random("check", cpu, index)) for index in (rows, rows.flip(0), some)
    )
    back = replace(back, inputs=back.inputs.flip(0), targets=back.targets.flip(0))
    yield Measurement(
        different(forward, back), "number of tokens of training examples that depend on their place in the batch"
    )
    same = replace(forward, inputs=forward.inputs[some], targets=forward.targets[some])
    yield Measurement(different(same, few), "number of tokens of training examples that depend on the batch's size")


def addresses(task: Task) -> Iterator[Measurement]:
    """Counts the batches of a split that are equal to a batch of another seed or step."""
    for split in SPLITS:
        for member in drawn(task, split):
            seen = [_whole(member.batch(split, SIZE, seed, step)) for seed in (0, 1) for step in (0, 1)]
            same = len(seen) - len(set(seen))
            what = f"number of batches of {split} that are equal to a batch of another seed or step"
            yield Measurement(float(same), what)


def streams(task: Task) -> Iterator[Measurement]:
    """Measures how many training examples occur at several addresses.

    Also measures how many examples of an evaluation repeat, and how many training batches an evaluation has, too.
    """
    train = {
        (seed, step): task.batch("train", FEW, seed, step)
        for seed, step in {(0, 0), (1, 1), *((s, 0) for s in SEEDS), *((0, s) for s in NEXT_STEPS)}
    }
    # With `train_examples`, all steps of a seed draw from the same examples, and no other seed has these examples.
    finite = task.train_examples is not None
    repeated, expected = (
        _repeated_share({(seed, 0 if finite else step, i): b for i, ((seed, step), b) in enumerate(train.items())}),
        0.0,
    )
    what, cause = f"share of training examples that occur at other {'seeds' if finite else 'seeds or steps'}", ""
    if not finite and task.train_tokens is not None:
        expected = 1 - math.exp(-FEW * len(train) * task.length / task.train_tokens)
        what += f", beyond twice the {expected:.3g} that follows from `train_tokens`,"
        cause = "there are fewer examples than `train_tokens` says"
    yield Measurement(max(0.0, repeated - 2 * expected), what, cause)
    trained = [_examples(batch) for batch in train.values()]
    for split in SPLITS[1:]:
        for member in drawn(task, split):
            split_batches = [member.batch(split, SIZE, 0, step) for step in range(STEPS)]
            if finite or task.train_tokens is None:
                yield Measurement(
                    _repeated_share({(0, step, step): batch for step, batch in enumerate(split_batches)}),
                    f"share of examples of {split} that occur at several steps",
                    f"`draw` takes {split} from a small number of examples: draw each anew",
                )
            split_examples = {example for batch in split_batches for example in _examples(batch)}
            shared = sum(sum(example in split_examples for example in examples) > FEW / 2 for examples in trained)
            yield Measurement(
                float(shared),
                f"number of training batches, at other seeds or steps, that {split} has too",
                f"the seeds or steps of {split} are those of training, moved by a number",
            )


def own_streams(task: Task) -> Iterator[Measurement]:
    """Counts the addresses of random numbers of an evaluation that are those of training, with other numbers in them.

    An address that is the same for all seeds and steps is left out: it gives facts, which training may share.
    """
    training = _templates(task, "train")
    for split in SPLITS[1:]:
        for member in drawn(task, split):
            shared = sorted(training & _templates(member, split))
            what = f"number of streams that {split} and training draw from, {', '.join(shared[:2]) or 'none'},"
            yield Measurement(float(len(shared)), what)


def _templates(task: Task, split: str) -> set[str]:
    """Returns the addresses from which batches are drawn, with `#` for each number that differs between batches."""
    seen: list[set[str]] = []

    def record(random: Random, stream: str, *shape: int) -> Tensor:
        seen[-1].add(random.address)
        return words(random, stream, *shape)

    words = Random.words
    with mock.patch.object(Random, "words", record):
        for seed, step in ((0, 0), (1, 1)):
            seen.append(set())
            task.batch(split, FEW, seed, step)
    # A longer number is a hash, which tells splits apart.
    return {re.sub(r"(?<!\d)\d{1,9}(?!\d)", "#", address) for address in seen[0] ^ seen[1]}


def _repeated_share(batches: dict[tuple[int, int, int], Batch]) -> float:
    """Returns the share of examples that occur at several addresses (seed, step).

    Only the examples of `_one_of_many` count. Short or uniform examples recur by chance.
    """
    counted = _one_of_many([*batches.values()])
    places: dict[str, set[tuple[int, int]]] = {}
    for (seed, step, _), batch in batches.items():
        for example in counted.intersection(_examples(batch)):
            places.setdefault(example, set()).add((seed, step))
    return sum(len(addresses) > 1 for addresses in places.values()) / max(1, len(places))


def _one_of_many(batches: list[Batch]) -> set[str]:
    """Returns the examples that are so long and varied that two draws do not give the same example by chance."""
    inputs, last = (
        torch.cat(parts) for parts in ([part.inputs for part in batches], [last_scored(part) for part in batches])
    )
    used = inputs[torch.arange(inputs.shape[1]) <= last[:, None]]
    share = used.unique(return_counts=True)[1].double() / max(1, used.numel())
    nats = -float(torch.xlogy(share, share).sum()) * math.prod(inputs.shape[2:])  # of all numbers of a patch
    return {
        example
        for batch in batches
        for example, length in zip(_examples(batch), (last_scored(batch) + 1).tolist(), strict=True)
        if length * nats > ONE_OF
    }


def splits(task: Task) -> Iterator[Measurement]:
    """Measures the share of examples that two splits have in common."""
    batches_of = {split: batches(task, split) for split in SPLITS}
    for what, hashes_of in (("examples", _examples), ("inputs up to the last scored position", _questions)):
        seen = {split: {row for _, batch in pairs for row in hashes_of(batch)} for split, pairs in batches_of.items()}
        for a, b in itertools.combinations(SPLITS, 2):
            shared = len(seen[a] & seen[b]) / len(seen[b])
            yield Measurement(shared, f"share of {what} of {b} that are also in {a}")


def near_copies(task: Task) -> Iterator[Measurement]:
    """Measures the share of an evaluation's examples that differ from one of training in 1 or 2 tokens or patches.

    The share that training itself has at other steps and at another seed is taken off: short examples are alike by
    chance.
    """
    numbers = task.length * (1 if task.patches is None else task.patches[2])
    count = min(STEPS, max(1, math.isqrt(MOST_COMPARED // numbers) // SIZE))
    trained = [task.batch("train", SIZE, 0, step) for step in range(count)]
    known = torch.cat([batch.inputs for batch in trained])
    more = [[task.batch("train", SIZE, seed, step + STEPS) for step in range(count)] for seed in (0, 1)]
    chance = max(_near_share(drawn_batches, known) for drawn_batches in more)
    for split in SPLITS[1:]:
        for member in drawn(task, split):
            if member.length == task.length:
                share = _near_share([member.batch(split, SIZE, 0, step) for step in range(count)], known)
                parts = "tokens" if task.patches is None else "patches"
                what = f"share of examples of {split} that differ from one of training in 1 or {NEAR} {parts}"
                yield Measurement(max(0.0, share - chance), f"{what}, beyond the {chance:.3g} of training itself,")


def _near_share(batches: list[Batch], known: Tensor) -> float:
    """Returns the share of examples that differ from a row of `known` [N, T] in 1 to `NEAR` of the tokens that count.

    Tokens after the last scored position change no answer.
    """
    near = []
    for batch in batches:
        counts = torch.arange(known.shape[1]) <= last_scored(batch)[:, None]
        apart = torch.stack(
            [
                ((row != known).view(*known.shape[:2], -1).any(2) & counted).sum(1)
                for row, counted in zip(batch.inputs, counts, strict=True)
            ]
        )
        near.append(((apart >= 1) & (apart <= NEAR)).any(1))
    return float(torch.cat(near).double().mean())


def vocabulary(task: Task) -> Iterator[Measurement]:
    """Measures the share of tokens of evaluation that training does not have; of classes alone for images."""
    for member in drawn(task, "test"):
        batches_at = {
            address: _drawn_at(member, *address)
            for address in (("train", 0), ("train", 1), *((split, 0) for split in SPLITS[1:]))
        }
        for name in ("inputs", "labels") if task.patches is None else ("labels",):
            tokens = {
                address: torch.cat([getattr(batch, name).flatten() for batch in drawn_batches])
                for address, drawn_batches in batches_at.items()
            }
            known = tokens.pop(("train", 0))
            # A few batches do not show every token of a large vocabulary. Another seed of training shows the share that
            # they miss.
            unseen = _share_outside(tokens.pop(("train", 1)), known)
            for (split, _), split_tokens in tokens.items():
                what = f"share of {'answers' if name == 'labels' else name} of {split} that training does not have"
                yield Measurement(max(0.0, _share_outside(split_tokens, known) - unseen), what)


def _drawn_at(task: Task, split: str, seed: int) -> list[Batch]:
    """Returns the first `STEPS` batches of a split at a seed."""
    return [task.batch(split, SIZE, seed, step) for step in range(STEPS)]


def _share_outside(tokens: Tensor, known: Tensor) -> float:
    """Returns the share of tokens that are not among the known ones."""
    return float((~torch.isin(tokens, known)).double().mean()) if len(tokens) else 0.0


# --- examples -----------------------------------------------------------------------------------------------


def _whole(batch: Batch) -> tuple[str, ...]:
    """Returns a hash of the inputs and targets of each row of a batch."""
    return tuple(a + b for a, b in zip(_hashes(batch.inputs), _hashes(batch.targets), strict=True))


def _examples(batch: Batch) -> list[str]:
    """Returns the hashes of the inputs of each row."""
    return _hashes(batch.inputs)


def _questions(batch: Batch) -> list[str]:
    """Returns a hash of each row's inputs up to the last scored position. Later inputs change no answer."""
    place = torch.arange(batch.inputs.shape[1])
    seen = place <= last_scored(batch)[:, None]
    seen = seen.view(*seen.shape, *[1] * (batch.inputs.dim() - 2))
    return _hashes(torch.where(seen, batch.inputs, IGNORE))


def _hashes(rows: Tensor) -> list[str]:
    """Returns a hash of each row."""
    return [sha256(row.numpy().tobytes()).hexdigest() for row in rows.contiguous()]
