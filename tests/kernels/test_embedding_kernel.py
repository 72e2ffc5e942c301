"""The kernels of the embedding against fp64, interpreted or on a GPU: tokens that occur once, never, always."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from deltalab.kernels.step import embedding as kernels
from deltalab.kernels.step.embedding import embed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(runs: int, count: int, vocabulary: int, often: float, seed: int) -> Tensor:
    """Tokens of which a share `often` is 0, and as large a share the last token of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (runs, count), generator=generator)
    kind = torch.rand(runs, count, generator=generator)
    return torch.where(kind < often, 0, torch.where(kind > 1 - often, vocabulary - 1, tokens))


def assert_right(tokens: Tensor, vocabulary: int, width: int, dtype: torch.dtype) -> None:
    runs = len(tokens)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(runs, vocabulary, width, generator=generator).to(dtype)
    d_out = torch.randn(*tokens.shape, width, generator=generator).to(dtype)
    exact = weight.double().requires_grad_()
    wanted = torch.stack([F.embedding(*pair) for pair in zip(tokens, exact, strict=True)])
    (d_weight,) = torch.autograd.grad(wanted, exact, d_out.double())
    given = weight.to(DEVICE).requires_grad_()
    actual = embed(given, tokens.to(DEVICE))
    assert torch.equal(actual.detach().cpu().double(), wanted.detach())
    grads = [torch.autograd.grad(actual, given, d_out.to(DEVICE), retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)
    # Relative to the sum of absolute summands, because summands may cancel.
    size = torch.stack(
        [
            torch.zeros(vocabulary, width, dtype=torch.float64).index_add_(0, *pair)
            for pair in zip(tokens, d_out.double().abs(), strict=True)
        ]
    )
    step = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert bool(((grads[0].cpu().double() - d_weight).abs() <= step * size).all())


@settings(max_examples=15, deadline=None)
@given(
    runs=st.integers(1, 3),
    count=st.sampled_from([1, 2, 15, 16, 17, 63, 64]),
    vocabulary=st.sampled_from([1, 2, 7]),
    often=st.sampled_from([0.0, 0.3, 0.5]),
    width=st.sampled_from([1, 8, 20]),
    tile=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_tokens_of_any_frequency(
    runs: int, count: int, vocabulary: int, often: float, width: int, tile: int, dtype: torch.dtype, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", 16)
        patch.setattr(kernels, "TILE", tile)
        assert_right(drawn(runs, count, vocabulary, often, seed), vocabulary, width, dtype)


def test_stacked_models_are_looked_up_where_they_lie() -> None:
    """Weights that are columns of rows, as `Layout.unpack` makes them, and tokens of each run or of all."""
    rows = torch.randn(3, 100, device=DEVICE).requires_grad_()
    tokens = drawn(3, 40, 9, 0.3, 0).view(3, 5, 8).to(DEVICE)

    def looked_up(weight: Tensor, tokens: Tensor) -> Tensor:
        return embed(weight[None], tokens.view(1, -1)).view(*tokens.shape, -1)

    for dims, read in (((0, 0), tokens), ((0, None), tokens[0])):
        weights = rows[:, 10:82].unflatten(1, (9, 8))
        actual = torch.func.vmap(looked_up, in_dims=dims)(weights, read)
        wanted = torch.stack([F.embedding(read if dims[1] is None else read[i], weights[i]) for i in range(3)])
        assert torch.equal(actual, wanted)
        by = torch.randn_like(actual)
        torch.testing.assert_close(*(torch.autograd.grad((y * by).sum(), rows)[0] for y in (actual, wanted)))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 1024])
@pytest.mark.parametrize("often", [0.0, 0.45])
def test_tokens_of_real_batches(width: int, often: float) -> None:
    assert_right(drawn(2, 10_000, 8192, often, 0), 8192, width, torch.float32)
