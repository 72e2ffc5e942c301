"""Measures the loss on packed data, by length and by position."""

import math

import torch
from torch.nn import functional

from deltalab.data.token_shards import Split
from deltalab.errors import InputError
from deltalab.evaluation.items import Items, item_id, of_items
from deltalab.evaluation.model_folder import ModelFolder
from deltalab.evaluation.results import Result

TIMES = (1, 2, 4)
"""The lengths that are measured, in multiples of the length of a training sequence."""

TOKENS_AT_ONCE = 2**14
"""The number of tokens in a batch."""


def loss(folder: ModelFolder, split: Split, task: str, length: int, examples: int, tokenizer: str = "") -> list[Result]:
    """Measures the mean loss on packed data by length and, on the longest rows, by position.

    The lengths are 1, 2 and 4 times that of the training, without those that the split is too short for. The ranges of
    positions double. Rows are spread evenly over the split. For each length, all rows together have as many tokens as
    `examples` rows of the shortest length. Only end-of-document tokens separate the documents of a row.

    Args:
        folder: The folder of the model.
        split: The split of packed data.
        task: The name of the task in the results.
        length: Tokens of a training sequence.
        examples: Rows of the shortest length.
        tokenizer: The hash of the data's tokenizer. Rows of other tokenizers are other items.

    Returns:
        For each length the loss in nats a token and in bits a byte; for each range of positions the loss in nats. The
        items are the rows.

    Raises:
        InputError: If the split is too short for a single row of the training's length.
    """
    if not split.rows(length):
        raise InputError(f"task '{task}': {too_short(split, length)}")
    results: list[Result] = []
    bits = split.tokens / (math.log(2) * split.bytes)
    by_place, ids = torch.zeros(0, 0), list[str]()
    for size in sizes(split, length):
        available = split.rows(size)
        rows = min(available, max(1, examples * length // size))
        parts, ids = [], []
        at_once = max(1, TOKENS_AT_ONCE // size)
        indices = [available * i // rows for i in range(rows)]
        for begin in range(0, rows, at_once):
            tokens = torch.stack([torch.from_numpy(split.row(i, size)[0]) for i in indices[begin : begin + at_once]])
            targets = tokens[:, 1:].to(folder.device)
            nats = functional.cross_entropy(
                folder.logits(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="none"
            )
            parts.append(nats.view(targets.shape).double().cpu())
            ids += [item_id(tokenizer, row.numpy().tobytes()) for row in tokens]
        by_place = torch.cat(parts)
        means = by_place.mean(1)
        results.append(of_items(folder.step, task, f"loss@{size}", Items.mean(ids, means.tolist())))
        in_bits = Items.mean(ids, (means * bits).tolist())
        results.append(of_items(folder.step, task, f"bits_per_byte@{size}", in_bits))
    for begin, end in ranges(length, by_place.shape[1]):
        of_range = Items.mean(ids, by_place[:, begin:end].mean(1).tolist())
        results.append(of_items(folder.step, task, f"loss_at_{begin}_to_{end}", of_range))
    return results


def metric_names(split: Split, length: int) -> list[str]:
    """Returns the names of the metrics that `loss` measures on a split, in the order of its results by length."""
    measured = sizes(split, length)
    by_length = [f"{metric}@{size}" for size in measured for metric in ("loss", "bits_per_byte")]
    return by_length + [f"loss_at_{begin}_to_{end}" for begin, end in ranges(length, max(measured, default=0))]


def sizes(split: Split, length: int) -> list[int]:
    """Returns the lengths of rows that are measured: those that the split has rows of."""
    return [times * length for times in TIMES if split.rows(times * length)]


def ranges(length: int, longest: int) -> list[tuple[int, int]]:
    """Returns the ranges of positions, each with its begin and its end, in rows of the longest length.

    >>> ranges(64, 128)
    [(0, 16), (16, 32), (32, 64), (64, 128)]
    """
    cuts = [cut for cut in (length // 4, length // 2, *(times * length for times in TIMES)) if cut <= longest]
    ends = [*dict.fromkeys(filter(None, cuts))]
    return [*zip([0, *ends], ends, strict=False)]


def too_short(split: Split, length: int) -> str:
    """Returns the reason that a split has no row of a length."""
    return f"the split has {split.tokens} tokens, and a row takes {length + 1}: give --length, or another --split"
