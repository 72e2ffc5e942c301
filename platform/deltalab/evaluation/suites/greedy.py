"""Continues prompts by greedy decoding."""

import time
from collections.abc import Sequence

import torch

from deltalab import progress
from deltalab.evaluation.model_folder import ModelFolder

TOKENS_AT_ONCE = 2**16
"""The most tokens of the prompts in a batch, unless a single prompt has more."""

EVERY_SECONDS = 30
"""Seconds between two lines of progress."""


class Progress:
    """Says on stderr from time to time how much is done.

    Args:
        label: Names what is counted.
        total: The number when all is done.
    """

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self._said = label, total, time.monotonic()

    def __call__(self, done: int) -> None:
        """Says the number, if the last line is `EVERY_SECONDS` old."""
        if time.monotonic() - self._said > EVERY_SECONDS:
            self._said = time.monotonic()
            progress.advance(f"{self.label}: {done:,} of {self.total:,}", done=done, total=self.total)


def continuations(
    folder: ModelFolder,
    prompts: Sequence[str],
    tokens: int,
    *,
    label: str,
    stop: str = "",
    batch_size: int | None = None,
) -> list[str]:
    """Returns what a model goes on to write after each prompt.

    Prompts of similar length share a batch, padded on the left.

    Args:
        folder: The folder of the model.
        prompts: The prompts. They get the special tokens that the tokenizer puts before a text.
        tokens: The most tokens of a continuation.
        label: Names the work in lines of progress on stderr.
        stop: A continuation ends before this text; empty if it ends with its tokens alone.
        batch_size: The most prompts of a batch; None for 8 on a GPU and 1 on a CPU.
    """
    encoded = [folder.tokenizer(prompt)["input_ids"] for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: -len(encoded[i]))
    most = batch_size or (8 if folder.device.type == "cuda" else 1)
    written = [""] * len(prompts)
    done, progress = 0, Progress(f"{label}: answers", len(order))
    while done < len(order):
        longest = len(encoded[order[done]])
        batch = order[done : done + max(1, min(most, TOKENS_AT_ONCE // longest))]
        for i, text in zip(batch, _continued(folder, [encoded[i] for i in batch], tokens, stop), strict=True):
            written[i] = text
        done += len(batch)
        progress(done)
    return written


def _continued(folder: ModelFolder, prompts: Sequence[list[int]], tokens: int, stop: str) -> list[str]:
    """What the model writes after prompts of one batch, the longest of which comes first."""
    width = len(prompts[0])
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1

    def texts(rows: torch.Tensor) -> list[str]:
        return [folder.decode(row) for row in rows[:, width:].tolist()]

    def stopped(rows: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.tensor([stop in text for text in texts(rows)], device=rows.device)

    pad = folder.tokenizer.pad_token_id
    with torch.no_grad(), folder.positions(width + tokens, option="--lengths"):
        rows = folder.model.generate(
            ids.to(folder.device),
            attention_mask=mask.to(folder.device),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=pad if pad is not None else folder.tokenizer.eos_token_id or 0,
            stopping_criteria=[stopped] if stop else None,
        )
    return [text.split(stop)[0] if stop else text for text in texts(rows)]
