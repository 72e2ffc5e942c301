"""Training batches of many runs at once. The device draws them, and the host only hashes addresses, many steps ahead;
or the host draws them, where the device cannot hold the data."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.tasks.randomness import Together, hashed
from deltalab.tasks.task import Batch, Task


class TrainingBatches:
    """The training batches of n runs, one run for each of `seeds`, in which a seed may be repeated.

    `load` prepares at most `most` steps; `draw` then draws one of them. `draw` is a function of tensors that stay where
    they are, so that a CUDA graph can hold it. Runs with the same seed get the same batch. All runs are drawn at once
    if the task draws each row by itself, which two seeds are tried for at step 0; otherwise each seed is drawn alone.

    Raises `InputError` for a task whose batches depend on anything but the numbers of `random`, such as the device, or
    that draws other streams at later steps than at the first.

    >>> from deltalab.tasks import MQAR
    >>> task = MQAR(length=8, pairs=1, vocab_size=8)
    >>> feed = TrainingBatches(task, 2, seeds=[5, 7, 5], device=torch.device("cpu"), most=10)
    >>> feed.load(20, 30)
    >>> inputs, targets = feed.draw(torch.tensor(3))
    >>> [bool((inputs[i] == task.batch("train", 2, seed, step=23).inputs).all()) for i, seed in enumerate([5, 7, 5])]
    [True, True, True]
    """

    def __init__(self, task: Task, size: int, seeds: Sequence[int], device: torch.device, most: int) -> None:
        self.task, self.size, self.device = task, size, device
        self.seeds = list(dict.fromkeys(seeds))
        self._of_run = torch.tensor([self.seeds.index(seed) for seed in seeds], device=device)
        self._groups, some = [self.seeds], self.seeds[:2]
        if len(some) > 1 and not self._agree([some]):
            self._groups = [[seed] for seed in self.seeds]
        if len(self._groups) == len(self.seeds) and not self._agree([[seed] for seed in some]):
            raise InputError(
                f"task '{task.name}': its batches depend on more than the numbers of `random`: they are not those that "
                "the CPU draws; "
                f"`platform task check {task.name}` may say more"
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
        """Inputs and targets, [n, B, T] each. row: 0-dim, on the device, counts steps from the first one loaded."""
        parts = self._table.index_select(0, row.view(1))[0].split([len(group) for group in self._groups])
        starts = [_Loaded(zip(self._streams, part.unbind(1), strict=True)) for part in parts]
        batch = self._drawn(starts, self._pools)
        inputs, targets = (x.view(len(self.seeds), self.size, -1) for x in (batch.inputs, batch.targets))
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
        """Whether draws for groups of seeds give, at step 0, the batches that the task draws on the CPU."""
        for group in groups:
            now, pool = (_Starts(self._addresses(at, group), self.device) for at in (0, "pool"))
            wanted = [self.task.batch("train", self.size, seed, 0) for seed in group]
            try:
                found = self._draw(now, pool, len(group))
            except RuntimeError:
                if len(group) == 1:
                    raise
                return False  # the task does not draw row by row
            for name in ("inputs", "targets"):
                if not torch.equal(getattr(found, name).cpu(), torch.cat([getattr(batch, name) for batch in wanted])):
                    return False
        return True

    def _draw(self, now: Mapping[str, Tensor], pool: Mapping[str, Tensor], seeds: int) -> Batch:
        return self.task.drawn(
            "train", seeds * self.size, *(Together("", self.device, starts=starts) for starts in (now, pool))
        )

    def _addresses(self, at: int | str, seeds: Sequence[int]) -> list[str]:
        return [self.task.address("train", seed, at) for seed in seeds]


class SentBatches:
    """As `TrainingBatches`, drawn by the CPU and sent: for a device that cannot hold the task's data.

    `load` draws all the batches that `draw` then picks from, so that a CUDA graph can hold `draw` here too.
    """

    def __init__(self, task: Task, size: int, seeds: Sequence[int], device: torch.device, most: int) -> None:
        self.task = task
        self._here = TrainingBatches(task, size, seeds, torch.device("cpu"), most)
        # int32 holds any vocabulary, in half the memory of int64.
        self._sent = torch.empty(most, 2, len(seeds), size, task.length, dtype=torch.int32, device=device)

    def load(self, begin: int, end: int) -> None:
        self._here.load(begin, end)
        drawn = [torch.stack(self._here.draw(torch.tensor(row))).int() for row in range(end - begin)]
        self._sent[: end - begin].copy_(torch.stack(drawn))

    def draw(self, row: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self._sent.index_select(0, row.view(1))[0].long()
        return inputs, targets


class _Starts(dict[str, Tensor]):
    """Where each stream begins at each of n addresses, int64 [n]; hashed when a stream is first asked for."""

    def __init__(self, addresses: Sequence[str], device: torch.device) -> None:
        super().__init__()
        self.addresses, self.device = addresses, device

    def __missing__(self, stream: str) -> Tensor:
        self[stream] = torch.tensor([hashed(address, stream) for address in self.addresses], device=self.device)
        return self[stream]


class _Loaded(dict[str, Tensor]):
    """As `_Starts`, for the streams that were prepared."""

    def __missing__(self, stream: str) -> Tensor:
        raise InputError(
            f"a task draws '{stream}' at some steps and not at the first: all steps ask for the same streams"
        )
