"""Training batches of many runs at once.

The device draws the batches, and the host only hashes addresses, many steps ahead. If the device cannot hold the data,
the host draws the batches.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.tasks.randomness import Together, hashed
from deltalab.tasks.task import Batch, Task


class TrainingBatches:
    """The training batches of n runs, drawn on their device.

    `load` prepares steps, and `draw` then draws one of them. `draw` is a function of tensors that stay where they are,
    so that a CUDA graph can hold it. Runs with the same seed get the same batch. If the task draws each row by itself,
    which is tried with two seeds at step 0, all runs are drawn at once. Otherwise each seed is drawn alone.

    Args:
        task: The task.
        size: The number of examples in a batch of one run.
        seeds: The seed of each run. Several runs may have one seed.
        device: The device of the batches.
        most: The largest number of steps that `load` prepares.

    Raises:
        InputError: The batches of the task depend on anything but the numbers of `random`, such as the device, or the
            task draws other streams at later steps than at the first.

    Examples:
        >>> from deltalab.tasks import MQAR
        >>> task = MQAR(length=8, pairs=1, vocab_size=8)
        >>> feed = TrainingBatches(task, 2, seeds=[5, 7, 5], device=torch.device("cpu"), most=10)
        >>> feed.load(20, 30)
        >>> inputs, targets = feed.draw(torch.tensor(3))
        >>> batches = [task.batch("train", 2, seed, step=23) for seed in (5, 7, 5)]
        >>> [torch.equal(rows, batch.inputs) for rows, batch in zip(inputs, batches)]
        [True, True, True]
    """

    def __init__(self, task: Task, size: int, seeds: Sequence[int], device: torch.device, most: int) -> None:
        self.task, self.size, self.device = task, size, device
        self.seeds = list(dict.fromkeys(seeds))
        self._of_run = torch.tensor([self.seeds.index(seed) for seed in seeds], device=device)
        self._groups, probe_seeds = [self.seeds], self.seeds[:2]
        if len(probe_seeds) > 1 and not self._agree([probe_seeds]):
            self._groups = [[seed] for seed in self.seeds]
        if len(self._groups) == len(self.seeds) and not self._agree([[seed] for seed in probe_seeds]):
            raise InputError(
                f"task '{task.name}': its batches depend on more than the numbers of `random`: they are not those that "
                "the CPU draws; "
                f"`deltalab task check {task.name}` may say more"
            )
        self._pools = [_Starts(self._addresses("pool", group), device) for group in self._groups]
        probes = [_Starts(self._addresses(0, group), device) for group in self._groups]
        self._drawn(probes, self._pools)
        self._streams = list(probes[0])
        self._table = torch.zeros(most, len(self.seeds), len(self._streams), dtype=torch.int64, device=device)

    def load(self, begin: int, end: int) -> None:
        """Prepares the steps from `begin` up to, but not including, `end`."""
        starts = [
            [[hashed(address, stream) for stream in self._streams] for address in self._addresses(step, self.seeds)]
            for step in range(begin, end)
        ]
        ready = torch.tensor(starts, dtype=torch.int64).view(end - begin, *self._table.shape[1:])
        self._table[: end - begin].copy_(ready)

    def draw(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Draws the inputs and targets of a step, [n, B, T] each; inputs [n, B, T, D] if they are images.

        Args:
            row: The number of the step among the loaded steps, 0-dim, on the device.
        """
        parts = self._table.index_select(0, row.view(1))[0].split([len(group) for group in self._groups])
        starts = [_Loaded(zip(self._streams, part.unbind(1), strict=True)) for part in parts]
        batch = self._drawn(starts, self._pools)
        inputs, targets = (x.unflatten(0, (len(self.seeds), self.size)) for x in (batch.inputs, batch.targets))
        if len(self._of_run) == len(self.seeds):
            return inputs, targets
        return inputs[self._of_run], targets[self._of_run]

    def _drawn(self, starts: Sequence[Mapping[str, Tensor]], pools: Sequence[Mapping[str, Tensor]]) -> Batch:
        seeds = len(self.seeds) // len(self._groups)
        batches = [self._draw(now, pool, seeds) for now, pool in zip(starts, pools, strict=True)]
        if len(batches) == 1:
            return batches[0]
        return Batch(*(torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets")))

    def _agree(self, groups: Sequence[Sequence[int]]) -> bool:
        """Returns whether draws for groups of seeds at step 0 give the batches that the task draws on the CPU."""
        for group in groups:
            now, pool = (_Starts(self._addresses(at, group), self.device) for at in (0, "pool"))
            expected = [self.task.batch("train", self.size, seed, 0) for seed in group]
            try:
                drawn = self._draw(now, pool, len(group))
            except RuntimeError:
                if len(group) == 1:
                    raise
                return False  # the task does not draw row by row
            for name in ("inputs", "targets"):
                if not torch.equal(getattr(drawn, name).cpu(), torch.cat([getattr(batch, name) for batch in expected])):
                    return False
        return True

    def _draw(self, now: Mapping[str, Tensor], pool: Mapping[str, Tensor], seeds: int) -> Batch:
        return self.task.drawn(
            "train", seeds * self.size, *(Together("", self.device, starts=starts) for starts in (now, pool))
        )

    def _addresses(self, at: int | str, seeds: Sequence[int]) -> list[str]:
        return [self.task.address("train", seed, at) for seed in seeds]


class SentBatches:
    """The training batches of n runs, drawn by the CPU and sent to a device that cannot hold the task's data.

    The arguments are those of `TrainingBatches`. `load` draws all batches, and `draw` picks one of them, so that a CUDA
    graph can hold `draw`.
    """

    def __init__(self, task: Task, size: int, seeds: Sequence[int], device: torch.device, most: int) -> None:
        self.task = task
        self._here = TrainingBatches(task, size, seeds, torch.device("cpu"), most)
        form = (most, len(seeds), size, task.length)
        # int32 holds any vocabulary in half the memory of int64.
        self._targets = torch.empty(form, dtype=torch.int32, device=device)
        self._inputs = torch.empty_like(self._targets)
        if task.patches is not None:
            self._inputs = torch.empty(*form, task.patches[2], device=device)

    def load(self, begin: int, end: int) -> None:
        """Draws and sends the steps from `begin` up to, but not including, `end`."""
        self._here.load(begin, end)
        drawn = [self._here.draw(torch.tensor(row)) for row in range(end - begin)]
        for sent, parts in zip((self._inputs, self._targets), zip(*drawn, strict=True), strict=True):
            sent[: end - begin].copy_(torch.stack([part.to(sent.dtype) for part in parts]))

    def draw(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets of a step, as `TrainingBatches.draw` does."""
        inputs, targets = (sent.index_select(0, row.view(1))[0] for sent in (self._inputs, self._targets))
        return inputs if inputs.is_floating_point() else inputs.long(), targets.long()


class _Starts(dict[str, Tensor]):
    """A mapping from each stream to its starts at n addresses, int64 [n], which are hashed when first asked for."""

    def __init__(self, addresses: Sequence[str], device: torch.device) -> None:
        super().__init__()
        self.addresses, self.device = addresses, device

    def __missing__(self, stream: str) -> Tensor:
        self[stream] = torch.tensor([hashed(address, stream) for address in self.addresses], device=self.device)
        return self[stream]


class _Loaded(dict[str, Tensor]):
    """The starts of the streams that `load` prepared."""

    def __missing__(self, stream: str) -> Tensor:
        raise InputError(
            f"a task draws '{stream}' at some steps and not at the first: all steps ask for the same streams"
        )
