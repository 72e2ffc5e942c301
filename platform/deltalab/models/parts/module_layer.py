"""Any module as a layer of a model, with the interface of `RuleLayer`."""

import copy
import inspect
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from deltalab.errors import InputError
from deltalab.models.parts.cache import CacheSize, LayerCache
from deltalab.models.start import Remade, remade
from deltalab.ops.packing import Sequences
from deltalab.ops.scan import joined
from deltalab.own_module import OwnModule

OF_A_GPU = re.compile("triton|cuda|nvidia|active drivers", re.IGNORECASE)
"""What errors say that a machine without a GPU raises."""

FILLED = ("past_key_values", "past_key_value")
"""The arguments of transformers and flash-linear-attention for a cache, an object that a layer writes into."""

CACHES = (*FILLED, "cache", "state", "initial_state", "hx", "hidden_state", "memory")
"""The arguments by which modules take a cache. All but `FILLED` take what an earlier call returned after y."""


class ModuleLayer(Remade):
    """A module of any author, which maps x [B, T, d] to y [B, T, d].

    Nothing is put around the module: projections, convolution, norm and gate are its own. Its buffers are those that
    it has if torch's generator starts at 0, whatever the seed of the model.

    For tokens that follow others, the module reads all tokens again. So decoding is exact for every causal module, and
    a token costs as much as the whole sequence. A module that is not causal takes no cache.

    Args:
        rule: The module and its arguments.
        of_model: The settings of the model that the arguments may name.
    """

    def __init__(self, rule: OwnModule, of_model: Mapping[str, float]) -> None:
        super().__init__()
        self.rule, self.of_model = rule, dict(of_model)
        self.inner = remade(self, 0)
        self.packs = _takes_packed(self.inner)

    def make(self) -> nn.Module:
        """Makes the module anew, from torch's global generator."""
        return self.rule.build(self.of_model)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Computes y [B, T, d]. If the module returns a tuple, y is its first element.

        Args:
            x: The inputs, [B, T, d].
            cu_seqlens: The bounds of sequences in a row, for a module that takes them.

        Raises:
            InputError: The module fails, or y has another shape than x.
        """
        try:
            y = self.inner(x) if cu_seqlens is None else self.inner(x, cu_seqlens=cu_seqlens)
        except Exception as error:
            text = " ".join(str(error).split())
            if not torch.cuda.is_available() and OF_A_GPU.search(text):
                text += "; it needs a GPU, and there is none here"
            elif isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
                raise  # such as vmap's: runs then train one by one
            raise InputError(f"module '{self.rule.name}' does not run: {type(error).__name__}: {text:.300}") from error
        y = y[0] if isinstance(y, tuple | list) and y else y
        if not isinstance(y, Tensor) or y.shape != x.shape:
            found = list(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise InputError(f"module '{self.rule.name}' returns {found} for x {list(x.shape)}: y has the shape of x")
        return y

    def advance(
        self, x: Tensor, cache: LayerCache | None = None, *, cu_seqlens: "Tensor | Sequences | None" = None
    ) -> tuple[Tensor, LayerCache]:
        """Computes y [B, T, d] for tokens that follow those of the cache, and the new cache, as `RuleLayer` does."""
        if cache is None and cu_seqlens is None:
            return self(x), _cache([x])
        if cache is not None and not self.rule.causal:
            raise InputError(
                f"module '{self.rule.name}' is not causal: tokens that follow others would change the outputs before "
                "them; give it all tokens at once, without a cache"
            )
        packed = None if cu_seqlens is None else Sequences.of(cu_seqlens, x)
        if packed is None:
            rows = [x[n : n + 1] for n in range(len(x))]
        else:
            rows = [x[:, start:stop] for start, stop in itertools.pairwise(packed.cu_seqlens.tolist())]
        pasts = [x[:1, :0]] * len(rows) if cache is None else _pasts(cache)
        if len(pasts) != len(rows):
            raise InputError(f"the cache is of {len(pasts)} sequences, but x holds {len(rows)}")
        whole = [torch.cat([past.to(row), row], dim=1) for past, row in zip(pasts, rows, strict=True)]
        if cache is None and packed is not None and self.packs:
            return self(x, packed.cu_seqlens), _cache(whole)
        if len({row.shape[1] for row in whole}) == 1:
            outputs = self(torch.cat(whole)).split(1)
        else:
            outputs = tuple(self(row) for row in whole)
        new = [y[:, y.shape[1] - row.shape[1] :] for y, row in zip(outputs, rows, strict=True)]
        return torch.cat(new, dim=0 if packed is None else 1), _cache(whole)

    def cache_size(self, cache: LayerCache) -> CacheSize:
        """Returns what the module says of its state, `state_size(length)` or `state_size()`, or what its cache holds.

        Of a module that has neither, the state is not known.
        """
        count, tails = getattr(self.inner, "state_size", None), sum(part.numel() for part in cache.tails)
        if not callable(count):
            return CacheSize(self._held(_pasts(cache)), 0, tails)
        length = sum(past.shape[1] for past in _pasts(cache))
        kinds = {parameter.kind for parameter in inspect.signature(count).parameters.values()}
        if kinds & {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}:
            size = float(count(length))
        else:  # layers of zoology and flash-linear-attention take any keywords
            size = float(count(sequence_length=length) if inspect.Parameter.VAR_KEYWORD in kinds else count())
        return CacheSize(size, 0, tails)

    @torch.no_grad()
    def _held(self, pasts: list[Tensor]) -> float:
        """Counts what the module's own cache holds after inputs [1, T, d] of each sequence; NaN if it takes none."""
        if cache_argument(self.inner) is None:
            return math.nan
        try:
            return float(sum(part.numel() for past in pasts for part in _tensors(decoded(self.inner, [past])[1])))
        except Exception:  # the argument means something else: what the module holds is not known
            return math.nan


def cache_argument(module: nn.Module) -> str | None:
    """Returns the argument by which a module's forward takes a cache, one of `CACHES` that may be left out; or None."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in CACHES if name in parameters and parameters[name].default is None), None)


def decoded(module: nn.Module, parts: Iterable[Tensor]) -> tuple[list[Tensor], Any]:
    """Runs a copy of a module in evaluation on parts of a sequence, each with the cache of the parts before.

    Args:
        module: A module that has a `cache_argument`.
        parts: The parts of x, [B, T, d] each.

    Returns:
        The output of each part, and the last cache.

    Raises:
        InputError: A call returns no cache.
    """
    name = cache_argument(module)
    assert name is not None
    module, cache = copy.deepcopy(module).eval(), None
    more = {"use_cache": True} if "use_cache" in inspect.signature(module.forward).parameters else {}
    if name in FILLED:
        if getattr(module, "layer_idx", 0) is None:  # a cache holds each layer's part under its number
            vars(module)["layer_idx"] = 0
        cache = _empty(module)
    outputs = []
    for x in parts:
        given = module(x, **({} if cache is None else {name: cache}), **more)
        if name not in FILLED:
            cache = given[-1] if isinstance(given, tuple | list) and len(given) > 1 else None
        if not _tensors(cache):
            raise InputError(f"its forward takes `{name}`, but a call leaves no cache")
        outputs.append(given[0] if isinstance(given, tuple | list) else given)
    return outputs, cache


def _empty(module: nn.Module) -> Any:
    """Makes an empty cache, of flash-linear-attention for its layers, else of transformers."""
    if type(module).__module__.startswith("fla."):
        from fla.models.utils import Cache

        return Cache()
    from transformers import DynamicCache

    return DynamicCache()


def _tensors(held: Any) -> list[Tensor]:
    """Lists the tensors in a cache: a tensor, a collection of such, or an object with such attributes."""
    if isinstance(held, Tensor):
        return [held] if held.numel() else []
    if isinstance(held, Mapping):
        return _tensors([*held.values()])
    if isinstance(held, list | tuple):
        return [part for one in held for part in _tensors(one)]
    return [] if held is None or isinstance(held, type | nn.Module) else _tensors(getattr(held, "__dict__", None))


def _takes_packed(module: nn.Module) -> bool:
    """Returns whether a module's forward reads `cu_seqlens`, as a parameter or out of its further keywords."""
    parameters = inspect.signature(module.forward).parameters
    if "cu_seqlens" in parameters or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return "cu_seqlens" in parameters
    try:
        return "cu_seqlens" in inspect.getsource(module.forward)
    except (OSError, TypeError):
        return False


def _cache(inputs: list[Tensor]) -> LayerCache:
    """Returns the cache that holds the inputs [1, T, d] of each sequence, or [B, T, d] of all."""
    first = inputs[0]
    state, apart = joined([(row,) for row in inputs])
    sequences = sum(map(len, inputs))
    empty = first.new_zeros(sequences, 0, 0)
    return LayerCache(empty, state, first.new_zeros(sequences, 0, dtype=torch.long), empty, apart)


def _pasts(cache: LayerCache) -> list[Tensor]:
    states = cache.apart or [(row,) for row in cache.state[0].split(1)]
    return [cast(Tensor, state[0]) for state in states]
