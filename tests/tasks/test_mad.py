"""The six tasks of MAD: batches follow the law of a plain sampler; small training sets; rebuilding from one state."""

import math
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.folders import STUDIES
from torch import Tensor

import deltalab
from deltalab.errors import InputError
from deltalab.export import export_hf
from deltalab.models.model import Model, Rebuild, build_model
from deltalab.models.spec import ModelSpec
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.study_file import load_study
from deltalab.tasks import BUILTIN, IGNORE, Batch, Random, Task
from deltalab.training.train import TrainSpec, train
from deltalab.training.trainer import LockStep

RARE_EVENT = 1e-4  # every draw here is fixed, so a test below this p-value fails always or never
NAMES = [name for name in BUILTIN if name.startswith("mad_")]

Example = tuple[tuple[int, ...], tuple[int, ...]]
Plain = Callable[[np.random.Generator, bool], tuple[list[int], list[int]]]


def examples(batch: Batch) -> list[Example]:
    pairs = zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)
    return [(tuple(inputs), tuple(targets)) for inputs, targets in pairs]


def drawn(task: Task, split: str, size: int, seed: int = 0, step: int = 0) -> list[Example]:
    return examples(task.batch(split, size, seed, step))


def assert_same_law(ours: Counter[Any], plain: Counter[Any]) -> None:
    """Two samples of one distribution. Outcomes that are rare in both count as one, with the rarest that is not."""
    *common, _ = [outcome for outcome, count in (ours + plain).most_common() if count >= 20]
    assert common, "nothing to compare"
    table = [[sample[outcome] for outcome in common] for sample in (ours, plain)]
    table = [[*row, sample.total() - sum(row)] for row, sample in zip(table, (ours, plain), strict=True)]
    assert stats.chi2_contingency(table).pvalue > RARE_EVENT


# --- plain samplers: the authors' loops, with the departures that the tasks name ----------------------------


def next_tokens(tokens: list[int]) -> list[int]:
    return [*tokens[1:], IGNORE]


def plain_recall(
    rng: np.random.Generator, training: bool, length: int, used: int, noise_vocab: int = 0, noise: float = 0.0
) -> tuple[list[int], list[int]]:
    pairs = length // 2
    spared = rng.integers(pairs - 1)
    values: dict[int, int] = {}
    inputs, targets = [], []
    for i in range(pairs - 1):
        if i != spared and rng.random() < noise:
            inputs += [int(token) for token in used + rng.integers(noise_vocab, size=2)]
            targets += [IGNORE, IGNORE]
            continue
        key = int(rng.integers(used // 2))
        targets += [values.get(key, IGNORE), IGNORE]
        if key not in values:
            values[key] = int(rng.integers(used // 2, used))
        inputs += [key, values[key]]
    last = int(rng.choice(list(values)))
    inputs += [last, values[last]]
    targets += [values[last], IGNORE]
    return inputs, next_tokens(inputs) if training else targets


def plain_fuzzy_recall(
    rng: np.random.Generator, training: bool, length: int, vocab_size: int
) -> tuple[list[int], list[int]]:
    pad = vocab_size - 1
    tokens = {"key": range(pad // 2), "value": range(pad // 2, pad)}
    motifs = {(kind, size): list(permutations(tokens[kind], size)) for kind in tokens for size in (1, 2, 3)}

    def motif(kind: str) -> tuple[int, ...]:
        size = 3 if kind == "key" and not training else int(rng.integers(1, 4))
        choices = motifs[kind, size]
        return choices[rng.integers(len(choices))]

    last_key, last_value = motif("key"), motif("value")
    last = len(last_key) + len(last_value)
    values: dict[tuple[int, ...], tuple[int, ...]] = {}
    place = rng.integers(length - last - 11)
    sequence: list[int] = []
    answers: list[int] = []
    while len(sequence) < length - last - 6:
        key = last_key if len(sequence) >= place and last_key not in values else motif("key")
        value = last_value if key == last_key else values.get(key) or motif("value")
        sequence += [*key, *value]
        answers += [IGNORE] * len(key) + (list(value) if key in values else [IGNORE] * len(value))
        values[key] = value
    assert values[last_key] == last_value
    sequence += [*last_key, *last_value]
    answers += [*[IGNORE] * len(last_key), *last_value]
    padding = length + 1 - len(sequence)
    sequence = [pad] * padding + sequence
    answers = [IGNORE] * padding + answers
    return sequence[:-1], (sequence if training else answers)[1:]


def plain_selective_copy(
    rng: np.random.Generator, training: bool, length: int, vocab_size: int, copies: int
) -> tuple[list[int], list[int]]:
    blank, blanks = vocab_size - 2, length - 2 * copies - 1
    data = rng.integers(blank, size=copies)
    spread = np.insert(data, rng.integers(copies, size=blanks), [blank] * blanks)
    inputs = [*spread.tolist(), vocab_size - 1, *[blank] * copies]
    return inputs, [IGNORE] * (length - copies) + data.tolist()


def plain_compression(
    rng: np.random.Generator, training: bool, length: int, vocab_size: int
) -> tuple[list[int], list[int]]:
    inputs = [*rng.integers(vocab_size - 1, size=length - 1).tolist(), vocab_size - 1]
    return inputs, list(inputs)


# --- laws ---------------------------------------------------------------------------------------------------

# So small that whole sequences, with their targets, can be counted.
COUNTED: dict[str, tuple[str, dict[str, Any], Plain]] = {
    "recall": (
        "mad_in_context_recall",
        {"length": 8, "vocab_size": 4},
        lambda rng, training: plain_recall(rng, training, 8, 4),
    ),
    "recall, an odd vocabulary": (
        "mad_in_context_recall",
        {"length": 4, "vocab_size": 7},
        lambda rng, training: plain_recall(rng, training, 4, 7),
    ),
    "noisy recall": (
        "mad_noisy_recall",
        {"length": 6, "vocab_size": 6, "noise_vocab": 2, "noise": 0.6},
        lambda rng, training: plain_recall(rng, training, 6, 4, 2, 0.6),
    ),
    "selective copy": (
        "mad_selective_copy",
        {"length": 11, "vocab_size": 4, "copies": 3},
        lambda rng, training: plain_selective_copy(rng, training, 11, 4, 3),
    ),
    "compression": (
        "mad_compression",
        {"length": 4, "vocab_size": 5},
        lambda rng, training: plain_compression(rng, training, 4, 5),
    ),
}


@pytest.mark.slow(keep="recall")
@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize(("name", "parameters", "plain"), COUNTED.values(), ids=COUNTED)
def test_sequences_are_as_frequent_as_a_plain_samplers(
    name: str, parameters: dict[str, Any], plain: Plain, split: str
) -> None:
    task = deltalab.get_task(name, **parameters, train_examples=None)
    rng = np.random.default_rng(0)
    theirs = [tuple(map(tuple, plain(rng, split == "train"))) for _ in range(4000)]
    assert_same_law(Counter(drawn(task, split, 12_000)), Counter(theirs))


def fuzzy_facts(example: Example, vocab_size: int) -> dict[str, Any]:
    """What a sequence of fuzzy recall consists of, read off its tokens one by one."""
    inputs, targets = example
    pad, half = vocab_size - 1, (vocab_size - 1) // 2
    text = [*inputs, targets[-1]]
    padding = next(i for i, token in enumerate(text) if token != pad)
    assert pad not in text[padding:]
    pairs: list[tuple[list[int], list[int]]] = []
    for token in text[padding:]:
        if token < half and (not pairs or pairs[-1][1]):
            pairs.append(([], []))
        pairs[-1][token >= half].append(token)
    assert all(len(set(part)) == len(part) in (1, 2, 3) for pair in pairs for part in pair)
    values: dict[tuple[int, ...], list[int]] = {}
    scored: list[int] = [IGNORE] * padding
    for key, value in pairs:
        known = tuple(key) in values
        assert values.setdefault(tuple(key), value) == value
        scored += [IGNORE] * len(key) + (value if known else [IGNORE] * len(value))
    last = tuple(pairs[-1][0])
    return {
        "padding": padding,
        "pairs": len(pairs),
        "first sizes": (len(pairs[0][0]), len(pairs[0][1])),
        "last pair": (last, tuple(pairs[-1][1])),
        "where the last key stood first": next(i for i, (key, _) in enumerate(pairs) if tuple(key) == last),
        "how often the last key": sum(tuple(key) == last for key, _ in pairs),
        "first pair": (tuple(pairs[0][0]), tuple(pairs[0][1])),
        "scored": tuple(scored[1:]),
        "text": tuple(text[1:]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("length", "vocab_size"), [(18, 7), (40, 8)])
def test_fuzzy_recall_is_as_a_plain_sampler_says(length: int, vocab_size: int, split: str) -> None:
    task = deltalab.get_task("mad_fuzzy_recall", length=length, vocab_size=vocab_size, train_examples=None)
    rng = np.random.default_rng(1)
    plain = [plain_fuzzy_recall(rng, split == "train", length, vocab_size) for _ in range(3000)]
    theirs = [fuzzy_facts((tuple(inputs), tuple(targets)), vocab_size) for inputs, targets in plain]
    batch = drawn(task, split, 8000)
    ours = [fuzzy_facts(example, vocab_size) for example in batch]
    for (_, targets), facts in zip(batch, ours, strict=True):
        assert targets == facts["text" if split == "train" else "scored"]
        assert facts["where the last key stood first"] < facts["pairs"] - 1
    for fact in ours[0]:
        if fact not in ("scored", "text"):
            assert_same_law(Counter(facts[fact] for facts in ours), Counter(facts[fact] for facts in theirs))
    scored = [Counter(sum(t != IGNORE for t in facts["scored"]) for facts in found) for found in (ours, theirs)]
    assert_same_law(*scored)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "used", "noise"), [("in_context", 64, (0, 0.0)), ("noisy", 16, (16, 0.2))])
@pytest.mark.parametrize("split", ["train", "test"])
def test_recall_of_the_papers_size(name: str, used: int, noise: tuple[int, float], split: str) -> None:
    task = deltalab.get_task(f"mad_{name}_recall", vocab_size=used + noise[0])
    ours, theirs = Counter[Any](), Counter[Any]()
    rng = np.random.default_rng(0)
    for inputs, targets in drawn(task, split, 1500):
        pairs = [inputs[i : i + 2] for i in range(0, 128, 2)]
        values: dict[int, int] = {}
        asked = []
        for key, value in pairs:
            if key < used:
                assert key < used // 2 <= value < used
                asked += [values.get(key, IGNORE), IGNORE]
                assert values.setdefault(key, value) == value
            else:
                assert value >= used
                asked += [IGNORE, IGNORE]
        assert targets == (tuple(next_tokens(list(inputs))) if split == "train" else tuple(asked))
        assert asked[126] == inputs[127]
        ours[sum(key >= used for key, _ in pairs), len(values)] += 1
        plain, _ = plain_recall(rng, True, 128, used, *noise)
        theirs[sum(key >= used for key in plain[::2]), len({key for key in plain[::2] if key < used})] += 1
    assert_same_law(ours, theirs)


def test_every_spared_pair_is_as_likely_however_much_noise_there_is() -> None:
    task = deltalab.get_task("mad_noisy_recall", length=10, noise=1 - 1e-9)
    keys = task.batch("test", 4000, 0, 0).inputs[:, ::2]
    assert (keys[:, -1] < 8).all()
    alone = (keys[:, :-1] < 16).int()
    assert (alone.sum(dim=1) == 1).all()
    assert stats.chisquare(alone.sum(dim=0)).pvalue > RARE_EVENT


def test_without_noise_noisy_recall_has_the_pairs_of_recall() -> None:
    noisy = deltalab.get_task("mad_noisy_recall", length=32, noise=0)
    assert noisy.batch("test", 200, 0, 0).inputs.max() < 16


def test_memorized_facts_are_one_to_one_and_the_same_everywhere() -> None:
    task = deltalab.get_task("mad_memorization")
    facts: dict[int, int] = {}
    keys: list[int] = []
    for split, seed, step in (("train", 0, 0), ("train", 5, 9), ("validation", 0, 1), ("test", 0, 0)):
        for inputs, targets in drawn(task, split, 256, seed, step):
            assert set(inputs[1::2]) == {255}
            assert set(targets[::2]) == {IGNORE}
            for key, value in zip(inputs[::2], targets[1::2], strict=True):
                assert facts.setdefault(key, value) == value
            keys += inputs[::2] if split == "test" else ()
    assert set(facts) == set(range(127))
    assert len(set(facts.values())) == 127
    assert set(facts.values()) < set(range(127, 255))
    assert stats.chisquare(np.bincount(keys, minlength=127)).pvalue > RARE_EVENT


def test_memorized_facts_are_no_pattern() -> None:
    task = deltalab.get_task("mad_memorization", vocab_size=8192, length=4096)
    inputs, targets = task.batch("test", 40, 0, 0).inputs, task.batch("test", 40, 0, 0).targets
    keys, values = inputs[:, ::2].flatten().numpy(), targets[:, 1::2].flatten().numpy()
    assert abs(stats.spearmanr(*np.unique(np.stack([keys, values]), axis=1)).statistic) < 0.06


def test_streams_are_pinned() -> None:
    """If this fails, data of recorded trials has changed: raise the task's version."""
    digest = sha256()
    for name in NAMES:
        for split in ("train", "test"):
            batch = deltalab.get_task(name).batch(split, 16, seed=1, step=2)
            digest.update(batch.inputs.numpy().astype("<i8").tobytes() + batch.targets.numpy().astype("<i8").tobytes())
    assert digest.hexdigest() == "5d3aee972a5baf8a62137fc56820fa5f37fb8fbfa34756513a9a75491671c243"


# --- a training set of a fixed size -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_training_sees_so_many_examples_and_no_more(name: str) -> None:
    example = BUILTIN[name].example
    task = deltalab.get_task(name, **example, train_examples=40)
    seen = [Counter(found for step in range(30) for found in drawn(task, "train", 50, seed, step)) for seed in (0, 1)]
    assert [len(found) for found in seen] == [40, 40]
    assert stats.chisquare(list(seen[0].values())).pvalue > RARE_EVENT
    assert not seen[0].keys() & seen[1].keys()
    held_out = {found for split in ("validation", "test") for found in drawn(task, split, 500)}
    assert len(held_out) == 1000
    pool = {inputs for found in seen for inputs, _ in found}
    assert not pool & {inputs for inputs, _ in held_out}
    endless = deltalab.get_task(name, **example, train_examples=None)
    assert len({found for step in range(4) for found in drawn(endless, "train", 50, 0, step)}) == 200


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_the_same_in_every_batch(name: str) -> None:
    task = deltalab.get_task(name)
    cpu = torch.device("cpu")
    rows = torch.tensor([3, 0, 11, 3, 10_000])
    some = examples(task.draw("train", 5, Random("a", cpu, rows)))
    assert examples(task.draw("train", 12, Random("a", cpu)))[3] == some[0] == some[3]
    for row, found in zip(rows, some, strict=True):
        assert examples(task.draw("train", 1, Random("a", cpu, row[None]))) == [found]


# --- metrics and refusals -----------------------------------------------------------------------------------


def test_accuracy_is_the_share_of_all_scored_tokens() -> None:
    task = deltalab.get_task("mad_noisy_recall", length=20, vocab_size=12, noise_vocab=4)
    batch = task.batch("test", 40, 0, 0)
    scored = (batch.targets != IGNORE).sum(dim=1)
    assert scored.min() < scored.max()
    logits = torch.randn(int(scored.sum()), 12, generator=torch.Generator().manual_seed(0))
    targets = [target for row in batch.targets.tolist() for target in row if target != IGNORE]
    right = [row.index(max(row)) == target for row, target in zip(logits.tolist(), targets, strict=True)]
    nats = [
        -math.log(math.exp(row[t]) / sum(map(math.exp, row))) for row, t in zip(logits.tolist(), targets, strict=True)
    ]
    measured = task.measure(batch, logits)
    assert {name: float(count) for name, (_, count) in measured.items()} == dict.fromkeys(measured, len(targets))
    assert float(measured["accuracy"][0]) == sum(right) > 0
    assert float(measured["loss"][0]) == pytest.approx(sum(nats), rel=1e-6)


CHANCES = [
    ("mad_in_context_recall", {}, 1 / 8),
    ("mad_in_context_recall", {"vocab_size": 5}, 1 / 3),
    ("mad_noisy_recall", {}, 1 / 8),
    ("mad_fuzzy_recall", {}, 1 / 8),
    ("mad_fuzzy_recall", {"vocab_size": 7}, 1 / 3),
    ("mad_selective_copy", {}, 1 / 14),
    ("mad_compression", {"length": 4, "vocab_size": 3}, (3 / 2 + 1) / 4),
    ("mad_memorization", {}, 1 / 127),
]


@pytest.mark.parametrize(("name", "parameters", "chance"), CHANCES)
def test_chance_is_one_over_the_tokens_that_can_be_answers(
    name: str, parameters: dict[str, Any], chance: float
) -> None:
    task = deltalab.get_task(name, **parameters)
    assert task.chance == pytest.approx(chance)
    answers = task.batch("test", 400, 0, 0).targets
    if name != "mad_compression":
        assert len(answers[answers != IGNORE].unique()) == round(1 / chance)


REFUSED = [
    ("in_context_recall", {"train_examples": 0}, "'train_examples' must be at least 1, not 0"),
    ("in_context_recall", {"train_examples": 1.5}, "'train_examples' must be an integer or null, not 1.5"),
    ("in_context_recall", {"length": 7}, "'length' must be even and at least 4, not 7"),
    ("in_context_recall", {"length": 2}, "'length' must be even and at least 4, not 2"),
    ("in_context_recall", {"vocab_size": 3}, "'vocab_size' must be at least 4, not 3"),
    ("noisy_recall", {"length": 5}, "'length' must be even and at least 4, not 5"),
    ("noisy_recall", {"noise_vocab": 0}, "'noise_vocab' must be at least 1, not 0"),
    ("noisy_recall", {"vocab_size": 19}, "'vocab_size' must be at least noise_vocab + 4 = 20, not 19"),
    ("noisy_recall", {"noise": 1}, "'noise' must be at least 0 and below 1, not 1.0"),
    ("noisy_recall", {"noise": -0.1}, "'noise' must be at least 0 and below 1, not -0.1"),
    ("fuzzy_recall", {"length": 17}, "'length' must be at least 18, not 17"),
    ("fuzzy_recall", {"vocab_size": 6}, "'vocab_size' must be at least 7, not 6"),
    ("selective_copy", {"copies": 0}, "'copies' must be at least 1, not 0"),
    ("selective_copy", {"length": 33}, "'length' must be at least 2 x copies + 2 = 34, not 33"),
    ("selective_copy", {"vocab_size": 3}, "'vocab_size' must be at least 4, not 3"),
    ("compression", {"length": 1}, "'length' must be at least 2, not 1"),
    ("compression", {"vocab_size": 2}, "'vocab_size' must be at least 3, not 2"),
    ("memorization", {"length": 3}, "'length' must be even and at least 2, not 3"),
    ("memorization", {"vocab_size": 3}, "'vocab_size' must be at least 4, not 3"),
]


@pytest.mark.parametrize(("name", "parameters", "message"), REFUSED)
def test_parameters_that_cannot_be_met_are_refused(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        deltalab.get_task(f"mad_{name}", **parameters)
    assert str(error.value) == f"task 'mad_{name}': parameter {message}"


LIMITS: list[tuple[str, dict[str, Any]]] = [
    ("in_context_recall", {"length": 4, "vocab_size": 4}),
    ("noisy_recall", {"length": 4, "vocab_size": 5, "noise_vocab": 1}),
    ("fuzzy_recall", {"length": 18, "vocab_size": 7}),
    ("selective_copy", {"length": 4, "vocab_size": 4, "copies": 1}),
    ("compression", {"length": 2, "vocab_size": 3}),
    ("memorization", {"length": 2, "vocab_size": 4}),
]


@pytest.mark.parametrize(("name", "parameters"), LIMITS)
def test_parameters_at_their_limits_draw(name: str, parameters: dict[str, Any]) -> None:
    task = deltalab.get_task(f"mad_{name}", **parameters, train_examples=1)
    assert len(set(drawn(task, "train", 20))) == 1
    for split in ("train", "test"):
        batch = task.batch(split, 500, 0, 0)
        assert batch.inputs.shape == batch.targets.shape == (500, task.length)
        assert 0 <= batch.inputs.min() <= batch.inputs.max() < task.vocab_size
        assert ((batch.targets != IGNORE).sum(dim=1) > 0).all()


# --- a sequence out of one hidden state ---------------------------------------------------------------------

COMPRESSION = deltalab.get_task("mad_compression", length=6, vocab_size=8)
LAST = ModelSpec(rule="deltanet", vocab_size=8, d_model=16, layers=1, heads=2, readout="last")
SPEC = TrainSpec(steps=4, batch_size=8, lr=1e-2, evaluations=2, eval_batches=1)


def plain_rebuild(rebuild: Rebuild, state: Tensor, length: int) -> Tensor:
    """[T, d] from one hidden state [d], position by position."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-5).sqrt() * weight

    weights = {name: value.detach() for name, value in rebuild.named_parameters()}
    half = len(state) // 2
    rows = []
    for t in range(length):
        angles = [t / 10000 ** (i / (half - 1)) for i in range(half)]
        position = [*map(math.sin, angles), *map(math.cos, angles)] + [0.0] * (len(state) % 2)
        x = state + torch.tensor(position, dtype=state.dtype)
        for norm, matrix in ((0, 1), (3, 4)):
            x = weights[f"mlp.{matrix}.weight"] @ normed(x, weights[f"mlp.{norm}.weight"])
            x = x * (1 + torch.erf(x / 2**0.5)) / 2
        rows.append(normed(x, weights["norm.weight"]))
    return torch.stack(rows)


@pytest.mark.parametrize("d_model", [8, 11])
def test_every_position_is_rebuilt_from_the_last_state_alone(d_model: int) -> None:
    model = build_model(
        {"rule": "deltanet", "vocab_size": 8, "d_model": d_model, "heads": 1, "readout": "last"}
    ).double()
    tokens = COMPRESSION.batch("test", 3, 0, 0).inputs
    with torch.no_grad():
        for i, weight in enumerate(model.rebuild.parameters()):
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i), dtype=weight.dtype)
        hidden, _ = model.hidden(tokens)
        expected = model.logits(torch.stack([plain_rebuild(model.rebuild, row[-1], 6) for row in hidden]))
        where = torch.rand(3, 6, generator=torch.Generator().manual_seed(0)) < 0.5
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)  # positions are of fp32
        torch.testing.assert_close(model(tokens, where), model(tokens)[where])


def test_a_model_that_rebuilds_is_trained_kept_and_loaded() -> None:
    result = train(COMPRESSION, LAST, SPEC, [1], test=True)
    weights = result.runs[0].weights
    started = build_model(LAST, seed=1).state_dict()
    moved = {name for name in weights if name.startswith("rebuild.") and not torch.equal(weights[name], started[name])}
    assert moved == {name for name in started if name.startswith("rebuild.")}
    model = Model(LAST)
    model.load_state_dict(weights)
    batch = COMPRESSION.batch("test", 8, 0, 0)
    total, count = COMPRESSION.measure(batch, model(batch.inputs, batch.targets != IGNORE))["accuracy"]
    assert float(total / count) == pytest.approx(result.runs[0].final("test", "accuracy"))
    assert sum(p.numel() for p in model.parameters()) == result.parameters


def test_a_model_without_it_starts_as_it_did() -> None:
    plain, last = (build_model({**LAST.__dict__, "readout": readout}).state_dict() for readout in ("position", "last"))
    assert {name for name in last if name not in plain} == {name for name in last if name.startswith("rebuild.")}
    assert all(torch.equal(plain[name], last[name]) for name in plain)


def test_what_does_not_fit_the_readout_is_refused(tmp_path: Path) -> None:
    plain = ModelSpec(rule="deltanet", vocab_size=8, d_model=16, layers=1, heads=2)
    recall = deltalab.get_task("mad_in_context_recall", vocab_size=8)
    with pytest.raises(InputError, match=r"model.readout 'position' is not task 'mad_compression''s 'last'"):
        LockStep(COMPRESSION, [(plain, SPEC)], [1])
    with pytest.raises(InputError, match=r"model.readout 'last' is not task 'mad_in_context_recall''s 'position'"):
        LockStep(recall, [(LAST, SPEC)], [1])
    with pytest.raises(InputError, match="unknown readout 'lst'; did you mean 'last'"):
        build_model({**LAST.__dict__, "readout": "lst"})
    with pytest.raises(InputError, match="cannot go token by token"):
        build_model(LAST).step(torch.zeros(1, 1, dtype=torch.long))
    pytest.importorskip("safetensors")
    with pytest.raises(InputError, match="readout 'last' predicts no next token"):
        export_hf(LAST, build_model(LAST).state_dict(), tmp_path / "out", provenance={})
    assert not (tmp_path / "out").exists()


# --- the study ----------------------------------------------------------------------------------------------


def planned(profile: str | None = None) -> Plan:
    return make_plan(load_study(STUDIES / "mad.yaml", profile=profile), profile=profile)


def test_a_study_takes_the_readout_from_the_task(tmp_path: Path) -> None:
    plan = planned()
    readouts = {task: arm.config["model"]["readout"] for arm in plan.arms for task in [arm.task]}
    assert {task for task, readout in readouts.items() if readout == "last"} == {"mad_compression"}
    text = "name: s\ntask: {mad_compression: {}}\nseeds: 1\nbase: {rule: gla, model: {readout: position}, train: {}}\n"
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(InputError, match=r"model.readout is set by task 'mad_compression': leave it out"):
        make_plan(load_study(tmp_path / "s.yaml"))


def test_the_study_asks_all_six_of_every_rule() -> None:
    plan = planned()
    assert sorted(plan.tasks) == sorted(NAMES)
    assert len({arm.config["rule"]["name"] for arm in plan.arms}) == len(plan.names)


def test_the_papers_profile_is_the_papers_grid() -> None:
    plan = planned("paper")
    grid: dict[str, set[tuple[str, Any]]] = {name: set() for name in NAMES}
    for task in plan.tasks.values():
        usual = deltalab.get_task(task.name)
        changed = [(key, value) for key, value in task.__dict__.items() if value != getattr(usual, key)]
        assert len(changed) <= 1, "varied one at a time"
        grid[task.name] |= set(changed)
    fewer = {("train_examples", n) for n in (6400, 3200, 1600, 800)}
    wider = {("vocab_size", v) for v in (32, 64, 128)}
    longer = {("length", n) for n in (256, 512, 1024)}
    assert grid == {
        "mad_in_context_recall": fewer | wider | longer,
        "mad_fuzzy_recall": fewer | wider | longer,
        "mad_noisy_recall": fewer
        | {("vocab_size", v) for v in (48, 80, 144)}
        | longer
        | {("noise", share) for share in (0.4, 0.6, 0.8)},
        "mad_selective_copy": fewer
        | wider
        | {("length", n) for n in (512, 1024)}
        | {("copies", n) for n in (32, 64, 96)},
        "mad_compression": fewer | wider | {("length", n) for n in (64, 128, 256)},
        "mad_memorization": {("vocab_size", v) for v in (512, 1024, 2048, 4096, 8192)},
    }
    assert len(plan.tasks) == 6 + sum(map(len, grid.values()))
    for arm in plan.arms:
        settings, task = arm.config["train"], plan.tasks[arm.task]
        assert settings["steps"] * settings["batch_size"] == pytest.approx(200 * task.train_examples, rel=1e-3)
        assert settings["eval_batches"] * settings["batch_size"] == 1280
    assert plan.budget is not None
    assert plan.budget.trials == plan.budget.whole == 6
