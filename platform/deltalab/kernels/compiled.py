"""Launches a kernel that is compiled already in a few microseconds.

Triton binds all arguments of a launch anew, 60 to 150 us for kernels that take as many as ours. Here the first launch
for arguments of some kind goes through Triton, which compiles the kernel or finds it. Later ones call Triton's launcher
of that kernel themselves. Triton compiles a kernel for the types of its arguments, whether pointers are multiples of 16
bytes, the shapes of tiles, and the values of all else: these make the key. It works with Triton 3.4 to 3.7, of which
3.6 was tried on a GPU.
"""

import copy
import functools
import importlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

MOST = 1024
"""How many kernels, and how many places of a tile in memory, are kept. With more, all are forgotten."""


class Tile:
    """A contiguous tensor as a matrix [rows, columns], which a kernel takes in tiles of `block`.

    Triton takes a `TensorDescriptor` for it, and turns it into what the hardware reads: 10 us for each argument.
    place: address, rows and columns.
    """

    __slots__ = ("base", "block", "place")

    def __init__(self, base: Tensor, columns: int, block: tuple[int, int]) -> None:
        at = base.data_ptr()
        if at % 16:
            # A view of something else: a descriptor must begin at a multiple of 16 bytes.
            base = base.clone()
            at = base.data_ptr()
        self.base, self.block, self.place = base, block, (at, base.numel() // columns, columns)

    def descriptor(self) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.base.view(self.place[1:]), list(self.block))


class Compiled:
    """A kernel that Triton compiled, for operands of one kind beside constant sizes.

    operands: the first ones of their kind, by name.
    """

    def __init__(self, made: Any, names: Sequence[str], operands: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
        self.function, self.metadata, self.run = made.function, made.packed_metadata, made.run
        kinds: list[Any] = []
        if any(type(x) is Tile for x in operands.values()):
            self.make = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
            kinds = list(made.metadata.tensordesc_meta or [])
            self.run = copy.copy(self.run)
            self.run.launch = _inner(self.run.launch)
        self.values: list[Any] = []
        self.places: dict[str, Any] = {}
        for name in names:
            x = operands[name] if name in operands else sizes[name]
            place: Any = len(self.values)
            if type(x) is Tile:
                kind = kinds.pop(0) if kinds else None
                parts = self.make(x.descriptor(), kind)
                place = Part(slice(place, place + len(parts)), kind, {})
                self.values += [None] * len(parts)
            else:
                self.values.append(None if name in operands else x)
            self.places[name] = place
        self.order = [self.places[name] for name in operands]

    def __call__(self, grid: tuple[int, int, int], stream: int, operands: Iterable[Any]) -> None:
        values = self.values.copy()
        for place, x in zip(self.order, operands, strict=True):
            if type(x) is Tile:
                at, kind, known = place
                found = known.get(x.place)
                if found is None:
                    found = self.make(x.descriptor(), kind)
                    if kind is not None:  # Else it holds the tensor.
                        if len(known) >= MOST:
                            known.clear()
                        known[x.place] = found
                values[at] = found
            else:
                values[place] = x
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *values)


class Part(NamedTuple):
    """Where the parts of a tile's descriptor lie among the arguments, and those known by their place in memory.

    kind: what Triton's compiler says of the descriptor; None where the GPU has none, so that the parts hold a pointer.
    The parts are numbers otherwise, and keep no tensor.
    """

    at: slice
    kind: Any
    known: dict[Any, list[Any]]


def _inner(launch: Any) -> Any:
    """The launcher that takes descriptors in parts, from the one that makes the parts at each launch."""
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    return cells["launcher"].cell_contents


class Launcher:
    """Launches a kernel with constant sizes and resources.

    sizes: whole numbers, types and other constants by name. resources: Triton's options: warps, stages, registers.
    """

    def __init__(self, kernel: Any, sizes: Mapping[str, Any], resources: Mapping[str, int]) -> None:
        self.kernel, self.sizes, self.resources = kernel, sizes, resources
        self.compiled: dict[Any, Compiled | None] = {}

    def __call__(self, grid: tuple[int, ...], operands: Mapping[str, Any]) -> None:
        """kernel[grid](**operands, **sizes, **resources), where a `Tile` stands for a descriptor.

        operands: tensors, tiles, numbers, constants, None, or tuples of these; always in the same order.
        """
        if INTERPRETED or _hooks():
            self._by_triton(grid, operands)
            return
        device = driver.active.get_current_device()
        key = (
            device,
            *[
                None if x is None
                else (x.base.dtype, x.block) if type(x) is Tile
                else (x.dtype, x.data_ptr() % 16) if type(x) is Tensor
                else _kind(x)
                for x in operands.values()
            ],
        )  # fmt: skip
        found = self.compiled.get(key)
        if found is not None:
            found((*grid, 1, 1)[:3], driver.active.get_current_stream(device), operands.values())  # type: ignore[arg-type]
            return
        with _one_at_a_time(f"{self.kernel} {key[1:]} {[*map(_kind, self.sizes.values())]}"):
            made = self._by_triton(grid, operands)
        if key not in self.compiled:
            if len(self.compiled) >= MOST:
                self.compiled.clear()
            self.compiled[key] = self._known(made, operands)

    def _by_triton(self, grid: tuple[int, ...], operands: Mapping[str, Any]) -> Any:
        given = {name: x.descriptor() if type(x) is Tile else x for name, x in operands.items()}
        return self.kernel[grid](**given, **self.sizes, **self.resources)

    def _known(self, made: Any, operands: Mapping[str, Any]) -> Compiled | None:
        """None where this Triton launches in a way that `Compiled` does not know."""
        try:
            return Compiled(made, self.kernel.arg_names, operands, self.sizes)
        except (AttributeError, ImportError, KeyError, TypeError):
            return None


def launch(
    kernel: Any, grid: tuple[int, ...], operands: Mapping[str, Any], sizes: Mapping[str, Any], **resources: int
) -> None:
    """A `Launcher`'s call. Launchers are remembered by their sizes, which must be hashable, and resources."""
    _launcher(kernel, tuple(operands), tuple(sizes.items()), tuple(resources.items()))(grid, operands)


@functools.lru_cache(maxsize=MOST)
def _launcher(kernel: Any, operands: tuple[str, ...], sizes: Any, resources: Any) -> Launcher:
    return Launcher(kernel, dict(sizes), dict(resources))


@contextmanager
def _one_at_a_time(kernel: str) -> Iterator[None]:
    """Has other processes of this machine wait that compile the same kernel: they find it in Triton's cache afterwards.

    kernel: what tells it apart. Its lock is a byte of a file in Triton's cache; the system releases it where a process
    ends. Without such a file, or on a system without such locks, each process compiles by itself.
    """
    try:
        import fcntl

        os.makedirs(knobs.cache.dir, exist_ok=True)
        file = os.open(os.path.join(knobs.cache.dir, "deltalab.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError):
        yield
        return
    try:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, zlib.crc32(kernel.encode()))
        yield
    finally:
        os.close(file)


INTERPRETED = knobs.runtime.interpret


def _hooks() -> Any:
    """What a profiler has Triton call at each launch, if anything."""
    hook = knobs.runtime.launch_enter_hook
    return getattr(hook, "calls", hook)


def _kind(x: Any) -> Any:
    """What Triton compiles a kernel for: a pointer's dtype and alignment, the type of a float, else the value."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    if type(x) is float:
        return float
    return tuple(map(_kind, x)) if type(x) is tuple else x
