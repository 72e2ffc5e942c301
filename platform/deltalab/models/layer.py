"""A rule as a layer that mixes tokens: projections, convolution, positions, gates, the rule, output norm and gate."""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.errors import InputError, unknown
from deltalab.models.parts.bonus import TokenBonus, without_bonus
from deltalab.models.parts.cache import CacheSize
from deltalab.models.parts.cache import LayerCache as LayerCache
from deltalab.models.parts.canon import CANON, before_convolution
from deltalab.models.rule_inputs.first_values import RANK, ValueGate, ValueResidual
from deltalab.models.rule_inputs.gates import Gates, Vectors, first_linear, own_reader, unit
from deltalab.models.rule_inputs.gates import shard_gates as shard_gates
from deltalab.models.rule_inputs.latent import Latent, kept, refusal
from deltalab.models.rule_inputs.low_rank import INSIDE, OUTPUT_GATE
from deltalab.models.rule_inputs.token_shift import EACH, TokenShift
from deltalab.models.start import Ones, Started, Uniform, linear
from deltalab.models.start import initialize as initialize
from deltalab.ops.fused.convolution import FEATURES, Channels, features, fused, fuses, tail_of
from deltalab.ops.fused.norm import EPS, HEAD_GATES, HEAD_NORMS, HeadNorm, RMSNorm
from deltalab.ops.packing import Packing, Sequences
from deltalab.ops.recurrence import Backend
from deltalab.ops.rotary import angles, rotate
from deltalab.ops.scan import BACKENDS, apart, joined, scan
from deltalab.registry import get_rule
from deltalab.rule import State, UpdateRule


class RuleLayer(Started):
    """A rule as a layer, which maps x [B, T, d] to y [B, T, d].

    Its parameters start from torch's global generator, as those of torch's layers do.

    With `kv_rank`, the cache of a rule that is `grouped` (attention) holds latents in place of k and v, if these are
    the latents' own products: there is no convolution, activation or norm of k, and positions turn at most the
    channels that are not from the latent (`rope_dim`).

    One projection and one causal depthwise convolution make q, k and v, with a k and a v for each of the rule's steps.
    Then q, k and v get the activation and the norm of the rule's `features`. The unit norm comes before any gate scales
    k.

    Args:
        rule: The rule, or its name.
        d_model: d.
        heads: H.
        key_dim: K, the width of a head's keys; None for d_model / heads.
        value_dim: V, the width of a head's values; None for `key_dim`.
        conv: The width of the convolution; 0 for none.
        canon: Whether q, k and v have a canon layer, x_t + sum_i w_i x_{t-i} over four tokens, before the convolution.
        qk_heads: The heads that have their own q and k, which groups of heads / qk_heads heads share; None for `heads`.
        kv_heads: The heads that have their own k and v, shared in the same way; None for `heads`. At most one of
            `qk_heads` and `kv_heads` is less than `heads`.
        qk_norm: Whether each head's q and k get an RMS norm with weights [K], after the activation and before the unit
            norm.
        rope: The base of rotary positions on q and k; None for no positions. The steps of a token share its place.
        rope_dim: The last channels of each q and k that have the rotary positions; None for all. With `kv_rank` the
            heads share these channels of k, which come from x, with or without `rope`.
        q_rank: The width of the latent that q comes from, as in `Latent`; None for q from x.
        kv_rank: The width of the latent that k and v of all heads come from; None for k and v from x. With one of the
            ranks, PyTorch's operators convolve on a GPU, too.
        token_shift: Whether q, k, v, the gates and the output gate each read a learned mean of x_t and x_{t-1}. With
            `each`, the gates and vectors do not share one mean. With {rank: r}, the means also depend on the token, as
            in `TokenShift`.
        output_norm: The norm of each head's output, a kind of `HeadNorm`.
        output_gate: The gate of the output, a kind of `HeadNorm`.
        gate_rank: The width r of the output gate's projection W_1 W_2 x through r channels; None for one matrix, 0 for
            `value_dim`.
        features: The activation of q, k and v, a kind of `FEATURES`; None for that of the rule.
        scale: The factor of the output; None for that of the rule, which is K ** -0.5 for nearly all rules.
        low_rank_bias: Whether the second matrix of each projection W_1 W_2 x has a bias, or the names of those whose
            matrix has one: the symbols of gates, and `output_gate`.
        low_rank_activation: The function, `tanh` or `sigmoid`, between the two matrices of projections W_1 W_2 x, by
            these names.
        conv_bias: Whether the convolution has a bias, which starts as its weights do. The kernel does not take it:
            PyTorch's operators then convolve on a GPU, too.
        skip: Whether the output of each head gets D v before the norm, with a learned D that starts at 1.
        bonus: Whether the normed output of each head gets (w * r_t * k_t) v_t, with a learned w [H, K] that starts at
            0, for the r and k of the rule's operands.
        value_residual: The arguments of `ValueResidual`, which mixes v, after its convolution and activation, with that
            of a model's first layer, or the `rank` of a `ValueGate`; None for v alone.
        norm_eps: The number that norms add to a mean square.
        out_std: The standard deviation at which the output projection starts; None for (heads value_dim) ** -0.5.
        chunk_size: The tokens of a chunk in the parallel form.
        backend: The code that runs the rule: "auto", or a name of `BACKENDS`.

    Raises:
        InputError: No rule has this name, a setting is out of range, or `heads` does not divide `d_model` and there is
            no `key_dim`.
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
        canon: bool = False,
        qk_heads: int | None = None,
        kv_heads: int | None = None,
        qk_norm: bool = False,
        rope: float | None = None,
        rope_dim: int | None = None,
        q_rank: int | None = None,
        kv_rank: int | None = None,
        token_shift: bool | str | Mapping[str, Any] = False,
        output_norm: bool | str = True,
        output_gate: bool | str = True,
        gate_rank: int | None = None,
        features: str | None = None,
        scale: float | None = None,
        low_rank_bias: bool | Collection[str] = False,
        low_rank_activation: Mapping[str, str] | None = None,
        conv_bias: bool = False,
        skip: bool = False,
        bonus: bool = False,
        value_residual: Mapping[str, Any] | None = None,
        norm_eps: float = EPS,
        out_std: float | None = None,
        chunk_size: int = 64,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        rule = rule if isinstance(rule, UpdateRule) else get_rule(rule)
        _whole(1, d_model=d_model, heads=heads, key_dim=key_dim, value_dim=value_dim)
        _whole(0, gate_rank=gate_rank)
        _whole(1, qk_heads=qk_heads, kv_heads=kv_heads, chunk_size=chunk_size)
        _whole(1, rope_dim=rope_dim, q_rank=q_rank, kv_rank=kv_rank)
        _whole(0, conv=conv)
        _kinds(output_norm=output_norm, output_gate=output_gate, features=features, backend=backend)
        if key_dim is None and d_model % heads:
            raise InputError(f"d_model {d_model} must be a multiple of heads {heads}, or give key_dim")
        key_dim = key_dim or d_model // heads
        value_dim = value_dim or key_dim
        for name, count in (("qk_heads", qk_heads), ("kv_heads", kv_heads)):
            if count is not None and heads % count:
                raise InputError(f"{name} must divide heads {heads}, not be {count}")
        if (qk_heads or heads) < heads and (kv_heads or heads) < heads:
            raise InputError(f"qk_heads {qk_heads} and kv_heads {kv_heads}: at most one may be less than heads {heads}")
        if norm_eps < 0:
            raise InputError(f"norm_eps must be at least 0, not {norm_eps!r}")
        if rope is not None and (isinstance(rope, bool) or rope <= 1 or (rope_dim is None and key_dim % 2)):
            raise InputError(f"rope takes a base above 1 and an even key_dim, not {rope!r} and {key_dim}")
        own_heads = min(qk_heads or heads, kv_heads or heads)
        sizes = {"heads": heads, "own_heads": own_heads, "key_dim": key_dim}
        if reason := refusal(q_rank, kv_rank, rope_dim, **sizes, rope=rope is not None, token_shift=token_shift):
            raise InputError(reason)
        self.rule = rule
        self.heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        # A canon layer and the convolution after it are one convolution.
        self.width = (conv or 1) + CANON - 1 if canon else conv
        self.rope, self.chunk_size, self.backend = rope, chunk_size, backend
        self.rope_dim = rope_dim or key_dim
        kind, silu_of_v = (rule.features, rule.silu_of_v) if features is None else FEATURES[features]
        self.channels = Channels(heads, qk_heads or heads, key_dim, value_dim, rule.steps, kind, silu_of_v, kv_heads)
        self.qkv: nn.Linear | Latent
        if q_rank is None and kv_rank is None:
            self.qkv = linear(d_model, self.channels.total)
        else:
            ranks = {"q_rank": q_rank, "kv_rank": kv_rank}
            self.qkv = Latent(d_model, self.channels, **ranks, shared=rope_dim or 0, eps=norm_eps)
        placed = rope is None or rope_dim is not None
        plain = placed and not self.width and not qk_norm and self.channels.features == "raw"
        self.keeps_latents = kv_rank is not None and rule.grouped and plain
        # Rows are wider than keys, whose width a rule's own scale is for.
        self.scale = rule.scale(key_dim) if self.keeps_latents and scale is None else scale
        self.canon = self.drawn("canon", Uniform(CANON**-0.5), CANON, self.channels.total) if canon else None
        self.conv = self.drawn("conv", Uniform(conv**-0.5), conv, self.channels.total) if conv else None
        if conv_bias and not conv:
            raise InputError("conv_bias has no effect with conv 0: leave it out")
        self.conv_bias = self.drawn("conv_bias", Uniform(conv**-0.5), self.channels.total) if conv_bias else None
        if skip and rule.steps > 1:
            raise InputError(f"skip adds a token's v: rule '{rule.name}' has {rule.steps} values for each token")
        self.skip = self.drawn("skip", Ones(), heads) if skip else None
        if bonus and (reason := without_bonus(rule)):
            raise InputError(reason)
        self.bonus = TokenBonus(rule, heads, key_dim) if bonus else None
        self.value_residual: ValueResidual | ValueGate | None = None
        if value_residual and RANK in value_residual:
            self.value_residual = ValueGate(d_model, self.channels.v_heads * value_dim, value_residual[RANK])
        elif value_residual:
            self.value_residual = ValueResidual(**value_residual)
        self.gives_values = False
        """Whether the new caches have the values, which later layers mix with theirs."""
        self.q_norm = RMSNorm(key_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(key_dim, norm_eps) if qk_norm else None
        inside = dict(low_rank_activation or {})
        self.gate_inside = INSIDE[inside.pop(OUTPUT_GATE)] if OUTPUT_GATE in inside else nn.Identity()
        sizes_of_rule = d_model, heads, key_dim, value_dim, rule.steps
        self.gates = Gates(rule.gates, *sizes_of_rule, bias=low_rank_bias, inside=inside)
        vectors = any(gate.features is not None for gate in rule.gates.values())
        kept = max(self.width - 1, 0)
        self.vectors = Vectors(rule.gates, d_model, heads, key_dim, value_dim, conv, kept) if vectors else None
        self.norm = HeadNorm(value_dim, heads=heads, norm=output_norm, gate=output_gate, eps=norm_eps)
        self.gate: nn.Linear | nn.Sequential | None = None
        if output_gate not in (False, "none"):
            width = heads * value_dim
            if gate_rank is None:
                self.gate = linear(d_model, width)
            else:
                rank = gate_rank or value_dim
                biased = low_rank_bias if isinstance(low_rank_bias, bool) else OUTPUT_GATE in low_rank_bias
                second = linear(rank, width, bias=biased, widens=False)
                self.gate = nn.Sequential(linear(d_model, rank), second)
        of_gates = [*self.gates.project, *(() if self.vectors is None else self.vectors.project)]
        of_token = token_shift if isinstance(token_shift, Mapping) else {}
        if token_shift == EACH or of_token:
            of_gates = [own_reader(name) for name in of_gates]
        elif of_gates:
            of_gates = ["gates"]
        more_readers = [*of_gates, *(["gate"] if self.gate is not None else [])]
        self.shift = TokenShift(d_model, ["q", "k", "v", *more_readers], **of_token) if token_shift else None
        self.out = linear(heads * value_dim, d_model, std=out_std)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Computes y [B, T, d].

        Args:
            x: The inputs, [B, T, d].
            cu_seqlens: The bounds [N + 1] of N sequences that lie in a row one after the other, from 0 to T. Takes
                B = 1.
            attention_mask: 0 for padding, which may stand anywhere, [B, T]. The other tokens of a row are one sequence.
                y is 0 for padding.

        Raises:
            InputError: x has another form, there are both `cu_seqlens` and `attention_mask`, or one of them does not
                fit x.
        """
        self._check(x)
        packing = Packing.of_padded(x, attention_mask, cu_seqlens)
        if packing is None:
            return self.advance(x, cu_seqlens=cu_seqlens)[0]
        return packing.unpack(self.advance(packing.pack(x), cu_seqlens=packing.cu_seqlens)[0])

    def advance(
        self,
        x: Tensor,
        cache: LayerCache | None = None,
        *,
        cu_seqlens: "Tensor | Sequences | None" = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, LayerCache]:
        """Computes y [B, T, d] for tokens that follow those of the cache, and the new cache.

        Args:
            x: The inputs, [B, T, d].
            cache: The memory of the tokens before; None if there are none.
            cu_seqlens: As in `forward`, or its `Sequences`, which a model makes once for all layers. Caches are then
                those of the N sequences.
            first: The values of the first layer for these tokens, which a layer with a value residual needs.

        Raises:
            InputError: x has another form, or the cache holds another number of sequences.
        """
        self._check(x)
        packed = None if cu_seqlens is None else Sequences.of(cu_seqlens, x)
        cached, sequences = len(x) if cache is None else len(cache.conv), len(x if packed is None else packed.lengths)
        if cache is not None and cached != (1 if packed is not None and packed.rest is not None else sequences):
            raise InputError(f"the cache is of {cached} sequences, but x holds {sequences}")
        if packed is not None and cache is not None:
            return (self._one_by_one if packed.rest is None else self._going_on)(x, cache, packed, first)
        taps = self.conv if self.canon is None else before_convolution(self.canon, self.conv)
        past = None if cache is None else cache.conv
        products: list[Tensor] = []
        scanned: Callable[..., tuple[Tensor, State, tuple[State, ...]]] = self._scanned
        shifted = {} if self.shift is None else self.shift(x, None if cache is None else cache.last, packed)
        vectors: dict[str, Tensor] = {}
        if self.vectors is not None:
            qkv_width = self.channels.total
            vectors_past = None if past is None else past[..., qkv_width:]
            past = None if past is None else past[..., :qkv_width]
            vectors, vectors_tail = self.vectors(shifted.get("gates", x), vectors_past, packed, shifted)
        latent = isinstance(self.qkv, Latent)
        if not latent and self.conv_bias is None and not shifted and fuses(x, taps, self.channels):
            more_weights = []
            # With fewer tokens, copying the weights side by side costs more than reading x once for each weight.
            if x.shape[:2].numel() >= self.channels.total:
                more_weights = [*([] if self.gate is None else [first_linear(self.gate).weight]), *self.gates.weights()]
            weight = cast(nn.Linear, self.qkv).weight
            (q, k, v, tail), products = fused(x, weight, more_weights, taps, past, self.channels, packed)
        else:
            qkv, latents = self.qkv(x) if latent else (self._projected(x, shifted), x[..., :0])
            scanned = partial(self._over_latents, latents) if self.keeps_latents else scanned
            q, k, v, tail = features(qkv, taps, past, self.channels, packed, self.conv_bias)
        values = v if self.gives_values else None
        if self.value_residual is not None:
            assert first is not None
            v = self.value_residual(v, first, shifted.get("v", x))
        gate = products.pop(0) if products and self.gate is not None else None
        q, k = self._placed(*self._normed(q, k), cache, packed)
        key_heads = self.channels.v_heads if self.rule.grouped else self.heads
        q, k, v = _shared(q, self.heads), _shared(k, key_heads), _shared(v, key_heads)
        gates = {**self.gates(shifted.get("gates", x), products, shifted), **vectors}
        o, state, apart_states = scanned(q, k, v, gates, cache, packed)
        if self.skip is not None:
            o = o + (self.skip[:, None] * _shared(v, self.heads)).to(o.dtype)
        bonus = None if self.bonus is None else self.bonus(q, k, v, gates).to(o.dtype)
        if self.gate is not None and gate is None:
            gate = first_linear(self.gate)(shifted.get("gate", x))
        if isinstance(self.gate, nn.Sequential):
            gate = self.gate[1](self.gate_inside(cast(Tensor, gate)))
        if self.vectors is not None:
            tail = torch.cat([tail, vectors_tail.to(tail)], dim=-1)
        last = x.new_zeros(len(tail), 0, x.shape[2]) if self.shift is None else tail_of(x, None, 1, packed)
        new = LayerCache(tail, state, self._places(x, cache, packed), last, apart_states, values=values)
        return self.out(self.norm(o, gate, bonus)), new

    def cache_size(self, cache: LayerCache) -> CacheSize:
        """Returns the number of elements in a cache, by what they are for. They sum up to `cache.numel()`."""
        heads = self.channels.v_heads if self.rule.grouped else self.heads
        empty = self.rule.start(*(cache.conv.new_empty(1, 1, heads, width) for width in (self.key_dim, self.value_dim)))
        recurrent = kv = 0
        for state in cache.apart or (cache.state,):
            for part, before in zip(state, empty[:1] if self.keeps_latents else empty, strict=True):
                if part.shape[1:] == before.shape[1:]:
                    recurrent += part.numel()
                else:
                    kv += part.numel()
        second = 0 if cache.beside is None else cache.beside.numel()
        return CacheSize(recurrent, kv, cache.numel() - recurrent - kv - second)

    def _check(self, x: Tensor) -> None:
        width = self.qkv.in_features
        if (
            not isinstance(x, Tensor)
            or x.dim() != 3
            or x.shape[2] != width
            or 0 in x.shape
            or not x.is_floating_point()
        ):
            description = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InputError(f"x must be a non-empty floating tensor [B, T, {width}], not {description}")

    def _going_on(
        self, x: Tensor, cache: LayerCache, packed: Sequences, first: Tensor | None
    ) -> tuple[Tensor, LayerCache]:
        """Advances the first of the packed sequences from the cache, and the others, whose cache it returns."""
        assert packed.rest is not None
        stop, steps = x.shape[1] - packed.rest.place.shape[1], self.channels.steps
        of_first = (None, None) if first is None else (first[:, : steps * stop], first[:, steps * stop :])
        y, new = self.advance(x[:, :stop], cache, first=of_first[0])
        others, after = self.advance(x[:, stop:], cu_seqlens=packed.rest, first=of_first[1])
        if new.values is not None and after.values is not None:
            after = replace(after, values=torch.cat([new.values, after.values], dim=1))
        return torch.cat([y, others], dim=1), after

    def _one_by_one(
        self, x: Tensor, cache: LayerCache, packed: Sequences, first: Tensor | None
    ) -> tuple[Tensor, LayerCache]:
        """Advances each of the packed sequences by itself, from its own cache."""
        outputs, caches = [], []
        for n, (start, stop) in enumerate(itertools.pairwise(packed.cu_seqlens.tolist())):
            steps = self.channels.steps
            of_first = None if first is None else first[:, steps * start : steps * stop]
            output, next_cache = self.advance(x[:, start:stop], cache.rows(torch.tensor([n])), first=of_first)
            outputs.append(output)
            caches.append(next_cache)
        conv, place, last = (
            torch.cat([getattr(output, name) for output in caches]) for name in ("conv", "place", "last")
        )
        state, unlike = joined([output.state for output in caches])
        given = [output.values for output in caches if output.values is not None]
        values = torch.cat(given, dim=1) if given else None
        return torch.cat(outputs, dim=1), LayerCache(conv, state, place, last, unlike, values=values)

    def _scanned(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        cache: LayerCache | None,
        packed: Sequences | None,
    ) -> tuple[Tensor, State, tuple[State, ...]]:
        """Scans, and returns o and the new states as `LayerCache` holds them: together, or apart."""
        options: dict[str, Any] = {"scale": self.scale, "backend": self.backend, "chunk_size": self.chunk_size}
        states = () if cache is None else cache.apart
        if states:
            rows = [(slice(n, n + 1), slice(None)) for n in range(len(states))]
            outputs, next_states = apart(self.rule, q, k, v, gates, rows, states, **options)
            return torch.cat(outputs), *joined(next_states)
        if packed is not None and self.rule.transition is None:
            # `scan` would run the sequences one by one too, but would join their states, which may differ in size.
            bounds = packed.cu_seqlens.tolist()
            tokens = [(slice(None), slice(*ends)) for ends in itertools.pairwise(bounds)]
            outputs, next_states = apart(self.rule, q, k, v, gates, tokens, [None] * len(tokens), **options)
            return torch.cat(outputs, dim=1), *joined(next_states)
        state, cu_seqlens = None if cache is None else cache.state, None if packed is None else packed.cu_seqlens
        return *scan(self.rule, q, k, v, gates, state=state, cu_seqlens=cu_seqlens, **options), ()

    def _over_latents(
        self,
        latents: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        cache: LayerCache | None,
        packed: Sequences | None,
    ) -> tuple[Tensor, State, tuple[State, ...]]:
        """Does what `_scanned` does, with rows of latents for states.

        Tokens at the start of a sequence are mixed by their k and v, which are narrower, and later ones by rows.
        """
        projections = cast(Latent, self.qkv)
        rows = projections.rows(latents, k)
        if cache is None:
            o, state, parts = self._scanned(q, k, v, gates, None, packed)
            ends = [rows.shape[1]] if packed is None else packed.cu_seqlens.tolist()[1:]
            counts = [part[0].shape[2] for part in parts or (state,) * len(ends)]
            return o, *kept(rows, ends, counts)
        apart_before = tuple(projections.state(*part) for part in cache.apart)
        cache = replace(cache, state=() if apart_before else projections.state(*cache.state), apart=apart_before)
        keys, values = projections.state(rows)
        o, state, parts = self._scanned(projections.queries(q), keys, values, gates, cache, packed)
        return projections.values(o), state[:1], tuple(part[:1] for part in parts)

    def _projected(self, x: Tensor, shifted: dict[str, Tensor]) -> Tensor:
        """Returns q, k and v side by side, [B, T, C]. With token shift, `shifted` has an input for each of them."""
        if not shifted:
            projected: Tensor = self.qkv(x)
            return projected
        weights = cast(nn.Linear, self.qkv).weight.split(self.channels.widths)
        return torch.cat([F.linear(shifted[name], weight) for name, weight in zip("qkv", weights, strict=True)], dim=-1)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        # Cast back, because a norm may return fp32 under autocast.
        normed = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)
        return (unit(normed[0]), unit(normed[1])) if self.channels.features == "unit" else normed

    def _placed(
        self, q: Tensor, k: Tensor, cache: LayerCache | None, packed: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        """Rotates q and k by the angles of their positions, which count from the first token of a sequence."""
        if self.rope is None:
            return q, k
        place = torch.arange(q.shape[1], device=q.device)[None] if packed is None else packed.place
        angle = angles(place if cache is None else cache.place + place, self.rope_dim, self.rope)
        return rotate(q, angle), rotate(k, angle.repeat_interleave(self.channels.steps, dim=1))

    def _places(self, x: Tensor, cache: LayerCache | None, packed: Sequences | None) -> Tensor:
        """Returns the number of tokens of each sequence up to the end of x, as `LayerCache.place` holds it."""
        if self.rope is None:
            return x.new_zeros(len(x) if packed is None else len(packed.lengths), 0, dtype=torch.long)
        if packed is not None:
            return packed.lengths[:, None].long()
        return x.new_full((x.shape[0], 1), x.shape[1], dtype=torch.long) + (0 if cache is None else cache.place)


def _whole(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _kinds(**values: bool | str | None) -> None:
    allowed = {"output_norm": HEAD_NORMS, "output_gate": HEAD_GATES, "features": FEATURES, "backend": BACKENDS}
    for name, value in values.items():
        if not isinstance(value, bool | None) and value not in allowed[name]:
            raise unknown(name, value, allowed[name])


def _shared(x: Tensor, heads: int) -> Tensor:
    """Repeats x [B, T, H, ...] for more heads: head h is head h // (heads / H) of x."""
    groups = heads // x.shape[2]
    return x if groups == 1 else x.unsqueeze(3).expand(-1, -1, -1, groups, -1).flatten(2, 3)
