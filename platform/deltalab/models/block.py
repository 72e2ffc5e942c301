"""A block of a model: a rule's layer or a module, perhaps beside a second one, canon layers and an MLP."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.models.layer import RuleLayer
from deltalab.models.parts.cache import CacheSize, LayerCache
from deltalab.models.parts.canon import CANON
from deltalab.models.parts.depth import DepthNorm, Outputs
from deltalab.models.parts.experts import Experts
from deltalab.models.parts.images import scans_of
from deltalab.models.parts.module_layer import ModuleLayer
from deltalab.models.parts.squared_relu import SquaredReLU, squared_relu_width
from deltalab.models.rule_inputs.token_shift import TokenShift, shifted
from deltalab.models.settings.spec_checks import ROPE
from deltalab.models.spec import ModelSpec
from deltalab.models.start import Linear, Matrices, Started, Uniform, linear
from deltalab.ops.backends import automatic
from deltalab.ops.fused.convolution import tail_of
from deltalab.ops.fused.norm import ResidualLayerNorm, ResidualNorm, RMSNorm
from deltalab.ops.packing import Sequences
from deltalab.own_module import OwnModule

LAST = ("mixer.out", "beside.mixer.out", "mlp.out", "mlp.shared.out")
"""The last matrices of mixers and MLPs in a block."""

NONE_SHIFTED: Mapping[str, Tensor] = MappingProxyType({})
"""The means that an MLP without token shift reads."""


def swiglu_width(d_model: int) -> int:
    """Returns the default hidden width of `SwiGLU`: 8/3 d, rounded up to a multiple of 8."""
    return -(-8 * d_model // 24) * 8


def mlp_width(d_model: int, kind: bool | str) -> int:
    """Returns the default hidden width of an MLP of a kind of `ModelSpec.mlp`."""
    if kind is True:
        return swiglu_width(d_model)
    return squared_relu_width(d_model, gated=kind == "gated_relu2")


class SwiGLU(nn.Module):
    """An MLP, W_3 (SiLU(W_1 x) * W_2 x).

    Args:
        d_model: The width of x.
        hidden: The width of W_1 x; None for `swiglu_width`.
        out_std: The standard deviation at which W_3 starts.
    """

    def __init__(self, d_model: int, *, hidden: int | None = None, out_std: float) -> None:
        super().__init__()
        self.hidden = hidden or swiglu_width(d_model)
        self.into = linear(d_model, 2 * self.hidden)
        self.out = linear(self.hidden, d_model, std=out_std)

    def forward(self, x: Tensor, canon: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Computes the MLP of x [..., d], with a canon layer on W_1 x and W_2 x if there is one."""
        if canon is not None:
            hidden = _swiglu(canon(self.into(x)))
        elif x.device.type == "cpu":
            # Multiply twice: the halves of one product would be strided, and backward would copy their gradients side
            # by side.
            gate, up = (F.linear(x, half) for half in self.into.weight.chunk(2))
            hidden = F.silu(gate) * up
        else:
            hidden = _swiglu(self.into(x))
        out: Tensor = self.out(hidden)
        return out


def _swiglu(x: Tensor) -> Tensor:
    kernel = automatic(x.device.type).swiglu
    if kernel is not None and x.dtype != torch.float64:
        return kernel(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def make_mlp(spec: ModelSpec, shrink: float) -> SwiGLU | SquaredReLU | Experts:
    """Makes the MLP of a block, or its experts.

    Args:
        spec: The specification of the layer, `ModelSpec.at`.
        shrink: The factor of the standard deviation at which last matrices start.
    """
    given = spec.experts
    if isinstance(spec.mlp, str):
        hidden = spec.mlp_width or mlp_width(spec.d_model, spec.mlp)
        gated = spec.mlp == "gated_relu2"
        return SquaredReLU(spec.d_model, hidden=hidden, gated=gated, out_std=shrink * hidden**-0.5)
    if given is None:
        width = spec.mlp_width or 8 * spec.d_model / 3
        return SwiGLU(spec.d_model, hidden=spec.mlp_width, out_std=shrink * width**-0.5)
    used = given["top"] + given["shared"]
    hidden = given["width"] or -(-(spec.mlp_width or swiglu_width(spec.d_model)) // (8 * used)) * 8
    shared, all_shared = None, given["shared"] * hidden
    if all_shared:
        shared = SwiGLU(spec.d_model, hidden=all_shared, out_std=shrink * all_shared**-0.5)
    how = {"hidden": hidden, "shared": shared, "out_std": shrink * hidden**-0.5, "balance": given["balance"]}
    return Experts(spec.d_model, given["count"], given["top"], **how)


def make_norm(spec: ModelSpec) -> ResidualNorm | ResidualLayerNorm | DepthNorm:
    """Makes what a mixer, an MLP or the logits read through: the norm of all outputs before them."""
    if spec.attention_residuals:
        return DepthNorm(spec.d_model, spec.attention_residuals, spec.norm_eps)
    return make_sum_norm(spec)


def make_sum_norm(spec: ModelSpec) -> ResidualNorm | ResidualLayerNorm:
    """Makes a norm of the kind `ModelSpec.norm`, of a sum."""
    kind = ResidualLayerNorm if spec.norm == "layer" else ResidualNorm
    return kind(spec.d_model, spec.norm_eps)


def make_mixer(spec: ModelSpec, depth: int) -> RuleLayer | ModuleLayer:
    """Makes the mixer of a block.

    Args:
        spec: The specification of the layer, `ModelSpec.at`.
        depth: The number of blocks of the whole model.
    """
    rule = spec.make_rule()
    if isinstance(rule, OwnModule):
        return ModuleLayer(rule, spec.of_module)
    key_dim, value_dim = spec.head_dims
    return RuleLayer(
        rule,
        spec.d_model,
        spec.heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=spec.conv,
        canon="B" in spec.canon,
        qk_heads=spec.own_qk_heads,
        kv_heads=spec.kv_heads,
        qk_norm=spec.qk_norm,
        rope=(ROPE if spec.rope is True else spec.rope) if spec.rope else None,
        rope_dim=spec.rope_dim,
        q_rank=spec.q_rank,
        kv_rank=spec.kv_rank,
        token_shift=spec.token_shift,
        output_norm=spec.output_norm,
        output_gate=spec.output_gate,
        gate_rank=spec.gate_rank,
        features=spec.features,
        scale=spec.scale,
        low_rank_bias=spec.low_rank_bias,
        low_rank_activation=spec.low_rank_activation,
        conv_bias=spec.conv_bias,
        skip=spec.skip,
        bonus=spec.bonus,
        value_residual=spec.value_residual,
        norm_eps=spec.norm_eps,
        out_std=(2 * depth) ** -0.5 * (spec.heads * value_dim) ** -0.5,
        chunk_size=spec.chunk_size,
        backend="auto" if rule.transition is None else spec.backend,
    )


class Canon(Started):
    """A canon layer, x_t + sum_i w_i x_{t-i}: a causal convolution of four tokens for each channel, beside x itself.

    References:
        Allen-Zhu 2025, "Physics of language models: part 4.1", ssrn.com/abstract=5240330.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.taps = self.drawn("taps", Uniform(CANON**-0.5), CANON, width)

    def forward(self, x: Tensor, past: Tensor | None, packed: Sequences | None) -> tuple[Tensor, Tensor]:
        """Computes y [B, T, C], and the past for the tokens that follow.

        Args:
            x: The inputs, [B, T, C].
            past: The inputs before them, [B, 3, C], or of each sequence if x is packed; None for zeros.
            packed: The sequences that lie in x one after the other.
        """
        if packed is not None and packed.rest is not None and past is not None:
            stop = x.shape[1] - packed.rest.place.shape[1]
            others, tail = self(x[:, stop:], None, packed.rest)
            return torch.cat([self(x[:, :stop], past, None)[0], others], dim=1), tail
        if packed is not None and past is not None:
            bounds = itertools.pairwise(packed.cu_seqlens.tolist())
            parts = [self(x[:, i:j], past[n : n + 1], None) for n, (i, j) in enumerate(bounds)]
            return torch.cat([y for y, _ in parts], dim=1), torch.cat([tail for _, tail in parts])
        before = x.new_zeros(x.shape[0], CANON - 1, x.shape[-1]) if past is None else past.to(x)
        inputs, taps = torch.cat([before, x], dim=1), self.taps.to(x)
        y = x
        for back, tap in enumerate(taps):
            y = y + tap * shifted(inputs, x.shape[1], back, packed)
        return y, tail_of(x, past, CANON - 1, packed)


class Beside(nn.Module):
    """A second mixer, whose output y' joins that of the first: (norm(y) + norm'(y')) / 2, with RMS norms with weights.

    Args:
        mixer: The mixer.
        d_model: The width of the outputs.
        eps: The number that the norms add to a mean square.
        size: The factor of the outputs.

    References:
        Dong et al. 2024 (Hymba), arXiv:2411.13676, Eq. 5.
    """

    def __init__(self, mixer: RuleLayer | ModuleLayer, d_model: int, eps: float, size: float) -> None:
        super().__init__()
        self.mixer, self.size = mixer, size
        self.first_norm, self.norm = RMSNorm(d_model, eps), RMSNorm(d_model, eps)

    def forward(
        self,
        x: Tensor,
        first: Tensor,
        new: LayerCache,
        cache: LayerCache | None,
        cu_seqlens: "Tensor | Sequences | None",
    ) -> tuple[Tensor, LayerCache]:
        """Computes the joint output [B, T, d], and the cache of both mixers.

        Args:
            x: The inputs of both, [B, T, d].
            first: The output of the first mixer.
            new: The new cache of the first mixer.
            cache: The cache of the second; None if there are no tokens before.
            cu_seqlens: As in `RuleLayer.advance`.
        """
        second, after = self.mixer.advance(x, cache, cu_seqlens=cu_seqlens)
        both = self.first_norm(first) + self.norm(second)
        return (0.5 * self.size * both).to(first.dtype), replace(new, beside=after)


class Block(nn.Module):
    """A block of a model: x + mixer(norm(x)), then x + mlp(norm(x)) if there is an MLP.

    Canon layers A, C and D stand before the mixer, before the MLP, and before the activation of the MLP. B stands in
    the mixer, on q, k and v. A token shift of the MLP stands after C.

    The block leaves its last sum to the norm that follows the block. So it takes and returns two summands, x and
    branch. A branch of None is zero. With attention over depth, x is all outputs before branch.

    Args:
        spec: The specification of the layer, `ModelSpec.at`.
        depth: The number of blocks of the whole model.
    """

    def __init__(self, spec: ModelSpec, depth: int) -> None:
        super().__init__()
        # The branches of all layers add up. This factor makes the variance of their sum independent of depth.
        shrink = (2 * depth) ** -0.5
        self.norm = make_norm(spec)
        self.mixer = make_mixer(spec, depth)
        self.scans = scans_of(spec)
        self.beside: Beside | None = None
        if (second := spec.second()) is not None:
            self.beside = Beside(make_mixer(second, depth), spec.d_model, spec.norm_eps, shrink)
        self.mlp: SwiGLU | SquaredReLU | Experts | None = None
        self.shift: TokenShift | None = None
        if spec.mlp and spec.block == "transformer":
            self.mlp_norm = make_norm(spec)
            self.mlp = make_mlp(spec, shrink)
            if spec.mlp_shift:
                gated = ["gate"] if isinstance(self.mlp, SquaredReLU) and self.mlp.gate is not None else []
                self.shift = TokenShift(spec.d_model, ["into", *gated])
        inside = 0
        if isinstance(self.mlp, SwiGLU | SquaredReLU):
            inside = self.mlp.into.out_features
        widths = {"A": spec.d_model, "C": spec.d_model, "D": inside}
        if spec.init_std is not None:
            for path, part in self.named_modules():
                if isinstance(part, Linear | Matrices):
                    part.restart(spec.init_std * (shrink if path in LAST else 1.0))
        self.canon = nn.ModuleDict({place: Canon(widths[place]) for place in spec.canon if place in widths})

    def forward(
        self,
        x: Tensor | Outputs,
        branch: Tensor | None,
        cache: LayerCache | None = None,
        cu_seqlens: "Tensor | Sequences | None" = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor | Outputs, Tensor, LayerCache]:
        """Computes the two summands [B, T, d] of the block's output, and the new cache.

        Args:
            x: The first summand of the input, [B, T, d], or the outputs before branch.
            branch: The second summand, [B, T, d]; None for zero.
            cache: As in `RuleLayer.advance`.
            cu_seqlens: As in `RuleLayer.advance`.
            first: As in `RuleLayer.advance`.
        """
        if self.canon or self.shift is not None:
            return self._with_tails(x, branch, cache, cu_seqlens, first)
        x, normed = self.norm(x, branch)
        branch, cache = self._scanned(normed, cache, cu_seqlens, first)
        if self.mlp is not None:
            x, normed = self.mlp_norm(x, branch)
            branch, cache = self._fed(normed, cache)
        return x, branch, cache

    def _scanned(
        self, x: Tensor, cache: LayerCache | None, cu_seqlens: "Tensor | Sequences | None", first: Tensor | None
    ) -> tuple[Tensor, LayerCache]:
        if self.scans is None:
            return self._mixed(x, cache, cu_seqlens, first)
        mixed: tuple[Tensor, LayerCache] = self.scans(x, lambda scans: self._mixed(scans, None, None, first))
        return mixed

    def _mixed(
        self, x: Tensor, cache: LayerCache | None, cu_seqlens: "Tensor | Sequences | None", first: Tensor | None
    ) -> tuple[Tensor, LayerCache]:
        if isinstance(self.mixer, ModuleLayer):
            y, new = self.mixer.advance(x, cache, cu_seqlens=cu_seqlens)
        else:
            y, new = self.mixer.advance(x, cache, cu_seqlens=cu_seqlens, first=first)
        if self.beside is None:
            return y, new
        both: tuple[Tensor, LayerCache] = self.beside(x, y, new, None if cache is None else cache.beside, cu_seqlens)
        return both

    def _fed(
        self,
        x: Tensor,
        cache: LayerCache,
        canon: Callable[[Tensor], Tensor] | None = None,
        shifted: Mapping[str, Tensor] = NONE_SHIFTED,
    ) -> tuple[Tensor, LayerCache]:
        """Computes the MLP of x, or of its means with other tokens, and the cache with the experts' balance loss."""
        assert self.mlp is not None
        if isinstance(self.mlp, Experts):
            y, balance = self.mlp(x)
            return y, replace(cache, balance=balance)
        into = shifted.get("into", x)
        if isinstance(self.mlp, SquaredReLU):
            return self.mlp(into, shifted.get("gate", x), canon), cache
        return self.mlp(into, canon), cache

    def cache_size(self, cache: LayerCache) -> CacheSize:
        """Returns the number of elements in a cache, by what they are for."""
        sizes = [self.mixer.cache_size(cache)]
        if self.beside is not None and cache.beside is not None:
            sizes.append(self.beside.mixer.cache_size(cache.beside))
        return CacheSize.summed(sizes)

    def _with_tails(
        self,
        x: Tensor | Outputs,
        branch: Tensor | None,
        cache: LayerCache | None,
        cu_seqlens: "Tensor | Sequences | None",
        first: Tensor | None,
    ) -> tuple[Tensor | Outputs, Tensor, LayerCache]:
        places = [*self.canon, *(["shift"] if self.shift is not None else [])]
        pasts = {} if cache is None else dict(zip(places, cache.tails, strict=True))
        tails: dict[str, Tensor] = {}

        def canon(place: str, x: Tensor) -> Tensor:
            if place not in self.canon:
                return x
            x, tails[place] = self.canon[place](x, pasts.get(place), packed)
            return x

        x, normed = self.norm(x, branch)
        packed = None if cu_seqlens is None else Sequences.of(cu_seqlens, normed)
        branch, cache = self._scanned(canon("A", normed), cache, packed, first)
        if self.mlp is not None:
            x, normed = self.mlp_norm(x, branch)
            inner = (lambda z: canon("D", z)) if "D" in self.canon else None
            fed, means = canon("C", normed), NONE_SHIFTED
            if self.shift is not None:
                means = self.shift(fed, pasts.get("shift"), packed)
                tails["shift"] = tail_of(fed, None, 1, packed)
            branch, cache = self._fed(fed, cache, inner, means)
        return x, branch, replace(cache, tails=tuple(tails[place] for place in places))
