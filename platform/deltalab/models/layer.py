"""A rule as a layer that mixes tokens: projections, short convolution, gates, the rule, output norm and gate."""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltalab.gates import Gate, Start
from deltalab.ops.convolution import Channels, features, fused, fuses
from deltalab.ops.norm import HeadNorm
from deltalab.ops.scan import Backend, scan
from deltalab.rule import State, UpdateRule


@dataclass(frozen=True)
class LayerCache:
    """The memory of a layer between calls: the convolution's last inputs [B, conv - 1, C], and the rule's state."""

    conv: Tensor
    state: State

    def numel(self) -> int:
        """The number of elements in these tensors."""
        return self.conv.numel() + sum(part.numel() for part in self.state)


def parameter(start: Callable[[torch.Generator], Tensor]) -> nn.Parameter:
    """A parameter that `initialize` can start anew from a seed."""
    made = nn.Parameter(start(torch.Generator().manual_seed(0)))
    made.start = start  # type: ignore[attr-defined]
    return made


def linear(inputs: int, outputs: int, *, std: float | None = None) -> nn.Linear:
    """A projection without bias; weights are normal with standard deviation `std`, inputs ** -0.5 where None."""
    module = nn.Linear(inputs, outputs, bias=False)
    module.weight = parameter(lambda generator: _normal((outputs, inputs), std or inputs**-0.5, generator))
    return module


def initialize(module: nn.Module, seed: int) -> None:
    """Starts each parameter from the seed and its name alone, so that models start equal in what they share."""
    with torch.no_grad():
        for name, value in module.named_parameters():
            if start := getattr(value, "start", None):
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                value.copy_(start(torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))))


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0.0, std, generator=generator)


class Gates(nn.Module):
    """The gates of a rule: x [B, T, d] to each value by its symbol, in the shape of the gate's `per`, at least fp32."""

    def __init__(self, gates: dict[str, Gate], d_model: int, heads: int, key_dim: int, steps: int = 1) -> None:
        super().__init__()
        self.gates = gates
        self.heads, self.key_dim, self.steps = heads, key_dim, steps
        self.project = nn.ModuleDict()
        self.learned = nn.ModuleDict()
        for name, gate in gates.items():
            if gate.of is not None:
                continue
            shape = gate.shape(heads, key_dim)
            width = math.prod(shape) * (steps if gate.per == "step" else 1)
            if gate.projected and gate.rank is None:
                self.project[name] = linear(d_model, width)
            elif gate.projected and gate.rank is not None:
                self.project[name] = nn.Sequential(linear(d_model, gate.rank), linear(gate.rank, width))
            self.learned[name] = nn.ParameterDict({p: _started(start, shape) for p, start in gate.parameters.items()})

    def weights(self) -> list[Tensor]:
        """The matrices that x is multiplied by, [.., d] each."""
        return [_first(project).weight for project in self.project.values()]

    def forward(self, x: Tensor, products: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """products: x times each of `weights`, if the caller has them."""
        projected: dict[str, Tensor] = {}
        for (name, project), product in itertools.zip_longest(self.project.items(), products):
            z = _first(project)(x) if product is None else product
            if isinstance(project, nn.Sequential):
                z = project[1](z.to(_first(project).weight.dtype))
            z = z.to(torch.promote_types(z.dtype, torch.float32))
            if self.gates[name].per == "step":
                z = z.unflatten(-1, (self.steps, self.heads)).flatten(1, 2)
            elif self.gates[name].per == "channel":
                z = z.unflatten(-1, (self.heads, self.key_dim))
            projected[name] = z
        dtype = torch.promote_types(x.dtype, torch.float32)
        values = {}
        for name, gate in self.gates.items():
            source = gate.of or name
            z = projected.get(source)
            if z is None:
                z = x.new_zeros(gate.shape(self.heads, self.key_dim), dtype=dtype)
            values[name] = gate.value(z, self.learned[source])  # type: ignore[arg-type]
        return values


def _first(project: nn.Module) -> nn.Linear:
    first = project[0] if isinstance(project, nn.Sequential) else project
    assert isinstance(first, nn.Linear)
    return first


def _started(start: Start, shape: tuple[int, ...]) -> nn.Parameter:
    return parameter(lambda generator: start(shape, generator))


class RuleLayer(nn.Module):
    """A rule as a layer, x [B, T, d] to y [B, T, d].

    q, k and v come from one projection and one causal depthwise convolution, k and v for each of the rule's steps, and
    then get the activation and norm of the rule's `features`. The unit norm comes before any gate scales k.

    shared_qk: all heads use one q and one k (multi-value, as in Mamba). conv: the convolution's width, 0 for none.
    """

    def __init__(
        self,
        rule: UpdateRule,
        d_model: int,
        heads: int,
        *,
        key_dim: int,
        value_dim: int,
        conv: int = 4,
        output_norm: bool = True,
        output_gate: bool = True,
        shared_qk: bool = False,
        out_std: float | None = None,
        chunk_size: int = 64,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.rule = rule
        self.heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        self.width, self.chunk_size, self.backend = conv, chunk_size, backend
        self.channels = Channels(
            heads, 1 if shared_qk else heads, key_dim, value_dim, rule.steps, rule.features, rule.silu_of_v
        )
        channels = self.channels.total
        self.qkv = linear(d_model, channels)
        if conv:
            bound = conv**-0.5
            self.conv = parameter(lambda g: torch.empty(conv, channels).uniform_(-bound, bound, generator=g))
        self.gates = Gates(rule.gates, d_model, heads, key_dim, rule.steps)
        self.norm = HeadNorm(value_dim, norm=output_norm)
        self.gate = linear(d_model, heads * value_dim) if output_gate else None
        self.out = linear(heads * value_dim, d_model, std=out_std)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> tuple[Tensor, LayerCache]:
        taps, past = self.conv if self.width else None, None if cache is None else cache.conv
        products: list[Tensor] = []
        if fuses(x, taps, self.channels):
            others = []
            # With fewer tokens, copying the weights side by side costs more than reading x once for each.
            if x.shape[:2].numel() >= self.channels.total:
                others = [*([] if self.gate is None else [self.gate.weight]), *self.gates.weights()]
            (q, k, v, tail), products = fused(x, self.qkv.weight, others, taps, past, self.channels)
        else:
            q, k, v, tail = features(self.qkv(x), taps, past, self.channels)
        gate = products.pop(0) if products and self.gate is not None else None
        q, k = (z.expand(-1, -1, self.heads, -1) for z in (q, k))
        o, state = scan(
            self.rule,
            q,
            k,
            v,
            self.gates(x, products),
            state=None if cache is None else cache.state,
            backend=self.backend,
            chunk_size=self.chunk_size,
        )
        if self.gate is not None and gate is None:
            gate = self.gate(x)
        return self.out(self.norm(o, gate)), LayerCache(tail, state)
