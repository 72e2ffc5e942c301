"""What PyTorch must know about an operator besides its kernel: output shapes, gradient, and `torch.func.vmap`.

Operators take and return flat tensors, because a schema knows no tuples. Arguments are matched by name here, so that no
code counts positions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]
from torch.nn import Parameter

from deltalab.errors import InputError

ByName = dict[str, Any]
"""Maps names to an operator's arguments, or to its arguments and outputs."""


def absent(x: Tensor) -> Tensor:
    """Returns an empty tensor [B, 0] for x [B, ..]. An operator returns it in place of an output that does not exist.

    An operator cannot return None, and no two of its outputs may be the same tensor.
    """
    return x.new_empty(x.shape[0], 0)


def existing(x: Tensor) -> Tensor | None:
    """Returns the tensor, or None if `absent` made it: all other tensors of operators have more dimensions."""
    return x if x.dim() > 2 else None


def empty_like(tensors: Iterable[Tensor | None], x: Tensor) -> list[Tensor]:
    """Allocates a gradient for each tensor, and `absent` for each None. x is any tensor of the batch."""
    return [absent(x) if tensor is None else torch.empty_like(tensor) for tensor in tensors]


def register(
    op: CustomOpDef,
    *,
    shapes: Callable[..., Any],
    backward: CustomOpDef | None = None,
    outputs: Sequence[str] = (),
    saved: Callable[[ByName], ByName] | None = None,
    arranged: Callable[[Sequence[Tensor], ByName], Sequence[Tensor]] | None = None,
    results: int | None = None,
    fold: bool = True,
) -> None:
    """Registers an operator's output shapes, its gradient if `backward` is given, and its rule for `torch.func.vmap`.

    Args:
        op: The operator.
        shapes: Returns empty outputs. It is called with all arguments of op, by their names.
        backward: An operator that returns gradients of op's first arguments, in their order. The name of each of its
            arguments says what is passed: an argument of op, an output, d_<output> for an output's gradient (None if
            there is none), or has_<argument> for whether an argument was given. Gradients of arguments that were None
            are dropped.
        outputs: Names for the outputs of op.
        saved: Takes op's arguments and outputs by name. Returns, by name, the further tensors and values that backward
            takes.
        arranged: Takes what backward returns, and backward's arguments by name. Returns the gradients in the order of
            op's arguments.
        results: The number of outputs, from the first one on, that callers of `eager(op)` use, or None for all. Only
            backward uses the other outputs.
        fold: Whether vmap folds the dimension that it maps over into the batch (see `fold_into_batch`).
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
    """Finds the arguments of `backward` by position, and gives its results to op's inputs; see `register`."""

    def __init__(
        self,
        op: CustomOpDef,
        backward: CustomOpDef,
        outputs: Sequence[str],
        saved: Callable[[ByName], ByName] | None,
        arranged: Callable[[Sequence[Tensor], ByName], Sequence[Tensor]] | None,
    ) -> None:
        self.names, self.saved, self.arranged = [*arguments(op), *outputs], saved, arranged
        self.backward, self.taken, self.inputs = eager(backward), arguments(backward), len(arguments(op))
        upstream = [f"d_{name}" for name in outputs]
        tensors: list[str] = []
        others: list[str] = []
        flags: list[str] = []
        for name, argument in zip(self.taken, backward._opoverload._schema.arguments, strict=True):
            if name in upstream and name not in self.names:
                continue
            if name.removeprefix("has_") in self.names and name not in self.names:
                flags.append(name)
            else:
                (tensors if "Tensor" in str(argument.type) else others).append(name)
        self.extra = [name for name in (*tensors, *others) if name not in self.names]
        sources = [*self.names, *self.extra]
        self.tensors, self.others = [sources.index(name) for name in tensors], [sources.index(name) for name in others]
        self.flags = [self.names.index(name.removeprefix("has_")) for name in flags]
        pool = [*tensors, *others, *flags, *upstream]
        self.order = [pool.index(name) for name in self.taken]

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves the inputs and outputs that `backward` takes."""
        values = (*inputs, output) if isinstance(output, Tensor) else (*inputs, *output)
        if self.saved is not None:
            extra = self.saved(dict(zip(self.names, values, strict=True)))
            values = (*values, *[extra[name] for name in self.extra])
        ctx.save_for_backward(*[values[i] for i in self.tensors])
        ctx.others = [*[values[i] for i in self.others], *[values[i] is not None for i in self.flags]]
        ctx.are_given = [value is not None for value in inputs]
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the gradient of each input, given the gradients of the outputs."""
        missing = len(self.names) - self.inputs - len(gradients)
        pool = (*ctx.saved_tensors, *ctx.others, *gradients, *[None] * missing)
        args = [pool[i] for i in self.order]
        results = self.backward(*args)
        results = [results] if isinstance(results, Tensor) else results
        if self.arranged is not None:
            results = self.arranged(results, dict(zip(self.taken, args, strict=True)))
        wanted = [result if is_given else None for result, is_given in zip(results, ctx.are_given, strict=False)]
        return (*wanted, *[None] * (self.inputs - len(wanted)))


class Plain:
    """An operator's function and its gradient, called without PyTorch's dispatcher.

    The dispatcher takes 50 to 150 us in the forward, and as long in the backward.
    """

    def __init__(self, op: CustomOpDef, gradient: Gradient | None, results: int | None = None) -> None:
        self.function = op._init_fn
        self.apply = None if gradient is None else _differentiated(op._init_fn, gradient, results)


def _differentiated(function: Callable[..., Any], gradient: Gradient, results: int | None) -> Callable[..., Any]:
    """Returns the function with its gradient. The new function returns the first `results` outputs."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs = function(*args)
            gradient.remember(ctx, args, outputs)
            return outputs if isinstance(outputs, Tensor) else tuple(outputs[:results])

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return gradient.differentiate(ctx, *gradients)

    # Skip Function.apply, which looks for tensors that transforms of torch.func left wrapped: `eager` checks for
    # transforms itself.
    apply: Callable[..., Any] = super(torch.autograd.Function, Direct).apply
    return apply


_plain: dict[CustomOpDef, Plain] = {}
"""The function of each registered operator."""


def eager(op: CustomOpDef) -> Callable[..., Any]:
    """Returns a function that calls the operator without PyTorch's dispatcher, unless something must see the call.

    A compiler, `torch.func`, a mode (fake tensors, selective checkpointing, counters of operators) and subclasses of
    Tensor must see the call.

    Returns:
        A function that takes the operator's arguments by position, and returns at least the first `results` outputs
        (see `register`).
    """
    defaults = [argument.default_value for argument in op._opoverload._schema.arguments]

    def call(*args: Any) -> Any:
        if len(args) < len(defaults):
            args = (*args, *defaults[len(args) :])
        if torch.compiler.is_compiling() or _watched():
            return op(*args)
        differentiated = False
        for arg in args:
            if type(arg) is Tensor or type(arg) is Parameter:
                differentiated = differentiated or arg.requires_grad
            elif isinstance(arg, Tensor):
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
    """Makes `torch.func.vmap` fold the dimension that it maps over into the batch.

    The batch is the first dimension of all of op's tensors.

    Take gradients outside of vmap: vmap(f)(x).sum().backward().
    """

    def folded(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        runs = info.batch_size

        def fold(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            if not x.is_floating_point():
                raise InputError("packed sequences (cu_seqlens) cannot be mapped over: add them to the packing")
            x = x.expand(runs, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1).contiguous()

        outputs = op(*map(fold, args, in_dims))
        if isinstance(outputs, Tensor):
            return outputs.unflatten(0, (runs, -1)), 0
        unfolded = [output.unflatten(0, (runs, -1) if output.shape[0] else (runs, 0)) for output in outputs]
        return type(outputs)(unfolded), type(outputs)([0] * len(unfolded))

    op.register_vmap(folded)
