"""What PyTorch must know about an operator besides its kernel: output shapes, gradient, and `torch.func.vmap`.

Operators take and return flat tensors, because PyTorch reads their schema off the signature. Arguments are matched by
name here, so that no code counts positions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

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
    fold: whether vmap folds its dimension into the batch (see `fold_into_batch`).
    """
    names = arguments(op)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return shapes(**dict(zip(names, args, strict=False)), **kwargs)

    op.register_fake(fake)
    if fold:
        fold_into_batch(op)
    if backward is None:
        return
    taken = arguments(backward)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        output = (output,) if isinstance(output, Tensor) else output
        known = dict(zip(names, inputs, strict=True))
        known.update(zip(outputs, output, strict=True))
        if saved is not None:
            known.update(saved(known))
        ctx.given = [one is not None for one in inputs]
        kept = {name: known[name] for name in taken if name in known}
        ctx.tensors = [name for name, one in kept.items() if isinstance(one, Tensor)]
        ctx.save_for_backward(*map(kept.pop, ctx.tensors))
        kept.update((f"has_{name}", given) for name, given in zip(names, ctx.given, strict=True))
        ctx.kept = kept
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        known = dict(zip((f"d_{name}" for name in outputs), gradients, strict=True))
        known.update(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        known.update(ctx.kept)
        found = backward(*[known[name] for name in taken])
        found = [found] if isinstance(found, Tensor) else found if arranged is None else arranged(found, known)
        due = [one if given else None for one, given in zip(found, ctx.given, strict=False)]
        return (*due, *[None] * (len(ctx.given) - len(due)))

    op.register_autograd(differentiate, setup_context=remember)


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
