"""Language models made of rule layers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.errors import InputError
from deltalab.models.block import Block, make_norm, make_sum_norm
from deltalab.models.graphs.blocks import BlockGraphs
from deltalab.models.parts.cache import CacheSize, LayerCache
from deltalab.models.parts.context import Part
from deltalab.models.parts.depth import Outputs
from deltalab.models.parts.images import PatchEmbedding
from deltalab.models.spec import ModelSpec
from deltalab.models.start import Normal, Started, hidden_matrices, initialize, linear, widening
from deltalab.ops.backends import automatic
from deltalab.ops.fused.loss import capped, linear_cross_entropy
from deltalab.ops.fused.norm import RMSNorm
from deltalab.ops.packing import Packing, Sequences


class Embedding(Started, nn.Embedding):
    """An embedding of tokens [B, T] as rows [B, T, d] of a matrix [V, d] that starts normal.

    If the embedding is called with a function instead of tokens, it returns the function's value for the matrix.
    """

    starts = MappingProxyType({"weight": Normal(1.0)})

    def forward(self, tokens: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the rows of the matrix for tokens, or the value of a function that is called with the matrix."""
        if not isinstance(tokens, Tensor):
            return tokens(self.weight)
        embed = automatic(self.weight.device.type).embed
        if embed is None:
            return super().forward(tokens)
        return embed(self.weight[None], tokens.reshape(1, -1)).view(*tokens.shape, -1)


class Rebuild(nn.Module):
    """Rebuilds every position t from the last hidden state h_T alone: norm(MLP(h_T + p_t)), [B, T, d] to [B, T, d].

    The MLP applies norm, linear and GELU, and then all three again. The position is p_t = [sin(t w), cos(t w)], with
    w_i = 10000^(-i / (d/2 - 1)) for i = 0 ... d/2 - 1.

    References:
        Poli et al. 2024, arXiv:2403.17844.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential()
        for _ in range(2):
            self.mlp.extend([RMSNorm(d_model), linear(d_model, d_model), nn.GELU()])
        self.norm = RMSNorm(d_model)

    def forward(self, hidden: Tensor) -> Tensor:
        """Rebuilds the hidden states [B, T, d] from the last of them."""
        half = hidden.shape[-1] // 2
        place = torch.arange(hidden.shape[1], device=hidden.device)[:, None]
        angle = place * 10000 ** -torch.linspace(0, 1, half, device=hidden.device)
        position = F.pad(torch.cat([angle.sin(), angle.cos()], dim=-1), (0, hidden.shape[-1] - 2 * half))
        rebuilt: Tensor = self.norm(self.mlp(hidden[:, -1:] + position.to(hidden.dtype)))
        return rebuilt


def places(x: Tensor, at: Tensor | None) -> Tensor:
    """Returns the vectors of x [..., T, d] at the places `at` [..., m], as [..., m, d]; all of x if `at` is None."""
    return x if at is None else x.gather(-2, at[..., None].expand(*at.shape, x.shape[-1]))


def balance_of(caches: list[LayerCache]) -> Tensor | None:
    """Sums the balance losses of all blocks, [], as Switch does; None outside of training, and without experts.

    Each is that of the tokens of one call of the model. So a batch in parts, on several processes or in turn, balances
    each part.
    """
    losses = [cache.balance for cache in caches if cache.balance is not None]
    return torch.stack(losses).sum() if losses else None


class Model(Started):
    """A language model, which maps tokens [B, T] to logits [B, T, vocab].

    With `patches`, it maps images [B, T, D] to logits [B, T, classes], which `pool` makes equal at all places.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed: nn.Embedding | PatchEmbedding = (
            Embedding(spec.vocab_size, spec.d_model)
            if spec.patches is None
            else PatchEmbedding(spec.patches, spec.d_model, spec.positions)
        )
        self.first_norm = make_sum_norm(spec) if spec.first_norm else None
        self.blocks = nn.ModuleList(Block(spec.at(layer), spec.depth) for layer in range(spec.depth))
        if spec.value_residual:
            cast(Block, self.blocks[0]).mixer.gives_values = True
        self.norm = make_norm(spec)
        self.rebuild = Rebuild(spec.d_model) if spec.readout == "last" else None
        self.unembed = None
        if not spec.tie_embeddings:
            self.unembed = linear(spec.d_model, spec.vocab_size, std=spec.d_model**-0.5 * spec.width_share**0.5)
        self.graphs: BlockGraphs | None = None

    def forward(
        self,
        tokens: Tensor,
        where: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Computes the logits [B, T, vocab].

        Args:
            tokens: Tokens, [B, T].
            where: A mask [B, T]. With it, the logits are those of the N positions where it is true, [N, vocab].
            cu_seqlens: As in `RuleLayer.forward`.
            attention_mask: As in `RuleLayer.forward`. The logits of padding are 0.

        Raises:
            InputError: As for `features`.
        """
        features = self.features(tokens, cu_seqlens=cu_seqlens, attention_mask=attention_mask)
        return capped(F.linear(features if where is None else features[where], self.head), self.spec.logit_cap)

    def loss(self, tokens: Tensor, targets: Tensor, *, ignore: int = -100, **packing: Any) -> Tensor:
        """Computes the mean cross-entropy of the logits with targets, in at least fp32.

        The logits of all positions are never held at once, and their gradient is made in the forward pass. In training
        mode, the loss has the balance loss of `experts`.

        Args:
            tokens: Tokens, [B, T].
            targets: The token to predict at each position, [B, T].
            ignore: The target of positions that do not count.
            **packing: `cu_seqlens` and `attention_mask`, as in `features`, and `part`, as in `read`.

        Raises:
            InputError: As for `features`, or targets have another shape than tokens.
        """
        features, balance = self.read(tokens, **packing)
        loss = head_loss(features, self.head, targets, ignore=ignore, cap=self.spec.logit_cap)
        return loss if balance is None else loss + balance

    def features(
        self,
        tokens: Tensor,
        at: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Computes the vectors [B, T, d] whose products with the rows of `head` are the logits.

        Args:
            tokens: Tokens, [B, T].
            at: Places [B, m]. With them, the vectors are those of these places, [B, m, d].
            cu_seqlens: As in `RuleLayer.forward`.
            attention_mask: As in `RuleLayer.forward`.

        Raises:
            InputError: Tokens have another form, or sequences are packed or padded and the readout is `last`.
        """
        return self.read(tokens, at, cu_seqlens=cu_seqlens, attention_mask=attention_mask)[0]

    def read(
        self,
        tokens: Tensor,
        at: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        part: Part | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes `features`, and the balance loss as `balance_of` sums it, which is to be added to a mean loss.

        With a `part`, the tokens and `cu_seqlens` are those of the part alone.

        Raises:
            InputError: As for `features`, or there is a part of what cannot be read in parts.
        """
        if part is not None and (attention_mask is not None or self.rebuild is not None or self.spec.patches):
            raise InputError("processes share sequences without padding, of a model that reads token after token")
        if self.spec.patches is not None:
            if cu_seqlens is not None or attention_mask is not None:
                raise InputError("a model of images takes no image packed or padded")
            return self._read_images(tokens, at)
        _check_tokens(tokens)
        if self.rebuild is None:
            packing = Packing.of_padded(tokens, attention_mask, cu_seqlens)
            if packing is None:
                hidden, caches = self.transform(self.embed(tokens), at=at, cu_seqlens=cu_seqlens, part=part)
                return self._scaled(hidden), balance_of(caches)
            hidden, caches = self.transform(self.embed(packing.pack(tokens)), cu_seqlens=packing.cu_seqlens)
            return places(self._scaled(packing.unpack(hidden)), at), balance_of(caches)
        if cu_seqlens is not None or attention_mask is not None:
            raise InputError(
                "model.readout is 'last': a model that rebuilds whole sequences takes none packed or padded"
            )
        hidden, caches = self.hidden(tokens)
        return places(self._scaled(self.rebuild(hidden)), at), balance_of(caches)

    def _read_images(self, images: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor | None]:
        hidden, caches = self.transform(self.embed(images))
        pooled = hidden.mean(1, keepdim=True) if self.spec.pool == "mean" else hidden[:, -1:]
        count = hidden.shape[1] if at is None else at.shape[1]
        return pooled.expand(-1, count, -1), balance_of(caches)

    @property
    def head(self) -> Tensor:
        """The output matrix, [vocab, d]."""
        return self.embed.weight if self.unembed is None else self.unembed.weight

    def step(
        self, tokens: Tensor, cache: list[LayerCache] | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Computes the logits [B, T, vocab] of tokens that follow those of the cache, and the new cache.

        Args:
            tokens: Tokens, [B, T].
            cache: The memory of each layer; None if there are no tokens before.
            cu_seqlens: As in `RuleLayer.advance`.

        Raises:
            InputError: Tokens or the cache do not fit, or the readout is `last`, which needs the whole sequence.
        """
        if self.spec.patches is not None:
            raise InputError("a model of images reads whole images, and cannot go token by token")
        _check_tokens(tokens)
        if self.rebuild is not None:
            raise InputError("model.readout is 'last': a model that rebuilds whole sequences cannot go token by token")
        hidden, cache = self.transform(self.embed(tokens), cache, cu_seqlens=cu_seqlens)
        return self.logits(hidden), cache

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None) -> tuple[Tensor, list[LayerCache]]:
        """Calls `transform` for tokens [B, T]."""
        return self.transform(self.embed(tokens), cache)

    def transform(
        self,
        x: Tensor,
        cache: list[LayerCache] | None = None,
        *,
        at: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        checkpoint: Callable[..., Any] | None = None,
        part: Part | None = None,
    ) -> tuple[Tensor, list[LayerCache]]:
        """Computes the hidden states [B, T, d], and the new cache. After `graph_blocks`, training returns no cache.

        Args:
            x: Embedded tokens, [B, T, d].
            cache: The memory of each layer; None if there are no tokens before.
            at: As in `features`.
            cu_seqlens: As in `RuleLayer.advance`.
            checkpoint: Calls its first argument, a block, with the other arguments, and may compute the block again in
                backward, as `torch.utils.checkpoint.checkpoint` does.
            part: The part of sequences that x is, if other processes compute the rest. Its process hands on each
                layer's cache.
        """
        if self.first_norm is not None:
            x = self.first_norm(x, None)[1]
        before: Tensor | Outputs = x
        branch: Tensor | None = None
        first: Tensor | None = None
        caches: list[LayerCache] = []
        plain = cache is None and cu_seqlens is None and checkpoint is None and part is None
        if plain and self.graphs is not None and self.graphs.take(x):
            x, branch = self.graphs(x)
            return self.norm(places(x, at), places(branch, at))[1], caches
        packed = None if cu_seqlens is None else Sequences.of(cu_seqlens, x)
        if part is not None and part.before and packed is not None:
            packed = packed.going_on(part.first)
        for i, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache[i]
            if part is not None:
                layer_cache = part.received(i)
            arguments = (before, branch, layer_cache, packed, first)
            before, branch, next_cache = block(*arguments) if checkpoint is None else checkpoint(block, *arguments)
            if next_cache.values is not None:
                first, next_cache = next_cache.values, replace(next_cache, values=None)
            if part is not None:
                part.hand_on(i, next_cache)
            caches.append(next_cache)
        placed = partial(places, at=at)
        last = before.at(placed) if isinstance(before, Outputs) else placed(before)
        hidden = self.norm(last, None if branch is None else placed(branch))[1]
        return hidden if part is None else part.tied(hidden), caches

    def graph_blocks(self) -> None:
        """Trains with `BlockGraphs`, on one GPU. Graphs help if batches are too small for the host to keep up.

        There are no graphs for batches of another shape than the first, for packed rows, with activation checkpointing,
        with attention over depth, with a balance loss of experts, with a value residual, and for a forward pass that
        comes before the backward pass of the last forward pass.
        """
        if self.spec.more_than_x is None:
            self.graphs = BlockGraphs(self.blocks)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of hidden states."""
        return capped(self._by_head(lambda head: F.linear(self._scaled(hidden), head)), self.spec.logit_cap)

    def cross_entropy(
        self, hidden: Tensor, targets: Tensor, *, ignore: int = -100, count: Tensor | int | None = None, z: float = 0.0
    ) -> Tensor:
        """Computes `linear_cross_entropy` of the logits of hidden states [B, T, d] with targets [B, T]."""
        how = {"ignore": ignore, "count": count, "cap": self.spec.logit_cap, "z": z}
        return self._by_head(lambda head: head_loss(self._scaled(hidden), head, targets, **how))

    def _by_head(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the value of a function that is called with the output matrix.

        With tied embeddings the embedding is called, because Accelerate's FSDP2 shards embeddings by themselves and has
        their weights only while the module is called.
        """
        value: Tensor = self.embed(function) if self.unembed is None else function(self.unembed.weight)
        return value

    def _scaled(self, hidden: Tensor) -> Tensor:
        if self.unembed is not None:
            return hidden
        return hidden * self.spec.tied_factor

    def blank(self, length: int) -> Tensor:
        """Embeds one sequence of equal tokens, or returns zeros for the embedding of an image, [1, length, d]."""
        device = self.embed.weight.device
        if self.spec.patches is not None:
            return torch.zeros(1, length, self.spec.d_model, device=device)
        embedded: Tensor = self.embed(torch.zeros(1, length, dtype=torch.long, device=device))
        return embedded

    def cache_size(self, length: int) -> CacheSize:
        """Returns the number of elements that all layers hold for one sequence after `length` tokens."""
        with torch.no_grad():
            _, caches = self.transform(self.blank(length))
        return CacheSize.summed(
            cast(Block, block).cache_size(cache) for block, cache in zip(self.blocks, caches, strict=True)
        )


def _check_tokens(tokens: Tensor) -> None:
    whole = isinstance(tokens, Tensor) and tokens.dtype in (torch.int32, torch.int64)
    if not whole or tokens.dim() != 2 or 0 in tokens.shape:
        description = (
            f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        )
        raise InputError(f"tokens must be a non-empty tensor [B, T] of whole numbers, not {description}")


def head_loss(features: Tensor, head: Tensor, targets: Tensor, **how: Any) -> Tensor:
    """Computes `linear_cross_entropy`, in the dtype that autocast gives products.

    Args:
        features: As `Model.features` returns them, [B, T, d].
        head: The output matrix, [vocab, d].
        targets: The token to predict at each position, [B, T].
        **how: `ignore`, `count`, `cap` and `z`, as in `linear_cross_entropy`.

    Raises:
        InputError: Targets have another shape than features.
    """
    if targets.shape != features.shape[:-1]:
        raise InputError(f"targets must be {list(features.shape[:-1])}, one for each token, not {list(targets.shape)}")
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
    x = features.flatten(0, 1).to(dtype)
    return linear_cross_entropy(x, head.to(dtype), targets.flatten(), **how)


def build_model(spec: ModelSpec | Mapping[str, Any], *, seed: int = 0) -> Model:
    """Makes a model whose parameters start from the seed alone.

    Args:
        spec: The specification, or its fields by name.
        seed: The seed.

    Raises:
        InputError: The keys or values make no model.

    Examples:
        >>> model = build_model({"rule": "comba", "vocab_size": 16, "d_model": 8, "heads": 2})
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 16])
    """
    model = Model(ModelSpec.of(spec))
    initialize(model, seed)
    return model


def parameter_groups(
    model: nn.Module, weight_decay: float, lr: float | None = None, *, muon: bool = False
) -> list[dict[str, Any]]:
    """Returns optimizer groups in which weight decay applies to matrices alone.

    It does not apply to norms and to the numbers that gates learn for each head (a, dt, b, d). A model with a
    `base_width` has another group, which comes first: the matrices whose learning rate is lr times `width_share`. A
    step decays these matrices as if their rate were lr.

    Args:
        model: The model.
        weight_decay: The weight decay.
        lr: The learning rate. A model with a `base_width` needs it.
        muon: Whether another group comes first, with `muon` set: the matrices that Muon trains.

    Raises:
        InputError: The model has a `base_width`, and there is no `lr`, or `muon` is asked for.

    References:
        Wortsman et al. 2023, arXiv:2309.14322, for the decay that does not fall with the rate.
    """
    share = model.spec.width_share if isinstance(model, Model) else 1.0
    scaled = [] if share == 1 else widening(model)
    if scaled and lr is None:
        raise InputError(f"a model with a base_width needs lr: its matrices have {share:g} times that rate")
    if muon and share != 1:
        raise InputError("optimizer muon does not go with a base_width: its steps have one size at all widths")
    hidden = [*hidden_matrices(model).values()] if muon else []
    own_group = {id(p) for p in [*scaled, *hidden]}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in own_group]
    free = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    if hidden:
        return [{"params": hidden, "weight_decay": weight_decay, "muon": True}, *groups]
    if lr is None or not scaled:
        return groups
    return [{"params": scaled, "weight_decay": weight_decay / share, "lr": lr * share}, *groups]
