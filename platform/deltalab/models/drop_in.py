"""A rule's layer where another library's model has its attention: `deltalab.layer("comba", dim=1024)`."""

from collections.abc import Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltalab.errors import InputError, unknown
from deltalab.models.block import make_mixer
from deltalab.models.parts.cache import LayerCache
from deltalab.models.settings.layer_list import OF_A_LAYER
from deltalab.models.spec import ModelSpec
from deltalab.ops.packing import Packing

HEAD_WIDTH = 64
"""The width of a head's keys if the number of heads is not given."""


class DropIn(nn.Module):
    """A layer with the call of an attention in transformers or flash-linear-attention.

    With a cache, the layer continues from the tokens that it has read with the same cache object. In a cache of
    transformers, it writes the number of the row as the key of each token. So the model knows its position, and the
    layer sees how a beam search has put the rows into another order.

    Args:
        spec: The layer, as a model of one such block.
        returns: What a call returns: y; (y, None), as attention of transformers does; or (y, None, cache), as
            flash-linear-attention does.
        layer_idx: The number of the layer in the model, which a cache of transformers needs.
    """

    def __init__(self, spec: ModelSpec, returns: Literal["y", "hf", "fla"], layer_idx: int) -> None:
        super().__init__()
        self.mixer = make_mixer(spec, 1)
        self.returns, self.layer_idx = returns, layer_idx
        self._caches: WeakKeyDictionary[Any, LayerCache] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the caches of running generations out of copies and pickles."""
        return {**super().__getstate__(), "_caches": None}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begins a copy without caches."""
        super().__setstate__({**state, "_caches": WeakKeyDictionary()})  # type: ignore[no-untyped-call]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Computes y [B, T, d].

        Args:
            hidden_states: x, [B, T, d].
            attention_mask: 0 for padding, [B, T]; or a mask of attention [B, 1, T, T], whose diagonal says the same.
            past_key_values: The cache of the model; None to keep nothing.
            cu_seqlens: The bounds of packed sequences, as in `RuleLayer.forward`.

        Raises:
            InputError: There is padding, or packed sequences, beside a cache that holds tokens.
        """
        mask = _padding(attention_mask, hidden_states)
        if past_key_values is None:
            return self._returned(self._padded(hidden_states, mask, cu_seqlens), None)
        if mask is not None:
            raise InputError("a cache does not go with padding: give prompts of one length, or use_cache=False")
        if cu_seqlens is not None:
            raise InputError("a cache does not go with cu_seqlens: say use_cache=False")
        cache = self._caches.get(past_key_values)
        of_transformers = hasattr(past_key_values, "layers")
        if cache is not None and of_transformers:
            rows = past_key_values.layers[self.layer_idx].keys[:, 0, -1, 0].long()
            cache = cache.rows(rows)
        y, self._caches[past_key_values] = self.mixer.advance(hidden_states, cache)
        if of_transformers:
            marks = torch.arange(len(y), dtype=torch.float32, device=y.device).view(-1, 1, 1, 1)
            marks = marks.expand(-1, 1, y.shape[1], 1)
            past_key_values.update(marks, marks, self.layer_idx)
        return self._returned(y, past_key_values)

    def _padded(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        packing = Packing.of_padded(x, mask, cu_seqlens)
        if packing is None:
            return self.mixer.advance(x, cu_seqlens=cu_seqlens)[0]
        return packing.unpack(self.mixer.advance(packing.pack(x), cu_seqlens=packing.cu_seqlens)[0])

    def _returned(self, y: Tensor, cache: Any) -> Any:
        return {"y": y, "hf": (y, None), "fla": (y, None, cache)}[self.returns]


def _padding(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Returns the mask of padding [B, T] if there is any padding."""
    if mask is None:
        return None
    if mask.dim() == 4:
        tokens = x.shape[1]
        own = mask[:, 0, :, -tokens:].diagonal(dim1=1, dim2=2)  # a token sees itself, unless it is padding
        mask = own if own.dtype == torch.bool else own == 0
    mask = mask[:, -x.shape[1] :].expand(len(x), -1)
    return None if bool((mask != 0).all()) else mask


def layer(
    rule: str | Mapping[str, Any],
    dim: int,
    *,
    heads: int | None = None,
    returns: Literal["y", "hf", "fla"] = "y",
    layer_idx: int = 0,
    **settings: Any,
) -> DropIn:
    """Makes a rule's layer for a model of another library.

    Args:
        rule: The rule's name, with @published for its authors' layer; {name: ..., knob: ...}; or a module of any
            author, by its path.
        dim: The width of x.
        heads: The number of heads; None for heads of width 64, or one head.
        returns: What a call returns: `y`, `hf` for a model of transformers, `fla` for one of flash-linear-attention.
        layer_idx: The number of the layer in the model, which a cache of transformers needs.
        **settings: Further settings of a layer, such as `conv` and `output_gate`: see `ModelSpec`.

    Raises:
        InputError: A rule or a setting does not exist, or does not fit.

    Examples:
        >>> import torch
        >>> layer("comba", dim=128)(torch.zeros(1, 5, 128)).shape
        torch.Size([1, 5, 128])
    """
    for key in settings:
        if key not in (*OF_A_LAYER, "chunk_size"):
            raise unknown("setting of a layer", key, OF_A_LAYER)
    if returns not in ("y", "hf", "fla"):
        raise unknown("form", returns, ("y", "hf", "fla"), where="returns")
    heads = heads or max(1, dim // HEAD_WIDTH if dim % HEAD_WIDTH == 0 else 1)
    return DropIn(
        ModelSpec.of({"vocab_size": 1, "rule": rule, "d_model": dim, "heads": heads, **settings}), returns, layer_idx
    )
