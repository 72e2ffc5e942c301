"""Checks of a task's streams: each address has its own examples, the same in every process and at every time."""

import importlib
import itertools
import json
import math
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from deltalab.authoring.check import Measured
from deltalab.authoring.task_batches import SIZE, STEPS, batches, different, drawn, last_scored
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, SPLITS, Batch, Task

FEW = 4  # examples that are drawn at each of many addresses
SEEDS = (*range(1, 8), 10, 42, 100, 123, 1000, 1234, 10_000, 100_000, 1_000_000)
NEXT_STEPS = (*range(1, 257), *(round(10 ** (n / 4)) for n in range(10, 25)))
ONE_OF = (
    20.0  # nats: among e^20 examples, the thousand that are compared hold no equal pair but in one case of a thousand
)


def repeatability(task: Task) -> Iterator[Measured]:
    _seed_generators(1)
    first = task.batch("train", SIZE, 3, 5)
    _seed_generators(2)
    task.batch("validation", SIZE + 1, 0, 1)
    before = _generators()
    again = {"from the same task": task, "from an equal task": replace(task)}
    for name, other in again.items():
        what = f"number of tokens that differ in a batch drawn again {name}"
        yield Measured(different(other.batch("train", SIZE, 3, 5), first), what)
    moved = _generators() != before
    yield Measured(float(moved), "use of a global random generator, 1 for yes,")
    if torch.cuda.is_available():
        there = task.batch("train", SIZE, 3, 5, "cuda")
        there = replace(there, inputs=there.inputs.cpu(), targets=there.targets.cpu())
        yield Measured(different(there, first), "number of tokens that differ between CPU and GPU")


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _generators() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False)), random.getstate()


def processes(task: Task) -> Iterator[Measured]:
    kind = type(task)
    code = [getattr(value, "__code__", None) for value in vars(kind).values()]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or next((c.co_filename for c in code if c), "")
    if not file.endswith(".py"):  # a class that was typed into an interpreter
        return
    # Python hashes text differently in each process, and so orders sets of text.
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = "import sys; from deltalab.authoring.task_streams import print_digest; print_digest(sys.argv[1])"
    given = json.dumps([kind.__module__, file, kind.__name__, asdict(task)])
    done = subprocess.run([sys.executable, "-c", run, given], env=there, capture_output=True, text=True)
    problem = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
    what = (
        f"failure to draw a batch in another process ({problem})" if problem else "change of a batch in another process"
    )
    cause = "the task needs what only this process has" if problem else ""
    yield Measured(float(done.stdout.strip() != digest(task)), f"{what} in another process, 1 for yes,", cause)


def print_digest(given: str) -> None:
    """Prints the `digest` of a task. given: JSON of its class's module, file and name, and its parameters."""
    module, file, name, parameters = json.loads(given)
    try:
        found = vars(importlib.import_module(module))
    except ImportError:  # a plugin's file
        found = runpy.run_path(file, run_name="deltalab_task_check")
    print(digest(found[name](**parameters)))


def digest(task: Task) -> str:
    """A hash of a batch of each split."""
    found = [one.batch(split, FEW, 3, 5) for split in SPLITS for one in drawn(task, split)]
    return sha256(json.dumps([[x.inputs.tolist(), x.targets.tolist()] for x in found]).encode()).hexdigest()


def pool(task: Task) -> Iterator[Measured]:
    if task.train_examples is None:
        return
    rows, cpu = torch.arange(SIZE), torch.device("cpu")
    some = rows[1::3]
    forth, back, few = (task.draw("train", len(at), Random("check", cpu, at)) for at in (rows, rows.flip(0), some))
    back = replace(back, inputs=back.inputs.flip(0), targets=back.targets.flip(0))
    yield Measured(
        different(forth, back), "number of tokens of training examples that depend on their place in the batch"
    )
    same = replace(forth, inputs=forth.inputs[some], targets=forth.targets[some])
    yield Measured(different(same, few), "number of tokens of training examples that depend on the batch's size")


def addresses(task: Task) -> Iterator[Measured]:
    for split in SPLITS:
        for one in drawn(task, split):
            seen = [_whole(one.batch(split, SIZE, seed, step)) for seed in (0, 1) for step in (0, 1)]
            same = len(seen) - len(set(seen))
            what = f"number of batches of {split} that are equal to a batch of another seed or step"
            yield Measured(float(same), what)


def streams(task: Task) -> Iterator[Measured]:
    train = {
        (seed, step): task.batch("train", FEW, seed, step)
        for seed, step in {(0, 0), (1, 1), *((s, 0) for s in SEEDS), *((0, s) for s in NEXT_STEPS)}
    }
    # With `train_examples`, all steps of a seed draw from the same examples, which are of that seed alone.
    finite = task.train_examples is not None
    again, share = (
        _again({(seed, 0 if finite else step, i): b for i, ((seed, step), b) in enumerate(train.items())}),
        0.0,
    )
    what, cause = f"share of training examples that occur at other {'seeds' if finite else 'seeds or steps'}", ""
    if not finite and task.train_tokens is not None:
        share = 1 - math.exp(-FEW * len(train) * task.length / task.train_tokens)
        what += f", beyond twice the {share:.3g} that follows from `train_tokens`,"
        cause = "there are fewer examples than `train_tokens` says"
    yield Measured(max(0.0, again - 2 * share), what, cause)
    trained = [_examples(batch) for batch in train.values()]
    for split in SPLITS[1:]:
        for one in drawn(task, split):
            held = [one.batch(split, SIZE, 0, step) for step in range(STEPS)]
            if finite or task.train_tokens is None:
                yield Measured(
                    _again({(0, step, step): batch for step, batch in enumerate(held)}),
                    f"share of examples of {split} that occur at several steps",
                    f"`draw` takes {split} from a small number of examples: draw each anew",
                )
            known = {example for batch in held for example in _examples(batch)}
            moved = sum(sum(example in known for example in examples) > FEW / 2 for examples in trained)
            yield Measured(
                float(moved),
                f"number of training batches, at other seeds or steps, that {split} has too",
                f"the seeds or steps of {split} are those of training, moved by a number",
            )


def _again(found: dict[tuple[int, int, int], Batch]) -> float:
    """The share of examples that occur at several addresses (seed, step). Those of which there are few do not count."""
    of_many = _one_of_many([*found.values()])
    places: dict[str, set[tuple[int, int]]] = {}
    for (seed, step, _), batch in found.items():
        for example in of_many.intersection(_examples(batch)):
            places.setdefault(example, set()).add((seed, step))
    return sum(len(at) > 1 for at in places.values()) / max(1, len(places))


def _one_of_many(found: list[Batch]) -> set[str]:
    """The examples of which there are so many, by their length and the variety of their inputs, that two draws do not
    give the same one."""
    inputs, last = (torch.cat(parts) for parts in ([x.inputs for x in found], [last_scored(x) for x in found]))
    used = inputs[torch.arange(inputs.shape[1]) <= last[:, None]]
    share = torch.bincount(used).double() / max(1, len(used))
    nats = -float(torch.xlogy(share, share).sum())
    return {
        example
        for batch in found
        for example, length in zip(_examples(batch), (last_scored(batch) + 1).tolist(), strict=True)
        if length * nats > ONE_OF
    }


def splits(task: Task) -> Iterator[Measured]:
    found = {split: batches(task, split) for split in SPLITS}
    for what, named in (("examples", _examples), ("inputs up to the last scored position", _asked)):
        seen = {split: {row for _, batch in of for row in named(batch)} for split, of in found.items()}
        for a, b in itertools.combinations(SPLITS, 2):
            both = len(seen[a] & seen[b]) / len(seen[b])
            yield Measured(both, f"share of {what} of {b} that are also in {a}")


def vocabulary(task: Task) -> Iterator[Measured]:
    for one in drawn(task, "test"):
        found = {at: _drawn_at(one, *at) for at in (("train", 0), ("train", 1), *((split, 0) for split in SPLITS[1:]))}
        for name in ("inputs", "labels"):
            tokens = {at: torch.cat([getattr(batch, name).flatten() for batch in of]) for at, of in found.items()}
            known = tokens.pop(("train", 0))
            # Of a large vocabulary, so few batches do not show every token.
            new = _share_outside(tokens.pop(("train", 1)), known)
            for (split, _), held in tokens.items():
                what = f"share of {'answers' if name == 'labels' else name} of {split} that training does not have"
                yield Measured(max(0.0, _share_outside(held, known) - new), what)


def _drawn_at(task: Task, split: str, seed: int) -> list[Batch]:
    return [task.batch(split, SIZE, seed, step) for step in range(STEPS)]


def _share_outside(tokens: Tensor, known: Tensor) -> float:
    return float((~torch.isin(tokens, known)).double().mean()) if len(tokens) else 0.0


# --- examples -----------------------------------------------------------------------------------------------


def _whole(batch: Batch) -> tuple[str, ...]:
    return tuple(_hashes(torch.cat([batch.inputs, batch.targets], dim=1)))


def _examples(batch: Batch) -> list[str]:
    return _hashes(batch.inputs)


def _asked(batch: Batch) -> list[str]:
    """The inputs up to the last scored position: what follows changes no answer."""
    place = torch.arange(batch.inputs.shape[1])
    return _hashes(torch.where(place <= last_scored(batch)[:, None], batch.inputs, IGNORE))


def _hashes(rows: Tensor) -> list[str]:
    return [sha256(row.numpy().tobytes()).hexdigest() for row in rows.contiguous()]
