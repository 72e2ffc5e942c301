"""Sequences that several processes share: each computes a part, and hands the memory of its layers to the next."""

import pickle
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deltalab.errors import InputError
from deltalab.models.parts.cache import LayerCache


class Form(NamedTuple):
    """The form of a tensor that a process hands on."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Context:
    """The processes that share each sequence of a batch. Process r of R holds the r-th part, of T / R tokens.

    In each block, process r begins with the memory of process r - 1 at the end of its part, as decoding does, and hands
    its own to r + 1. So process r is r blocks behind process 0, and no process waits more often. In backward, the
    gradients of the memories go the other way.

    All processes make it, at the same time, for one model. Neighbouring ranks belong together.

    Args:
        size: R, which divides the number of all processes.
    """

    def __init__(self, size: int) -> None:
        groups = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
        place, self.rank = divmod(dist.get_rank(), size)
        self.ranks = groups[place]
        # Groups of their own: a collective of FSDP2 would wait for the memory that it shares a group with.
        self.memories = [dist.new_group(ranks) for ranks in groups][place]
        self.forms = [dist.new_group(ranks, backend="gloo") for ranks in groups][place]
        # The forms of layer, rows and tokens before. The neighbour of a process knows which ones it knows.
        self.told: dict[tuple[int, int, int], Any] = {}
        self.heard: dict[tuple[int, int, int], Any] = {}
        self.sent: list[tuple[Any, Tensor]] = []

    @property
    def size(self) -> int:
        """R."""
        return len(self.ranks)

    def part(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> "Part":
        """Returns the part of a batch that this process computes.

        Args:
            tokens: The tokens of whole sequences, [B, T].
            cu_seqlens: The bounds of packed sequences, as in `RuleLayer.forward`. A part may begin within one.

        Raises:
            InputError: The processes do not divide T.
        """
        if tokens.shape[1] % self.size:
            raise InputError(f"{self.size} processes cannot share {tokens.shape[1]} tokens evenly")
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
        return Part(self, tokens, cu_seqlens)

    def send(self, x: Tensor, to: int, group: Any = None) -> None:
        """Sends a tensor to process `to` of the context, and does not wait until it is there."""
        x = x.contiguous()
        self.sent.append((dist.isend(x, self.ranks[to], group=group or self.memories), x))

    def receive(self, x: Tensor, of: int, group: Any = None) -> Tensor:
        """Fills a tensor with the next one that process `of` of the context sends."""
        dist.recv(x, self.ranks[of], group=group or self.memories)
        return x


class Part:
    """A process's part of a batch, in one forward pass and its backward pass.

    Attributes:
        context: The processes.
        cu_seqlens: The bounds of the sequences in the part; None for one sequence in each row.
        first: The tokens of the first sequence in the part.
        before: The tokens that earlier processes hold of the first sequence; 0 if it begins here.
        after: The tokens up to the end of the part of its last sequence; 0 if it ends here.
    """

    def __init__(self, context: Context, tokens: Tensor, cu_seqlens: Tensor | None) -> None:
        self.context, self.packed, self.batch = context, cu_seqlens is not None, len(tokens)
        length = tokens.shape[1] // context.size
        self.begin, self.end = context.rank * length, (context.rank + 1) * length
        self.device = tokens.device
        self.ties: list[Tensor] = []
        bounds = [0, tokens.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        self.before, self.after = (
            0 if place in bounds else place - max(bound for bound in bounds if bound < place)
            for place in (self.begin, self.end)
        )
        inside = [bound - self.begin for bound in bounds if self.begin < bound < self.end]
        self.cu_seqlens = cu_seqlens.new_tensor([0, *inside, length]) if cu_seqlens is not None and inside else None
        self.first = inside[0] if inside else length

    def cut(self, x: Tensor) -> Tensor:
        """Returns the part of x [B, T]."""
        return x[:, self.begin : self.end]

    def received(self, layer: int) -> LayerCache | None:
        """Returns the memory of a layer that the process before has handed on; None if the first sequence begins here.

        Args:
            layer: The number of the layer.
        """
        if not self.before:
            return None
        context, key = self.context, (layer, self.batch, self.before)
        forms = None if self.packed else context.heard.get(key)
        if forms is None:
            size = context.receive(torch.empty(1, dtype=torch.long), context.rank - 1, context.forms)
            text = torch.empty(int(size), dtype=torch.uint8)
            forms = pickle.loads(context.receive(text, context.rank - 1, context.forms).numpy().tobytes())
            if not self.packed:
                context.heard[key] = forms
        shapes: list[Form] = []
        forms.mapped(shapes.append)
        anchor = torch.empty(0, device=self.device, requires_grad=True)
        tie, *parts = _Received.apply(context, shapes, anchor)  # type: ignore[no-untyped-call]
        self.ties.append(tie)
        number = count()
        cache: LayerCache = forms.mapped(lambda _: parts[next(number)])
        return cache

    def hand_on(self, layer: int, cache: LayerCache) -> None:
        """Sends the memory of a layer after its last sequence to the next process, if the sequence goes on there."""
        if not self.after:
            return
        context, key = self.context, (layer, self.batch, self.after)
        if self.cu_seqlens is not None:
            cache = cache.rows(torch.tensor([len(cache.conv) - 1]))
        forms = cache.mapped(lambda x: Form(tuple(x.shape), x.dtype))
        if self.packed or key not in context.told:
            text = torch.frombuffer(bytearray(pickle.dumps(forms)), dtype=torch.uint8)
            context.send(torch.tensor([len(text)]), context.rank + 1, context.forms)
            context.send(text, context.rank + 1, context.forms)
            if not self.packed:
                context.told[key] = forms
        elif context.told[key] != forms:
            raise RuntimeError(f"layer {layer} hands on {forms}, and did {context.told[key]} after as many tokens")
        parts: list[Tensor] = []
        cache.mapped(parts.append)
        self.ties.append(_Sent.apply(context, *parts))  # type: ignore[no-untyped-call]

    def tied(self, x: Tensor) -> Tensor:
        """Returns x. Its backward pass visits all memories that were received or handed on, the last one first."""
        tied: Tensor = _Tied.apply(x, *self.ties)  # type: ignore[no-untyped-call]
        return tied


class _Received(torch.autograd.Function):
    """Receives tensors of the process before. Its backward sends their gradients there."""

    @staticmethod
    def forward(ctx: Any, context: Context, forms: list[Form], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.context = context
        parts = [anchor.new_empty(form.shape, dtype=form.dtype) for form in forms]
        for part in parts:
            if part.numel():
                context.receive(part, context.rank - 1)
        ctx.mark_non_differentiable(*(part for part in parts if not part.is_floating_point()))
        return anchor.clone(), *parts

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[None, None, Tensor]:
        for gradient in gradients:
            if gradient.numel() and gradient.is_floating_point():
                ctx.context.send(gradient, ctx.context.rank - 1)
        return None, None, gradients[0].new_zeros(0, dtype=torch.float32)


class _Sent(torch.autograd.Function):
    """Sends tensors to the next process. Its backward receives their gradients from there."""

    @staticmethod
    def forward(ctx: Any, context: Context, *parts: Tensor) -> Tensor:
        ctx.context = context
        ctx.forms = [Form(tuple(part.shape), part.dtype) for part in parts]
        for part in parts:
            if part.numel():
                context.send(part, context.rank + 1)
        return parts[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, tie: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            tie.new_empty(form.shape, dtype=form.dtype) if form.dtype.is_floating_point else None for form in ctx.forms
        ]
        for gradient in gradients:
            if gradient is not None and gradient.numel():
                ctx.context.receive(gradient, ctx.context.rank + 1)
        return None, *gradients


class _Tied(torch.autograd.Function):
    """Returns x, whose gradient then depends on empty tensors. autograd visits their nodes from the newest on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *ties: Tensor) -> Tensor:
        ctx.count = len(ties)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *[gradient.new_zeros(0, dtype=torch.float32) for _ in range(ctx.count)]
