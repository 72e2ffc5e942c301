"""A rule as a layer that mixes tokens: projections, convolution, positions, gates, the rule, output norm and gate."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
from deltalab.models.start import OfGate, Parameters, Ramp, Started, Uniform, linear
from deltalab.models.start import initialize as initialize
from deltalab.ops.convolution import FEATURES, LEAST_NORM, Channels, features, fused, fuses, tail_of
from deltalab.ops.norm import EPS, HEAD_GATES, HEAD_NORMS, HeadNorm, RMSNorm
from deltalab.ops.packing import Packing, Sequences
from deltalab.ops.recurrence import Backend
from deltalab.ops.rotary import angles, rotate
from deltalab.ops.scan import BACKENDS, apart, joined, scan
from deltalab.registry import get_rule
from deltalab.rule import State, UpdateRule


@dataclass(frozen=True)
class LayerCache:
    """The memory of a layer between calls, of B sequences.

    conv: the convolution's last inputs, [B, conv - 1, C]. state: the rule's.
    place: how many tokens were read, [B, 1] with RoPE, else [B, 0]; it counts as one element.
    last: the last token's x, [B, 1, d] with token shift, else [B, 0, d].
    apart: the rule's state of each sequence, where they differ in size, as those of attention do after sequences of
        several lengths; `state` is empty then.
    """

    conv: Tensor
    state: State
    place: Tensor
    last: Tensor
    apart: tuple[State, ...] = ()

    def numel(self) -> int:
        """The number of elements in these tensors."""
        return sum(part.numel() for part in (self.conv, *self.state, self.place, self.last, *sum(self.apart, ())))

    def rows(self, at: Tensor) -> "LayerCache":
        """The memory of the sequences `at` [n]."""
        conv, place, last, *state = (
            one.index_select(0, at.to(one.device)) for one in (self.conv, self.place, self.last, *self.state)
        )
        apart = tuple(self.apart[i] for i in at.tolist()) if self.apart else ()
        return LayerCache(conv, tuple(state), place, last, apart)


class Gates(nn.Module):
    """The gates of a rule: x [B, T, d] to each value by its symbol, in the shape of the gate's `per`, at least fp32.

    Projected vectors are not among them: `Vectors` makes these. bias: of the second matrix of a gate with a rank.
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
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gates = {name: gate for name, gate in gates.items() if gate.features is None}
        self.heads, self.steps = heads, steps
        self.shapes = {name: gate.shape(heads, key_dim, value_dim) for name, gate in self.gates.items()}
        self.project = nn.ModuleDict()
        self.learned = nn.ModuleDict()
        for name, gate in self.gates.items():
            if gate.of is not None:
                continue
            shape = self.shapes[name]
            width = math.prod(shape) * (steps if gate.per == "step" else 1)
            if gate.projected and gate.rank is None:
                self.project[name] = linear(d_model, width)
            elif gate.projected and gate.rank is not None:
                self.project[name] = nn.Sequential(
                    linear(d_model, gate.rank), linear(gate.rank, width, bias=bias, widens=False)
                )
            self.learned[name] = Parameters({p: OfGate(gate, p) for p in gate.parameters}, shape)

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
    """x itself, whose gradient is contiguous.

    PyTorch's compiler takes the gradient of softplus to be contiguous, which it is only where its upstream gradient is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def shard_gates(model: nn.Module, **options: Any) -> None:
    """Shards what the gates of a model's layers learn by FSDP2, in fp32 and as one group. Call it before `fully_shard`.

    These numbers need fp32: the mixed precision of the matrices would round a decay near 1 to 1. Forward passes of the
    model gather the group when they begin.

    model: the outermost module that is sharded. options: `mesh` and `offload_policy` of `fully_shard`.
    """
    # Import late: it takes a second, and few models are sharded.
    from torch.distributed.fsdp import FSDPModule, fully_shard

    parts = [part for gates in model.modules() if isinstance(gates, Gates) for part in gates.learned.values()]
    learned = [part for part in parts if any(True for _ in part.parameters())]
    if not learned:
        return
    fully_shard(learned, reshard_after_forward=False, **options)
    group = learned[0]
    assert isinstance(group, FSDPModule)
    untraced: Any = torch.compiler.disable  # as FSDP2's own hooks are
    model.register_forward_pre_hook(untraced(lambda *_: group.unshard()))
    # After a backward pass, FSDP2 reshards by itself.
    model.register_forward_hook(untraced(lambda *_: None if torch.is_grad_enabled() else group.reshard()))


def _first(project: nn.Module) -> nn.Linear:
    first = project[0] if isinstance(project, nn.Sequential) else project
    assert isinstance(first, nn.Linear)
    return first


class Vectors(Started):
    """The vectors that a rule declares besides q, k and v: x [B, T, d] to each by its symbol, [B, T, H, K or V].

    Each is projected, convolved over time, activated and normalized, as its `Gate.features` say.
    conv: as in `RuleLayer`.
    """

    def __init__(
        self, gates: Mapping[str, Gate], d_model: int, heads: int, key_dim: int, value_dim: int, conv: int
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
        self.width = conv
        if conv and self.gates:
            self.conv = self.drawn("conv", Uniform(conv**-0.5), conv, sum(self.widths))

    def forward(
        self, x: Tensor, past: Tensor | None, packed: Sequences | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The vectors, and the past for the tokens that follow.

        past: the projections of the conv - 1 tokens before, [B, conv - 1, C]; None for zeros. packed: as in `features`.
        """
        z = torch.cat([project(x) for project in self.project.values()], dim=-1)
        past = None if past is None else past.to(z)
        tail = tail_of(z, past, max(self.width - 1, 0), packed)
        if self.width:
            before = z.new_zeros(z.shape[0], self.width - 1, z.shape[-1]) if past is None else past
            seen, length, taps = torch.cat([before, z], dim=1), z.shape[1], self.conv.to(z).unbind()
            parts = [tap * _shifted(seen, length, self.width - 1 - i, packed) for i, tap in enumerate(taps)]
            z = sum(parts[1:], start=parts[0])
        values = {}
        for (name, gate), part in zip(self.gates.items(), z.split(self.widths, dim=-1), strict=True):
            one = part if gate.features == "raw" else F.silu(part)
            one = one.unflatten(-1, self.shapes[name])
            one = _unit(one) if gate.features == "unit" else one
            values[name] = gate.value(one, {})
        return values, tail


class TokenShift(nn.Module):
    """x_t + m (x_{t-1} - x_t) for each reader of x [B, T, d], with a learned m [d] of its own.

    m starts as a ramp over the channels, from 0 to 1. The token before the first is zero.
    Peng et al. 2023 (arXiv:2305.13048).
    """

    def __init__(self, d_model: int, readers: Sequence[str]) -> None:
        super().__init__()
        self.share = Parameters(dict.fromkeys(readers, Ramp()), (d_model,))

    def forward(self, x: Tensor, last: Tensor | None, packed: Sequences | None = None) -> dict[str, Tensor]:
        """last: the token before these, [B, 1, d]; None for zero. packed: as in `features`."""
        seen = torch.cat([torch.zeros_like(x[:, :1]) if last is None else last, x], dim=1)
        before = _shifted(seen, x.shape[1], 1, packed)
        return {name: x + share * (before - x) for name, share in self.share.items()}


class RuleLayer(Started):
    """A rule as a layer, x [B, T, d] to y [B, T, d], which starts from torch's global generator as torch's layers do.

    q, k and v come from one projection and one causal depthwise convolution, k and v for each of the rule's steps, and
    then get the activation and norm of the rule's `features`. The unit norm comes before any gate scales k.

    rule: the rule, or the name of one. key_dim: width of a head's keys, d_model / heads where None. value_dim: width of
        its values, key_dim where None.
    conv: the convolution's width, 0 for none.
    qk_heads: how many heads have a q and a k of their own; groups of heads / qk_heads share them. kv_heads: likewise of
        k and v. At most one of the two is less than `heads`.
    qk_norm: RMS norm with weights [K] on each head's q and k after their activation; a unit norm comes after it.
    rope: the base of rotary positions on q and k, None for none. A token's steps share its place.
    token_shift: q, k, v, the gates and the output gate are each projected from a mean of x_t and x_{t-1}.
    output_norm, output_gate: kinds of `HeadNorm`. gate_rank: the width r of the gate's projection W_1 W_2 x through r
        channels; None for one matrix.
    features: a kind of `FEATURES`; None for the rule's own. scale: of the output, None for K ** -0.5.
    low_rank_bias: whether the second matrix of a projection through few channels has a bias.
    norm_eps: what the norms add to a mean square.
    out_std: of the output projection's start, (heads value_dim) ** -0.5 where None.

    Raises `InputError` for a name that no rule has, for settings out of these ranges, and where `heads` does not divide
    d_model and there is no key_dim.
    """

    def __init__(
        self,
        rule: UpdateRule | str,
        d_model: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv: int = 4,
        qk_heads: int | None = None,
        kv_heads: int | None = None,
        qk_norm: bool = False,
        rope: float | None = None,
        token_shift: bool = False,
        output_norm: bool | str = True,
        output_gate: bool | str = True,
        gate_rank: int | None = None,
        features: str | None = None,
        scale: float | None = None,
        low_rank_bias: bool = False,
        norm_eps: float = EPS,
        out_std: float | None = None,
        chunk_size: int = 64,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        rule = rule if isinstance(rule, UpdateRule) else get_rule(rule)
        _whole(1, d_model=d_model, heads=heads, key_dim=key_dim, value_dim=value_dim, gate_rank=gate_rank)
        _whole(1, qk_heads=qk_heads, kv_heads=kv_heads, chunk_size=chunk_size)
        _whole(0, conv=conv)
        _kinds(output_norm=output_norm, output_gate=output_gate, features=features, backend=backend)
        if key_dim is None and d_model % heads:
            raise InputError(f"d_model {d_model} must be a multiple of heads {heads}, or give key_dim")
        key_dim = key_dim or d_model // heads
        value_dim = value_dim or key_dim
        for name, own in (("qk_heads", qk_heads), ("kv_heads", kv_heads)):
            if own is not None and heads % own:
                raise InputError(f"{name} must divide heads {heads}, not be {own}")
        if (qk_heads or heads) < heads and (kv_heads or heads) < heads:
            raise InputError(f"qk_heads {qk_heads} and kv_heads {kv_heads}: at most one may be less than heads {heads}")
        if norm_eps < 0:
            raise InputError(f"norm_eps must be at least 0, not {norm_eps!r}")
        if rope is not None and (isinstance(rope, bool) or rope <= 1 or key_dim % 2):
            raise InputError(f"rope takes a base above 1 and an even key_dim, not {rope!r} and {key_dim}")
        self.rule = rule
        self.heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        self.width, self.rope, self.chunk_size, self.backend = conv, rope, chunk_size, backend
        self.scale = scale
        kind, silu_of_v = (rule.features, rule.silu_of_v) if features is None else FEATURES[features]
        self.channels = Channels(heads, qk_heads or heads, key_dim, value_dim, rule.steps, kind, silu_of_v, kv_heads)
        self.qkv = linear(d_model, self.channels.total)
        if conv:
            self.conv = self.drawn("conv", Uniform(conv**-0.5), conv, self.channels.total)
        self.q_norm = RMSNorm(key_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(key_dim, norm_eps) if qk_norm else None
        self.gates = Gates(rule.gates, d_model, heads, key_dim, value_dim, rule.steps, bias=low_rank_bias)
        vectors = any(gate.features is not None for gate in rule.gates.values())
        self.vectors = Vectors(rule.gates, d_model, heads, key_dim, value_dim, conv) if vectors else None
        self.norm = HeadNorm(value_dim, heads=heads, norm=output_norm, gate=output_gate, eps=norm_eps)
        self.gate: nn.Linear | nn.Sequential | None = None
        if output_gate not in (False, "none"):
            width = heads * value_dim
            if gate_rank is None:
                self.gate = linear(d_model, width)
            else:
                second = linear(gate_rank, width, bias=low_rank_bias, widens=False)
                self.gate = nn.Sequential(linear(d_model, gate_rank), second)
        others = [*(["gates"] if self.gates.weights() or vectors else []), *(["gate"] if self.gate is not None else [])]
        self.shift = TokenShift(d_model, ["q", "k", "v", *others]) if token_shift else None
        self.out = linear(heads * value_dim, d_model, std=out_std)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """y [B, T, d].

        cu_seqlens: the bounds [N + 1] of N sequences in a row, 0 first and T last, where B = 1.
        attention_mask [B, T]: 0 for padding, wherever it stands; the others of a row are one sequence. y is 0 there.

        Raises `InputError` for x of another form, for both masks, or for one that does not fit x.
        """
        self._check(x)
        packing = Packing.of_padded(x, attention_mask, cu_seqlens)
        if packing is None:
            return self.advance(x, cu_seqlens=cu_seqlens)[0]
        return packing.unpack(self.advance(packing.pack(x), cu_seqlens=packing.cu_seqlens)[0])

    def advance(
        self, x: Tensor, cache: LayerCache | None = None, *, cu_seqlens: "Tensor | Sequences | None" = None
    ) -> tuple[Tensor, LayerCache]:
        """y [B, T, d] for x that follows what the cache has seen, and the new cache.

        cu_seqlens: as in `forward`; the caches are those of the N sequences then. A model makes their `Sequences` once
        for all layers.
        """
        self._check(x)
        packed = None if cu_seqlens is None else Sequences.of(cu_seqlens, x)
        held, due = len(x) if cache is None else len(cache.conv), len(x if packed is None else packed.lengths)
        if cache is not None and held != due:
            raise InputError(f"the cache is of {held} sequences, but x holds {due}")
        if packed is not None and cache is not None:
            return self._one_by_one(x, cache, packed)
        taps, past = self.conv if self.width else None, None if cache is None else cache.conv
        products: list[Tensor] = []
        shifted = {} if self.shift is None else self.shift(x, None if cache is None else cache.last, packed)
        vectors: dict[str, Tensor] = {}
        if self.vectors is not None:
            of_qkv = self.channels.total
            before = None if past is None else past[..., of_qkv:]
            past = None if past is None else past[..., :of_qkv]
            vectors, vectors_tail = self.vectors(shifted.get("gates", x), before, packed)
        if not shifted and fuses(x, taps, self.channels):
            others = []
            # With fewer tokens, copying the weights side by side costs more than reading x once for each.
            if x.shape[:2].numel() >= self.channels.total:
                others = [*([] if self.gate is None else [_first(self.gate).weight]), *self.gates.weights()]
            (q, k, v, tail), products = fused(x, self.qkv.weight, others, taps, past, self.channels, packed)
        else:
            q, k, v, tail = features(self._projected(x, shifted), taps, past, self.channels, packed)
        gate = products.pop(0) if products and self.gate is not None else None
        if gate is not None and isinstance(self.gate, nn.Sequential):
            gate = self.gate[1](gate)
        q, k = self._placed(*self._normed(q, k), cache, packed)
        written = self.channels.v_heads if self.rule.grouped else self.heads
        o, state, unlike = self._scanned(
            _shared(q, self.heads),
            _shared(k, written),
            _shared(v, written),
            {**self.gates(shifted.get("gates", x), products), **vectors},
            cache,
            packed,
        )
        if self.gate is not None and gate is None:
            gate = self.gate(shifted.get("gate", x))
        if self.vectors is not None:
            tail = torch.cat([tail, vectors_tail.to(tail)], dim=-1)
        last = x.new_zeros(len(tail), 0, x.shape[2]) if self.shift is None else tail_of(x, None, 1, packed)
        return self.out(self.norm(o, gate)), LayerCache(tail, state, self._places(x, cache, packed), last, unlike)

    def _check(self, x: Tensor) -> None:
        width = self.qkv.in_features
        if (
            not isinstance(x, Tensor)
            or x.dim() != 3
            or x.shape[2] != width
            or 0 in x.shape
            or not x.is_floating_point()
        ):
            given = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InputError(f"x must be a non-empty floating tensor [B, T, {width}], not {given}")

    def _one_by_one(self, x: Tensor, cache: LayerCache, packed: Sequences) -> tuple[Tensor, LayerCache]:
        """`advance` of each of the packed sequences by itself, from its own cache."""
        y, after = [], []
        for n, (start, stop) in enumerate(itertools.pairwise(packed.cu_seqlens.tolist())):
            one, now = self.advance(x[:, start:stop], cache.rows(torch.tensor([n])))
            y.append(one)
            after.append(now)
        conv, place, last = (torch.cat([getattr(one, name) for one in after]) for name in ("conv", "place", "last"))
        state, unlike = joined([one.state for one in after])
        return torch.cat(y, dim=1), LayerCache(conv, state, place, last, unlike)

    def _scanned(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        cache: LayerCache | None,
        packed: Sequences | None,
    ) -> tuple[Tensor, State, tuple[State, ...]]:
        """`scan`, and the new states as `LayerCache` holds them: together, or apart."""
        how: dict[str, Any] = {"scale": self.scale, "backend": self.backend, "chunk_size": self.chunk_size}
        given = () if cache is None else cache.apart
        if given:
            rows = [(slice(n, n + 1), slice(None)) for n in range(len(given))]
            out, after = apart(self.rule, q, k, v, gates, rows, given, **how)
            return torch.cat(out), *joined(after)
        if packed is not None and self.rule.transition is None:
            # `scan` would go one by one too, and join states that may differ in size.
            bounds = packed.cu_seqlens.tolist()
            tokens = [(slice(None), slice(*ends)) for ends in itertools.pairwise(bounds)]
            out, after = apart(self.rule, q, k, v, gates, tokens, [None] * len(tokens), **how)
            return torch.cat(out, dim=1), *joined(after)
        state, cu_seqlens = None if cache is None else cache.state, None if packed is None else packed.cu_seqlens
        return *scan(self.rule, q, k, v, gates, state=state, cu_seqlens=cu_seqlens, **how), ()

    def _projected(self, x: Tensor, shifted: dict[str, Tensor]) -> Tensor:
        """q, k and v side by side, [B, T, C], each from its own shift of x where there is one."""
        if not shifted:
            projected: Tensor = self.qkv(x)
            return projected
        weights = self.qkv.weight.split(self.channels.widths)
        return torch.cat([F.linear(shifted[name], weight) for name, weight in zip("qkv", weights, strict=True)], dim=-1)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        # A norm may return fp32 under autocast.
        normed = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)
        return (_unit(normed[0]), _unit(normed[1])) if self.channels.features == "unit" else normed

    def _placed(
        self, q: Tensor, k: Tensor, cache: LayerCache | None, packed: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        """q and k turned by the angles of their tokens, each counted from the first of its sequence."""
        if self.rope is None:
            return q, k
        place = torch.arange(q.shape[1], device=q.device)[None] if packed is None else packed.place
        angle = angles(place if cache is None else cache.place + place, self.key_dim, self.rope)
        return rotate(q, angle), rotate(k, angle.repeat_interleave(self.channels.steps, dim=1))

    def _places(self, x: Tensor, cache: LayerCache | None, packed: Sequences | None) -> Tensor:
        """How many tokens each sequence has had after x, as `LayerCache.place` holds it."""
        if self.rope is None:
            return x.new_zeros(len(x) if packed is None else len(packed.lengths), 0, dtype=torch.long)
        if packed is not None:
            return packed.lengths[:, None].long()
        return x.new_full((x.shape[0], 1), x.shape[1], dtype=torch.long) + (0 if cache is None else cache.place)


def _whole(least: int, **given: int | None) -> None:
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _kinds(**given: bool | str | None) -> None:
    allowed = {"output_norm": HEAD_NORMS, "output_gate": HEAD_GATES, "features": FEATURES, "backend": BACKENDS}
    for name, value in given.items():
        if not isinstance(value, bool | None) and value not in allowed[name]:
            raise unknown(name, value, allowed[name])


def _shifted(seen: Tensor, length: int, back: int, packed: Sequences | None) -> Tensor:
    """The tokens `back` before the last `length` of `seen` [B, T, C], zeros where they are of another sequence."""
    first = seen.shape[1] - length - back
    before = seen[:, first : first + length]
    return before if packed is None else torch.where((packed.place >= back).unsqueeze(-1), before, 0)


def _unit(x: Tensor) -> Tensor:
    """x [.., K] over its norm, in x's dtype."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, eps=LEAST_NORM).to(x.dtype)


def _shared(x: Tensor, heads: int) -> Tensor:
    """x [B, T, H, ..] for more heads: head h is head h // (heads / H) of x."""
    groups = heads // x.shape[2]
    return x if groups == 1 else x.unsqueeze(3).expand(-1, -1, -1, groups, -1).flatten(2, 3)
