"""What a rule computes from x beside q, k and v: its gates, and the vectors that it declares among them."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.gates import Gate
from deltalab.models.rule_inputs.low_rank import INSIDE
from deltalab.models.rule_inputs.token_shift import shifted
from deltalab.models.start import OfGate, Parameters, Started, Uniform, linear
from deltalab.ops.fused.convolution import LEAST_NORM, tail_of
from deltalab.ops.packing import Sequences


class Gates(nn.Module):
    """The gates of a rule. Maps x [B, T, d] to the value of each gate by its symbol.

    A value has the shape that the gate's `per` names, and is in at least fp32. The projected vectors that a rule
    declares among its gates are left to `Vectors`.

    Args:
        gates: The gates of the rule, by symbol.
        d_model: d.
        heads: H.
        key_dim: K.
        value_dim: V.
        steps: The steps per token of gates `per` step.
        bias: Whether the second matrix of a gate with a rank has a bias, or the gates whose matrix has one. KDA's
            decays have none: they add a c.
        inside: The function, a name in `INSIDE`, between the two matrices of a gate with a rank, by symbol.
    """

    def __init__(
        self,
        gates: Mapping[str, Gate],
        d_model: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        steps: int = 1,
        *,
        bias: bool | Collection[str] = False,
        inside: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.gates = {name: gate for name, gate in gates.items() if gate.features is None}
        self.inside = inside or {}
        self.heads, self.steps = heads, steps
        self.shapes = {name: gate.shape(heads, key_dim, value_dim) for name, gate in self.gates.items()}
        self.project = nn.ModuleDict()
        self.learned = nn.ModuleDict()
        for name, gate in self.gates.items():
            if gate.of is not None:
                continue
            shape = self.shapes[name]
            width = math.prod(shape[gate.one_projection :]) * (steps if gate.per == "step" else 1)
            if gate.projected and gate.rank is None:
                self.project[name] = linear(d_model, width)
            elif gate.projected and gate.rank is not None:
                rank = gate.rank or value_dim
                biased = (bias if isinstance(bias, bool) else name in bias) and not gate.by_head
                self.project[name] = nn.Sequential(
                    linear(d_model, rank), linear(rank, width, bias=biased, widens=False)
                )
            shapes = {p: gate.parameter_shape(p, shape) for p in gate.parameters}
            self.learned[name] = Parameters({p: OfGate(gate, p) for p in gate.parameters}, shapes)

    def weights(self) -> list[Tensor]:
        """Returns the matrices that x is multiplied by, [..., d] each."""
        return [first_linear(project).weight for project in self.project.values()]

    def forward(
        self, x: Tensor, products: Sequence[Tensor] = (), own: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Computes the gates of x.

        Args:
            x: The inputs, [B, T, d].
            products: The products of x with each of `weights`, if the caller has them.
            own: The inputs of gates that do not read x, by `own_reader` of their symbol.
        """
        projected: dict[str, Tensor] = {}
        for (name, project), product in itertools.zip_longest(self.project.items(), products):
            z = first_linear(project)((own or {}).get(own_reader(name), x)) if product is None else product
            if isinstance(project, nn.Sequential):
                z = z.to(first_linear(project).weight.dtype)
                z = project[1](INSIDE[self.inside[name]](z) if name in self.inside else z)
            z = z.to(torch.promote_types(z.dtype, torch.float32))
            if self.gates[name].per == "step":
                z = z.unflatten(-1, (self.steps, self.heads)).flatten(1, 2)
            elif self.gates[name].one_projection:
                z = z.unsqueeze(2).expand(*z.shape[:2], *self.shapes[name])
            elif len(self.shapes[name]) > 1:
                z = z.unflatten(-1, self.shapes[name])
            projected[name] = z
        dtype = torch.promote_types(x.dtype, torch.float32)
        values = {}
        for name, gate in self.gates.items():
            source = gate.of or name
            z = projected.get(source)
            if z is None:
                z = x.new_zeros(self.shapes[name], dtype=dtype)
            value = gate.value(z, self.learned[source])  # type: ignore[arg-type]
            values[name] = _Contiguous.apply(value) if torch.compiler.is_compiling() else value  # type: ignore[no-untyped-call]
        return values


class _Contiguous(torch.autograd.Function):
    """Returns x itself, and makes its gradient contiguous.

    PyTorch's compiler assumes that the gradient of softplus is contiguous. That is true only if the gradient that
    softplus receives in its backward pass is contiguous.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def own_reader(symbol: str) -> str:
    """Returns the name under which a token shift has the mean that one gate or vector alone reads."""
    return f"{symbol}_own"


def first_linear(project: nn.Module) -> nn.Linear:
    """Returns the linear map that reads x in a projection of one or two maps."""
    first = project[0] if isinstance(project, nn.Sequential) else project
    assert isinstance(first, nn.Linear)
    return first


def shard_gates(model: nn.Module, **options: Any) -> None:
    """Shards the learned numbers of all gates in a model by FSDP2, in fp32 and as one group.

    Call this function before `fully_shard`.

    The numbers need fp32: the mixed precision of the matrices would round a decay near 1 to 1. A forward pass of the
    model gathers the group when it begins.

    Args:
        model: The outermost module that is sharded.
        **options: `mesh` and `offload_policy` of `fully_shard`.
    """
    # Import late: the import takes a second, and few models are sharded.
    from torch.distributed.fsdp import FSDPModule, fully_shard

    parts = [part for gates in model.modules() if isinstance(gates, Gates) for part in gates.learned.values()]
    modules = [part for part in parts if any(True for _ in part.parameters())]
    if not modules:
        return
    fully_shard(modules, reshard_after_forward=False, **options)
    group = modules[0]
    assert isinstance(group, FSDPModule)
    untraced: Any = torch.compiler.disable  # as FSDP2's own hooks are
    model.register_forward_pre_hook(untraced(lambda *_: group.unshard()))
    # After a backward pass, FSDP2 reshards by itself.
    model.register_forward_hook(untraced(lambda *_: None if torch.is_grad_enabled() else group.reshard()))


class Vectors(Started):
    """The vectors that a rule declares besides q, k and v. Maps x [B, T, d] to each vector [B, T, H, K or V] by symbol.

    Each vector is projected, convolved over time, activated and normalized as its `Gate.features` say.

    Args:
        gates: The gates of the rule, by symbol.
        d_model: d.
        heads: H.
        key_dim: K.
        value_dim: V.
        conv: The width of the convolution; 0 for none.
        kept: The tokens of the past that are kept: conv - 1, or more if the layer's own convolution reads more.
    """

    def __init__(
        self, gates: Mapping[str, Gate], d_model: int, heads: int, key_dim: int, value_dim: int, conv: int, kept: int
    ) -> None:
        super().__init__()
        self.gates = {name: gate for name, gate in gates.items() if gate.features is not None}
        self.shapes = {name: gate.shape(heads, key_dim, value_dim) for name, gate in self.gates.items()}
        self.widths = [math.prod(shape) for shape in self.shapes.values()]
        self.project = nn.ModuleDict()
        for (name, gate), width in zip(self.gates.items(), self.widths, strict=True):
            full = linear(d_model, width) if gate.rank is None else None
            self.project[name] = full or nn.Sequential(
                linear(d_model, gate.rank or 0), linear(gate.rank or 0, width, widens=False)
            )
        self.width, self.kept = conv, kept
        if conv and self.gates:
            self.conv = self.drawn("conv", Uniform(conv**-0.5), conv, sum(self.widths))

    def forward(
        self,
        x: Tensor,
        past: Tensor | None,
        packed: Sequences | None = None,
        own: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Computes the vectors of x, and the `past` to pass with the tokens that follow.

        Args:
            x: The inputs, [B, T, d].
            past: The projections of the tokens before, [B, kept, C]; None for zeros.
            packed: The sequences that lie in x one after the other, as in `ops.fused.convolution.features`.
            own: As in `Gates.forward`.
        """
        own = own or {}
        z = torch.cat([project(own.get(own_reader(name), x)) for name, project in self.project.items()], dim=-1)
        past = None if past is None else past.to(z)
        tail = tail_of(z, past, self.kept, packed)
        if self.width:
            before = z.new_zeros(z.shape[0], self.width - 1, z.shape[-1]) if past is None else past
            inputs, length, taps = torch.cat([before, z], dim=1), z.shape[1], self.conv.to(z).unbind()
            parts = [tap * shifted(inputs, length, self.width - 1 - i, packed) for i, tap in enumerate(taps)]
            z = sum(parts[1:], start=parts[0])
        values = {}
        for (name, gate), part in zip(self.gates.items(), z.split(self.widths, dim=-1), strict=True):
            vector = part if gate.features == "raw" else F.silu(part)
            vector = vector.unflatten(-1, self.shapes[name])
            vector = unit(vector) if gate.features == "unit" else vector
            values[name] = gate.value(vector, {})
        return values, tail


def unit(x: Tensor) -> Tensor:
    """Returns x [..., K] over its norm, in x's dtype."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, eps=LEAST_NORM).to(x.dtype)
