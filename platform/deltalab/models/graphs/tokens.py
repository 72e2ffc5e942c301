"""One token of a model replayed as a CUDA graph: the host launches one graph, and not hundreds of kernels."""

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deltalab.models.graphs.capture import captured
from deltalab.models.parts.cache import LayerCache

Step = Callable[[Tensor, list[LayerCache]], tuple[Tensor, list[LayerCache]]]
"""Computes the logits of tokens after a cache, and the new cache, as `Model.step` does."""


class TokenGraph:
    """A token of each of B sequences as one CUDA graph, whose cache lies in memory of its own.

    Args:
        step: What the graph computes.
        tokens: Tokens, [B, 1].
        cache: The memory before these tokens, of the shapes and dtypes that it has after them.

    Attributes:
        cache: The memory of the graph, which each call replaces.

    Raises:
        RuntimeError: The step cannot be captured.
    """

    def __init__(self, step: Step, tokens: Tensor, cache: list[LayerCache]) -> None:
        # What inference mode makes could be written in inference mode alone.
        with torch.inference_mode(False), torch.no_grad():
            self.tokens, self.cache = tokens.clone(), copied(cache)
            own = tensors(self.cache)
            memory = {tensor.untyped_storage().data_ptr() for tensor in own}
            self._results: list[Tensor] = []

            def token() -> None:
                logits, after = step(self.tokens, self.cache)
                # Copy what lies in the graph's cache before anything is written there.
                new = [x.clone() if x.untyped_storage().data_ptr() in memory else x for x in tensors(after)]
                for x, value in zip(own, new, strict=True):
                    x.copy_(value)
                self._results[:] = [logits]

            self._replay = captured(token)

    def __call__(self, tokens: Tensor, cache: list[LayerCache]) -> Tensor:
        """Returns the logits [B, 1, vocab] of tokens that follow those of `cache`. `self.cache` is the new cache."""
        self.tokens.copy_(tokens)
        if cache is not self.cache:
            for x, value in zip(tensors(self.cache), tensors(cache), strict=True):
                x.copy_(value)
        self._replay()
        return self._results[0].clone()


class Holder(Protocol):
    """Who holds a cache between tokens, and takes another list for it."""

    states: list[LayerCache]


class TokenGraphs:
    """Computes tokens by a `TokenGraph`, which it captures as soon as a token leaves the form of a cache as it was.

    The form of tokens and of a cache is their shapes and dtypes. The graph is kept for later sequences, and captured
    anew if a sequence begins after weights have moved. The cache of one sequence at a time lies in the graph's memory.
    If another one takes its place, the holder of the first gets a copy.

    Attributes:
        device_type: The device that has graphs.
        refused: The forms that could not be captured, with the reasons.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self.graph: TokenGraph | None = None
        self.refused: dict[Any, str] = {}
        self._form: Any = None
        self._places: list[int] = []
        self._owner: Callable[[], Holder | None] = _nobody
        self._last: weakref.WeakKeyDictionary[Holder, Any] = weakref.WeakKeyDictionary()
        self._busy = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy makes its own capture

    def token(self, model: nn.Module, step: Step, tokens: Tensor, holder: Holder) -> Tensor | None:
        """Computes tokens [B, 1] after `holder.states`, without gradients, and replaces the states.

        Args:
            model: The model, whose weights the graph reads.
            step: Computes a token by this model.
            tokens: Tokens, [B, 1].
            holder: Who holds the cache. It must not be read by others while it holds that of the graph.

        Returns:
            Their logits [B, 1, vocab]; None if they have to be computed without a graph, and nothing has changed.
        """
        # Another thread may be decoding by the graph.
        if tokens.device.type != self.device_type or not self._busy.acquire(blocking=False):
            return None
        try:
            return self._token(model, step, tokens, holder)
        finally:
            self._busy.release()

    def _token(self, model: nn.Module, step: Step, tokens: Tensor, holder: Holder) -> Tensor | None:
        owner = self._owner()
        if self.graph is None or owner is not holder or holder.states is not self.graph.cache:
            if not self._prepare(model, step, tokens, holder):
                return None
            self._release(owner)
            self._owner = weakref.ref(holder)
        elif _call(tokens) != self._form[:3]:
            self._release(owner)
            return None
        assert self.graph is not None
        logits = self.graph(tokens, holder.states)
        holder.states = self.graph.cache
        return logits

    def _prepare(self, model: nn.Module, step: Step, tokens: Tensor, holder: Holder) -> bool:
        """Returns whether there is a graph for these tokens, and captures it if it is time."""
        form = (*_call(tokens), *((tensor.shape, tensor.dtype) for tensor in tensors(holder.states)))
        if form in self.refused:
            return False
        if form != self._form and form != self._last.get(holder):
            # A cache that grows with each token never has the same form twice.
            self._last[holder] = form
            return False
        places = _places(model)
        if places is None or (form == self._form and places == self._places):
            return places is not None
        self._release(self._owner())
        self.graph = self._form = None
        try:
            # Keep no cast of autocast: it would be freed while the graph still reads it.
            with torch.autocast(tokens.device.type, form[0], enabled=form[0] is not None, cache_enabled=False):
                self.graph = TokenGraph(step, tokens, holder.states)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.refused[form] = reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"tokens are computed without a CUDA graph, and slower: {reason}", stacklevel=5)
            return False
        self._form, self._places = form, places
        return True

    def _release(self, owner: Holder | None) -> None:
        """Gives the sequence whose cache lies in the graph's memory a copy."""
        if self.graph is not None and owner is not None and owner.states is self.graph.cache:
            owner.states = copied(self.graph.cache)


def tensors(cache: list[LayerCache]) -> list[Tensor]:
    """Returns the tensors of all layers."""
    return [tensor for layer in cache for tensor in layer.tensors()]


def copied(cache: list[LayerCache]) -> list[LayerCache]:
    """Copies the memory of all layers."""
    return [layer.mapped(torch.clone) for layer in cache]


def _nobody() -> None:
    return None


def _call(tokens: Tensor) -> tuple[Any, ...]:
    """The dtype of autocast, and the shape and dtype of tokens."""
    device = tokens.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast, tokens.shape, tokens.dtype


def _places(model: nn.Module) -> list[int] | None:
    """The places of a model's weights in memory; None if hooks, as of FSDP or of Accelerate, have to see each call."""
    if any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in model.modules()):
        return None
    return [x.data_ptr() for x in (*model.parameters(), *model.buffers())]
