"""The kernel of a pair of states, in Triton's interpreter or on a GPU, against the parallel form in fp64."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from tests.support.kernel_runs import DEVICE, cosines, error, run

import deltalab
from deltalab.authoring.inputs import draw
from deltalab.coupled import Chunks, carried, fused_carried
from deltalab.errors import InputError


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / shape[-1] ** 0.5


@pytest.mark.parametrize(("groups", "chunks", "size", "key_dim", "value_dim"), [(2, 3, 16, 16, 32), (3, 1, 5, 7, 40)])
def test_kernel_carries_a_pair_as_the_loop_does(
    groups: int, chunks: int, size: int, key_dim: int, value_dim: int
) -> None:
    """Outputs and the gradients of all inputs, of each output by itself, too."""
    shapes = [(size, value_dim), (size, 2 * key_dim), (size, 2 * key_dim), (2, 2)]
    given = [normal(chunks, groups, *shape, seed=i) for i, shape in enumerate(shapes)]
    given.append(normal(groups, 2 * key_dim, value_dim, seed=9))
    results = []
    for form, dtype, device in ((carried, torch.float64, "cpu"), (fused_carried, torch.float32, DEVICE)):
        leaves = [x.to(device, dtype).requires_grad_() for x in given]
        outputs = form(Chunks(*leaves[:4]), leaves[4])
        totals = [(y * cosines(y)).sum() for y in outputs]
        gradients = [
            torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
            for total in (sum(totals), *totals)
        ]
        results.append([*outputs, *(d for each in gradients for d in each)])
    for want, got in zip(*results, strict=True):
        assert error(got, want) <= 2e-6 or float(want.abs().max()) == float(got.abs().max()) == 0


@pytest.mark.parametrize(("length", "dtype"), [(70, torch.float32), (9, torch.bfloat16)])
def test_mdn_by_its_kernel_is_its_recurrence(length: int, dtype: torch.dtype) -> None:
    rule = deltalab.get_rule("mdn")
    x = draw(rule, batch=1, length=length, heads=2, key_dim=16, value_dim=16)
    past = draw(rule, batch=1, length=4, heads=2, key_dim=16, value_dim=16, seed=1)
    state = deltalab.scan(rule, past.q, past.k, past.v, past.gates)[1]
    x = x.map(lambda part: part.to(dtype).double())
    x = type(x)(x.q, x.k, x.v, x.gates, state)
    wanted = run(rule, x.map(lambda part: part.requires_grad_()), "recurrent")
    narrow = x.map(lambda part: part.detach().float().to(DEVICE))
    narrow = type(x)(narrow.q.to(dtype), narrow.k.to(dtype), narrow.v.to(dtype), narrow.gates, narrow.state)
    actual = run(rule, narrow.map(lambda part: part.detach().requires_grad_()), "triton")
    for name, right in wanted.items():
        assert right is None or error(actual[name], right) <= (2e-5 if dtype == torch.float32 else 1e-2), name


def test_wide_keys_are_refused() -> None:
    x = draw(deltalab.get_rule("mdn"), batch=1, length=2, heads=1, key_dim=144, value_dim=4).map(Tensor.float)
    with pytest.raises(InputError, match="a pair of states takes q and k with K up to 128, not 144"):
        deltalab.scan(deltalab.get_rule("mdn"), x.q, x.k, x.v, x.gates, backend="triton")
