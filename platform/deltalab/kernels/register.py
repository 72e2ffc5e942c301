"""What PyTorch must know about an operator besides its kernel: output shapes, gradient, and `torch.func.vmap`.

Operators take and return flat tensors, because PyTorch reads their schema off the signature. Arguments are matched by
name here, so that no code counts positions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]
from torch.nn import Parameter

from deltalab.errors import InputError

Named = dict[str, Any]


def absent(x: Tensor) -> Tensor:
    """[B, 0], in place of an output that does not exist: operators return tensors alone, and no two the same one."""
    return x.new_empty(x.shape[0], 0)


def existing(x: Tensor) -> Tensor | None:
    """None for what `absent` made: every other tensor of an operator has more dimensions."""
    return x if x.dim() > 2 else None


def empty_like(given: Iterable[Tensor | None], x: Tensor) -> list[Tensor]:
    """Room for a gradient of each; `absent` for None. x: any tensor of the batch."""
    return [absent(x) if one is None else torch.empty_like(one) for one in given]


def register(
    op: CustomOpDef,
    *,
    shapes: Callable[..., Any],
    backward: CustomOpDef | None = None,
    outputs: Sequence[str] = (),
    saved: Callable[[Named], Named] | None = None,
    arranged: Callable[[Sequence[Tensor], Named], Sequence[Tensor]] | None = None,
    results: int | None = None,
    fold: bool = True,
) -> None:
    """Registers an operator's output shapes, its gradient if `backward` is given, and its rule for `torch.func.vmap`.

    shapes: returns empty outputs. It is called with all arguments of op, by their names.
    outputs: names for the outputs of op.
    backward: returns gradients of op's first arguments, in their order. It is called with what its own arguments name:
        an argument of op, an output, d_<output> for an output's gradient, which is None if there is none, or
        has_<argument> for whether an argument was given. Gradients of arguments that were None are dropped.
    saved: returns, for arguments and outputs by name, what else backward names.
    arranged: puts what backward returns, given its arguments by name, into the order of op's arguments.
    results: how many of the outputs callers of `eager(op)` use; all where None. The rest is for the backward alone.
    fold: whether vmap folds its dimension into the batch (see `fold_into_batch`).
    """
    names = arguments(op)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return shapes(**dict(zip(names, args, strict=False)), **kwargs)

    op.register_fake(fake)
    if fold:
        fold_into_batch(op)
    if backward is None:
        _plain[op] = Plain(op, None)
        return
    gradient = Gradient(op, backward, outputs, saved, arranged)
    op.register_autograd(gradient.differentiate, setup_context=gradient.remember)
    _plain[op] = Plain(op, gradient, results)


class Gradient:
    """Where `backward` gets its arguments from, by position, and who gets what it returns; see `register`."""

    def __init__(
        self,
        op: CustomOpDef,
        backward: CustomOpDef,
        outputs: Sequence[str],
        saved: Callable[[Named], Named] | None,
        arranged: Callable[[Sequence[Tensor], Named], Sequence[Tensor]] | None,
    ) -> None:
        self.names, self.saved, self.arranged = [*arguments(op), *outputs], saved, arranged
        self.backward, self.taken, self.inputs = eager(backward), arguments(backward), len(arguments(op))
        upstream = [f"d_{name}" for name in outputs]
        tensors: list[str] = []
        others: list[str] = []
        has: list[str] = []
        for name, argument in zip(self.taken, backward._opoverload._schema.arguments, strict=True):
            if name in upstream and name not in self.names:
                continue
            if name.removeprefix("has_") in self.names and name not in self.names:
                has.append(name)
            else:
                (tensors if "Tensor" in str(argument.type) else others).append(name)
        self.more = [name for name in (*tensors, *others) if name not in self.names]
        at = [*self.names, *self.more]
        self.tensors, self.others = [at.index(name) for name in tensors], [at.index(name) for name in others]
        self.has = [self.names.index(name.removeprefix("has_")) for name in has]
        pool = [*tensors, *others, *has, *upstream]
        self.order = [pool.index(name) for name in self.taken]

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        known = (*inputs, output) if isinstance(output, Tensor) else (*inputs, *output)
        if self.saved is not None:
            more = self.saved(dict(zip(self.names, known, strict=True)))
            known = (*known, *[more[name] for name in self.more])
        ctx.save_for_backward(*[known[i] for i in self.tensors])
        ctx.others = [*[known[i] for i in self.others], *[known[i] is not None for i in self.has]]
        ctx.given = [one is not None for one in inputs]
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        missing = len(self.names) - self.inputs - len(gradients)
        pool = (*ctx.saved_tensors, *ctx.others, *gradients, *[None] * missing)
        given = [pool[i] for i in self.order]
        found = self.backward(*given)
        found = [found] if isinstance(found, Tensor) else found
        if self.arranged is not None:
            found = self.arranged(found, dict(zip(self.taken, given, strict=True)))
        due = [one if given else None for one, given in zip(found, ctx.given, strict=False)]
        return (*due, *[None] * (self.inputs - len(due)))


class Plain:
    """An operator's own function with its gradient, without PyTorch's dispatcher, which takes 50 to 150 us each way."""

    def __init__(self, op: CustomOpDef, gradient: Gradient | None, results: int | None = None) -> None:
        self.function = op._init_fn
        self.apply = None if gradient is None else _differentiated(op._init_fn, gradient, results)


def _differentiated(function: Callable[..., Any], gradient: Gradient, results: int | None) -> Callable[..., Any]:
    """The function with its gradient; it returns the first `results` outputs."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            found = function(*args)
            gradient.remember(ctx, args, found)
            return found if isinstance(found, Tensor) else tuple(found[:results])

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return gradient.differentiate(ctx, *gradients)

    # Past Function.apply, which looks for what transforms of torch.func left behind: `eager` sees these.
    found: Callable[..., Any] = super(torch.autograd.Function, Direct).apply
    return found


_plain: dict[CustomOpDef, Plain] = {}
"""Of each registered operator."""


def eager(op: CustomOpDef) -> Callable[..., Any]:
    """The operator, called without PyTorch's dispatcher where nothing needs to see it.

    A compiler, `torch.func`, a mode (fake tensors, selective checkpointing, counters of operators) and subclasses of
    Tensor do. It takes arguments by position, and returns the first `results` outputs at least (see `register`).
    """

    defaults = [argument.default_value for argument in op._opoverload._schema.arguments]

    def call(*args: Any) -> Any:
        args = (*args, *defaults[len(args) :])
        if torch.compiler.is_compiling() or _watched():
            return op(*args)
        differentiated = False
        for one in args:
            if type(one) is Tensor or type(one) is Parameter:
                differentiated = differentiated or one.requires_grad
            elif isinstance(one, Tensor):
                return op(*args)
        plain = _plain[op]
        if not (differentiated and torch.is_grad_enabled()):
            return plain.function(*args)
        return op(*args) if plain.apply is None else plain.apply(*args)

    return call


def _watched() -> bool:
    """Whether a transform of `torch.func` or a mode wants to see operators."""
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


def arguments(op: CustomOpDef) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in op._opoverload._schema.arguments]


def fold_into_batch(op: CustomOpDef) -> None:
    """Has `torch.func.vmap` fold its dimension into the batch, which is the first dimension of all of op's tensors.

    Take gradients outside of vmap: vmap(f)(x).sum().backward().
    """

    def folded(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        size = info.batch_size

        def fold(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            if not x.is_floating_point():
                raise InputError("packed sequences (cu_seqlens) cannot be mapped over: add them to the packing")
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1).contiguous()

        found = op(*map(fold, args, in_dims))
        unfolded = [one.unflatten(0, (size, -1) if one.shape[0] else (size, 0)) for one in found]
        return type(found)(unfolded), type(found)([0] * len(unfolded))

    op.register_vmap(folded)
