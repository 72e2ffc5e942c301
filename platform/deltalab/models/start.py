"""The starts of parameters. A module keeps them as data, by name, so that copies and pickles keep them too."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

from deltalab.gates import Gate, Start
from deltalab.ops.fused.norm import HeadNorm, ResidualLayerNorm, ResidualNorm, RMSNorm

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""The parts that torch.compile and activation checkpointing add to the names of parameters."""


@dataclass(frozen=True)
class Normal:
    """Normal numbers of mean 0 and standard deviation `std`."""

    std: float

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.empty(shape).normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class Uniform:
    """Numbers uniform in [-bound, bound]."""

    bound: float

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.empty(shape).uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Zeros:
    """Zeros."""

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.zeros(shape)


@dataclass(frozen=True)
class Ones:
    """Ones."""

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.ones(shape)


@dataclass(frozen=True)
class Given:
    """Given numbers [n]."""

    numbers: tuple[float, ...]

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.tensor(self.numbers)


@dataclass(frozen=True)
class Ramp:
    """Numbers [n] from 0 to 1 in equal steps."""

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.linspace(0, 1, *shape)


@dataclass(frozen=True)
class OfGate:
    """The start that a gate declares for its parameter `name`."""

    gate: Gate
    name: str

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self.gate.parameters[self.name](shape, generator)


class Started(nn.Module):
    """A module that knows how its own parameters start.

    Attributes:
        starts: The start of each parameter, by its name in this module.
    """

    starts: Mapping[str, Start] = MappingProxyType({})

    def reset_parameters(self) -> None:
        """Starts all parameters anew, also those of submodules, from torch's global generator."""
        initialize(self)

    def drawn(self, name: str, start: Start, *shape: int) -> nn.Parameter:
        """Returns a new parameter for the attribute `name`, started from torch's global generator."""
        self.starts = {**self.starts, name: start}
        value = nn.Parameter(torch.empty(shape))
        _fill(value, start, None)
        return value


class Linear(Started, nn.Linear):
    """A projection whose weights start normal, and whose bias, if there is one, starts at zero.

    Args:
        inputs: The number of inputs.
        outputs: The number of outputs.
        std: The standard deviation at which the weights start.
        bias: Whether there is a bias.
        widens: Whether the projection has more inputs in a wider model. The best learning rate of AdamW then falls with
            the width.
    """

    def __init__(self, inputs: int, outputs: int, std: float, *, bias: bool = False, widens: bool = True) -> None:
        self.widens = widens
        # Set the starts first: nn.Linear calls reset_parameters.
        self.starts = {"weight": Normal(std), **({"bias": Zeros()} if bias else {})}
        super().__init__(inputs, outputs, bias=bias)

    def restart(self, std: float) -> None:
        """Starts the weights anew, and from now on, at another standard deviation."""
        self.starts = {**self.starts, "weight": Normal(std)}
        self.reset_parameters()


class Matrices(Started):
    """Projections x W_e, e = 1 ... n, without biases, as one tensor W [n, inputs, outputs] that starts normal.

    Args:
        count: n.
        inputs: The number of inputs, which is larger in a wider model.
        outputs: The number of outputs.
        std: The standard deviation at which the weights start.
    """

    def __init__(self, count: int, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = self.drawn("weight", Normal(std), count, inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Projects x [N, inputs], the same for all, or x [n, N, inputs], one for each, to [n, N, outputs]."""
        return x @ self.weight

    def restart(self, std: float) -> None:
        """Starts the weights anew, and from now on, at another standard deviation."""
        self.starts = {**self.starts, "weight": Normal(std)}
        self.reset_parameters()


class Parameters(Started, nn.ParameterDict):
    """Parameters by name, each with its start and its shape."""

    def __init__(self, starts: Mapping[str, Start], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name in sorted(starts):  # as nn.ParameterDict orders a mapping
            self[name] = self.drawn(name, starts[name], *shapes[name])


class Remade(nn.Module):
    """A module that holds `inner`, a module of another author, and makes it anew to start it.

    Attributes:
        inner: The module.
    """

    inner: nn.Module

    def make(self) -> nn.Module:
        """Makes the inner module, whose parameters start from torch's global generator."""
        raise NotImplementedError


def remade(module: Remade, seed: int | None) -> nn.Module:
    """Makes the inner module of `module` as if a seed had just been set; None takes torch's generator as it stands."""
    if seed is None:
        return module.make()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return module.make()


def linear(
    inputs: int, outputs: int, *, std: float | None = None, bias: bool = False, widens: bool = True
) -> nn.Linear:
    """Makes a `Linear`. If `std` is None, the standard deviation is inputs ** -0.5."""
    return Linear(inputs, outputs, inputs**-0.5 if std is None else std, bias=bias, widens=widens)


def widening(module: nn.Module) -> list[nn.Parameter]:
    """Returns the matrices of a module that have more inputs in a wider model, in the order of its parameters."""
    return [
        cast(nn.Parameter, part.weight)
        for part in module.modules()
        if isinstance(part, Matrices) or (isinstance(part, Linear) and part.widens)
    ]


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the matrices [a, b] of projections inside of a model's blocks, by name. A tensor [n, a, b] is n of them.

    Vectors in the shape of matrices, with a or b equal to 1, are left out.
    """
    return {
        f"{path}.weight": cast(nn.Parameter, part.weight)
        for path, part in model.named_modules()
        if path.startswith("blocks.") and isinstance(part, nn.Linear | Matrices) and min(part.weight.shape[-2:]) > 1
    }


def initialize(
    module: nn.Module, seed: int | None = None, *, wanted: Callable[[nn.Parameter], bool] = lambda parameter: True
) -> None:
    """Starts the parameters of every layer and model of deltalab in a module anew.

    With a seed, each parameter starts from the seed and its name alone. So models start equal in the parameters that
    they share, on any device and with any sharding.

    Args:
        module: The module, which may hold other modules too.
        seed: The seed. None takes torch's global generator, as torch's own modules do. In that case call
            `torch.manual_seed` first, with the same seed in all processes that share the parameters.
        wanted: A function that returns whether to start a parameter. Any other parameter keeps its values.
    """
    started: set[int] = set()
    for path, part in module.named_modules():
        if isinstance(part, Remade):
            _start_anew(part, None if seed is None else _number(seed, path, ""), started, wanted)
            continue
        norm = isinstance(part, RMSNorm | ResidualNorm | ResidualLayerNorm | HeadNorm)
        for name, value in part.named_parameters(recurse=False):
            # Start tied parameters once, by their first name.
            if id(value) in started or not wanted(value):
                continue
            if norm:
                nn.init.constant_(value, 0.0 if name == "bias" else 1.0)
            elif isinstance(part, Started) and name in part.starts:
                started.add(id(value))
                _fill(value, part.starts[name], None if seed is None else _stream(seed, path, name))


def _start_anew(part: Remade, seed: int | None, started: set[int], wanted: Callable[[nn.Parameter], bool]) -> None:
    """Starts the parameters of a module of another author, as the module starts them."""
    values = {
        name: value for name, value in part.inner.named_parameters() if id(value) not in started and wanted(value)
    }
    if all(value.is_meta for value in values.values()):
        return
    with torch.device("cpu"):
        fresh = dict(remade(part, seed).named_parameters())
    for name, value in values.items():
        started.add(id(value))
        _fill(value, lambda shape, generator, name=name: fresh[name].detach(), None)  # type: ignore[misc]


def _stream(seed: int, path: str, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(_number(seed, path, name))


def _number(seed: int, path: str, name: str) -> int:
    address = ".".join([part for part in path.split(".") if part and part not in WRAPPERS] + [name])
    digest = hashlib.sha256(f"{seed}/{address}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


@torch.no_grad()
def _fill(value: Tensor, start: Start, generator: torch.Generator | None) -> None:
    if value.is_meta:
        return
    # Draw on the CPU with a seed, for the same numbers on any device. Torch has a global generator for each device.
    with value.device if generator is None else torch.device("cpu"):
        drawn = start(tuple(value.shape), generator)
    if not hasattr(value, "device_mesh"):
        value.copy_(drawn)
        return
    # Import late: the import takes a second, and few models are sharded.
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(value, DTensor)
    # Every process draws the whole tensor and keeps its own part, so that no process waits for another.
    part = distribute_tensor(drawn.to(value.dtype), value.device_mesh, value.placements, src_data_rank=None)
    value.to_local().copy_(part.to_local())
