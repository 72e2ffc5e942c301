"""An operator's gradient, shapes and vmap rule are matched by the names of its arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from deltalab.kernels.register import absent, eager, register

SEEN: list[tuple[bool, bool]] = []


@torch.library.custom_op("deltalab_tests::power", mutates_args=())
def power(x: Tensor, w: Tensor | None, exponent: int) -> tuple[Tensor, Tensor]:
    """(w x^n, x^(n - 1)), w 1 if it is None."""
    less = x ** (exponent - 1)
    return (x * less if w is None else w * x * less), less


@torch.library.custom_op("deltalab_tests::power_backward", mutates_args=())
def power_backward(
    has_w: bool, d_y: Tensor | None, less: Tensor, exponent: int, w: Tensor | None, x: Tensor, d_less: Tensor | None
) -> list[Tensor]:
    """The arguments are in another order than those of `power`, and only some are its own."""
    SEEN.append((has_w, d_less is None))
    assert d_y is not None
    d_x = d_y * exponent * less
    return [d_x if w is None else d_x * w, d_y * x * less if has_w else absent(x)]


def shapes(*, x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def gradient_shapes(*, x: Tensor, has_w: bool, **_: Any) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(x) if has_w else absent(x)]


register(power_backward, shapes=gradient_shapes)
register(power, shapes=shapes, backward=power_backward, outputs=["y", "less"], results=1)
direct = eager(power)


@pytest.mark.parametrize("given", [True, False])
def test_the_backward_is_called_by_names(given: bool) -> None:
    x, w = (torch.rand(2, 3, 1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves = [x, w] if given else [x]
    SEEN.clear()
    y, _ = power(x, w if given else None, 3)
    actual = torch.autograd.grad(y.sum(), leaves)
    wanted = torch.autograd.grad((w * x**3 if given else x**3).sum(), leaves)
    torch.testing.assert_close(actual, wanted)
    assert [(given, True)] == SEEN


def test_vmap_folds_its_dimension_into_the_batch() -> None:
    x, w = torch.rand(4, 2, 3, 1, requires_grad=True), torch.rand(2, 3, 1)
    together = torch.func.vmap(lambda x, w: power(x, w, 2)[0], (0, None))(x, w)
    torch.testing.assert_close(together, w * x**2)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (together, w * x**2)))


def test_shapes_and_gradients_are_what_pytorch_was_told() -> None:
    x, w = torch.rand(2, 3, 1, requires_grad=True), torch.rand(2, 3, 1)
    for given in (w, None):
        torch.library.opcheck(power, (x, given, 2), test_utils=("test_schema", "test_faketensor"))


def test_a_compiler_takes_an_operator_by_keywords() -> None:
    x = torch.rand(2, 3, 1, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return power(x=x, w=None, exponent=2)[0] * 2

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, twice)))


@pytest.mark.parametrize("given", [True, False])
def test_called_directly_it_is_the_same_function(given: bool) -> None:
    x, w = (torch.rand(2, 3, 1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves = [x, w] if given else [x]
    actual = [function(x, w if given else None, 3)[0] for function in (direct, power)]
    assert actual[0].grad_fn is not None
    assert "Direct" in actual[0].grad_fn.name()
    torch.testing.assert_close(*actual)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), leaves) for y in actual))


def test_without_gradients_nothing_is_kept() -> None:
    x = torch.rand(2, 3, 1, requires_grad=True)
    with torch.no_grad():
        y, less = direct(x, None, 3)
    assert not y.requires_grad
    assert less.shape == x.shape
    with torch.inference_mode():
        assert direct(x, None, 3)[0].is_inference()


def test_what_backward_needs_is_saved_where_checkpoints_find_it() -> None:
    x = torch.rand(2, 3, 1, requires_grad=True)
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> int:
        kept.append(saved)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(keep, kept.__getitem__):
        y, *_ = direct(x, None, 3)
    assert len(kept) == 2
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 3 * x.detach() ** 2)


class Seen(TorchDispatchMode):
    names: tuple[str, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += (str(func),)
        return func(*args, **(kwargs or {}))


def test_modes_and_transforms_see_the_operator() -> None:
    x = torch.rand(2, 3, 1, requires_grad=True)
    with Seen() as seen:  # type: ignore[no-untyped-call]
        direct(x, None, 3)
    assert "deltalab_tests.power.default" in seen.names
    xs = torch.rand(4, 2, 3, 1)
    torch.testing.assert_close(torch.func.vmap(lambda x: direct(x, None, 3)[0])(xs), xs**3)
    compiled = torch.compile(lambda x: direct(x, None, 3)[0] * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), 2 * x**3)


def test_a_second_derivative_is_refused_as_ever() -> None:
    x = torch.rand(2, 3, 1, requires_grad=True)
    (d_x,) = torch.autograd.grad(direct(x, None, 3)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(d_x.sum(), x)
