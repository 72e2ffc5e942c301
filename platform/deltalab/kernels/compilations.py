"""Remembers the kernels that Triton compiled, and launches them in a few microseconds.

Triton binds all arguments of a launch anew, which takes 60 to 150 us for kernels with as many arguments as ours. Here
only the first launch for arguments of a kind goes through Triton, which compiles the kernel or finds it in its cache.
Later launches call Triton's launcher of the compiled kernel directly. Triton compiles a kernel for the types of its
arguments, for whether pointers are multiples of 16 bytes, for the shapes of tiles, and for the values of all other
arguments, so these make the key of a compilation. The module works with Triton 3.4 to 3.7, of which 3.6 was tried on a
GPU.
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
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

MOST = 1024
"""How many kernels are remembered, and how many places of a tile in memory. When there are more, all are forgotten."""


class Tile:
    """A contiguous tensor as a matrix [rows, columns], which a kernel takes in tiles of `block`.

    Triton takes a `TensorDescriptor` for a tile and turns it into what the hardware reads, which takes 10 us for each
    argument.

    Attributes:
        base: The tensor.
        block: Rows and columns of a tile.
        place: Address, rows and columns of the matrix.
    """

    __slots__ = ("base", "block", "place")

    def __init__(self, base: Tensor, columns: int, block: tuple[int, int]) -> None:
        address = base.data_ptr()
        if address % 16:
            # A view of something else: a descriptor must begin at a multiple of 16 bytes.
            base = base.clone()
            address = base.data_ptr()
        self.base, self.block, self.place = base, block, (address, base.numel() // columns, columns)

    def descriptor(self) -> TensorDescriptor:
        """Triton's descriptor of the matrix."""
        return TensorDescriptor.from_tensor(self.base.view(self.place[1:]), list(self.block))


class Compilation:
    """A kernel that Triton compiled for operands of one kind and for constant sizes.

    Args:
        kernel: What Triton returned for the first launch.
        names: The names of all arguments, in the kernel's order.
        operands: The operands of the first launch, by name.
        sizes: The constants, by name.
    """

    def __init__(
        self, kernel: Any, names: Sequence[str], operands: Mapping[str, Any], sizes: Mapping[str, Any]
    ) -> None:
        self.function, self.metadata, self.run = kernel.function, kernel.packed_metadata, kernel.run
        descriptors: list[Any] = []
        if any(type(operand) is Tile for operand in operands.values()):
            self.make = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
            descriptors = list(kernel.metadata.tensordesc_meta or [])
            self.run = copy.copy(self.run)
            self.run.launch = _inner(self.run.launch)
        self.values: list[Any] = []
        self.places: dict[str, Any] = {}
        for name in names:
            value = operands[name] if name in operands else sizes[name]
            place: Any = len(self.values)
            if type(value) is Tile:
                meta = descriptors.pop(0) if descriptors else None
                parts = self.make(value.descriptor(), meta)
                place = DescriptorParts(slice(place, place + len(parts)), meta, {})
                self.values += [None] * len(parts)
            else:
                self.values.append(None if name in operands else value)
            self.places[name] = place
        self.order = [self.places[name] for name in operands]

    def __call__(self, grid: tuple[int, int, int], stream: int, operands: Iterable[Any]) -> None:
        """Launches the kernel on operands, which are in the order of the first launch."""
        values = self.values.copy()
        for place, operand in zip(self.order, operands, strict=True):
            if type(operand) is Tile:
                at, meta, by_place = place
                parts = by_place.get(operand.place)
                if parts is None:
                    parts = self.make(operand.descriptor(), meta)
                    if meta is not None:  # Without `meta`, the parts hold the tensor.
                        if len(by_place) >= MOST:
                            by_place.clear()
                        by_place[operand.place] = parts
                values[at] = parts
            else:
                values[place] = operand
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *values)


class DescriptorParts(NamedTuple):
    """The parts of a tile's descriptor, which stand among the arguments of Triton's launcher.

    Attributes:
        at: The places of the parts among the launcher's arguments.
        meta: What Triton's compiler says of the descriptor, or None if the GPU has no descriptors. With None, the parts
            hold a pointer; otherwise they are numbers, which keep no tensor alive.
        by_place: The parts that were made before. The keys are `Tile.place`.
    """

    at: slice
    meta: Any
    by_place: dict[Any, list[Any]]


def _inner(launch: Any) -> Any:
    """Returns the launcher that takes descriptors in parts, given the launcher that makes the parts at each launch."""
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    return cells["launcher"].cell_contents


class Launcher:
    """Launches a kernel with constant sizes and resources.

    Args:
        kernel: A function with `triton.jit`.
        sizes: Whole numbers, types and other constants, by name.
        resources: Triton's options: warps, stages and registers.
    """

    def __init__(self, kernel: Any, sizes: Mapping[str, Any], resources: Mapping[str, int]) -> None:
        self.kernel, self.sizes, self.resources = kernel, sizes, resources
        self.compilations: dict[Any, Compilation | None] = {}

    def __call__(self, grid: tuple[int, ...], operands: Mapping[str, Any]) -> None:
        """Calls kernel[grid](**operands, **sizes, **resources), where a `Tile` stands for a descriptor.

        Args:
            grid: The number of programs in up to three dimensions.
            operands: Tensors, tiles, numbers, constants, None, or tuples of these, in the same order at each call.
        """
        if INTERPRETED or _hooks():
            self._by_triton(grid, operands)
            return
        device = driver.active.get_current_device()
        key = (
            device,
            *[
                None if operand is None
                else (operand.base.dtype, operand.block) if type(operand) is Tile
                else (operand.dtype, operand.data_ptr() % 16) if type(operand) is Tensor
                else _kind(operand)
                for operand in operands.values()
            ],
        )  # fmt: skip
        compilation = self.compilations.get(key)
        if compilation is not None:
            stream = driver.active.get_current_stream(device)
            compilation((*grid, 1, 1)[:3], stream, operands.values())  # type: ignore[arg-type]
            return
        with _one_at_a_time(f"{self.kernel} {key[1:]} {[*map(_kind, self.sizes.values())]}"):
            kernel = self._by_triton(grid, operands)
        if key not in self.compilations:
            if len(self.compilations) >= MOST:
                self.compilations.clear()
            self.compilations[key] = self._compilation(kernel, operands)

    def _by_triton(self, grid: tuple[int, ...], operands: Mapping[str, Any]) -> Any:
        """Launches the kernel as Triton does, and returns the compiled kernel.

        Takes fewer stages where shared memory is short: a program has 227 KiB of it on an H100, and 99 KiB on an RTX
        card. The numbers stay the same.
        """
        arguments = {
            name: operand.descriptor() if type(operand) is Tile else operand for name, operand in operands.items()
        }
        while True:
            try:
                return self.kernel[grid](**arguments, **self.sizes, **self.resources)
            except OutOfResources as error:
                stages = self.resources.get("num_stages", 1)
                if error.name != "shared memory" or stages < 2:
                    raise
                self.resources = {**self.resources, "num_stages": stages - 1}

    def _compilation(self, kernel: Any, operands: Mapping[str, Any]) -> Compilation | None:
        """The compiled kernel, or None if this Triton launches in a way that `Compilation` does not know."""
        try:
            return Compilation(kernel, self.kernel.arg_names, operands, self.sizes)
        except (AttributeError, ImportError, KeyError, TypeError):
            return None


def launch(
    kernel: Any, grid: tuple[int, ...], operands: Mapping[str, Any], sizes: Mapping[str, Any], **resources: int
) -> None:
    """Launches a kernel by a `Launcher`, which is remembered for these sizes and resources. Sizes must be hashable."""
    _launcher(kernel, tuple(operands), tuple(sizes.items()), tuple(resources.items()))(grid, operands)


@functools.lru_cache(maxsize=MOST)
def _launcher(kernel: Any, operands: tuple[str, ...], sizes: Any, resources: Any) -> Launcher:
    """The launcher of a kernel for operands with these names."""
    return Launcher(kernel, dict(sizes), dict(resources))


@contextmanager
def _one_at_a_time(kernel: str) -> Iterator[None]:
    """Makes other processes of this machine wait if they compile the same kernel. They then find it in Triton's cache.

    `kernel` is a text that names the kernel and what it is compiled for. Its lock is a byte of a file in Triton's
    cache, and the system releases it when a process ends. Without such a file, or on a system without such locks, each
    process compiles by itself.
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
"""Whether Triton's interpreter runs the kernels."""


def _hooks() -> Any:
    """Returns what a profiler makes Triton call at each launch, if anything."""
    hook = knobs.runtime.launch_enter_hook
    return getattr(hook, "calls", hook)


def _kind(argument: Any) -> Any:
    """Returns what Triton compiles for: a pointer's dtype and alignment, the type of a float, or else the value."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if type(argument) is float:
        return float
    return tuple(map(_kind, argument)) if type(argument) is tuple else argument
