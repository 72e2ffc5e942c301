"""Long convolutions: blocks and FFTs equal the sum, nothing flows backward in time, and decoding keeps the inputs."""

import pytest
import torch
from torch import Tensor

import deltalab
from deltalab.long_convolution import convolve
from deltalab.models.layer import RuleLayer, initialize


def summed(x: Tensor, taps: Tensor) -> Tensor:
    rows = [sum(taps[:, t - i] * x[:, :, i] for i in range(t + 1)) for t in range(x.shape[2])]
    return torch.stack([torch.as_tensor(row) for row in rows], dim=2)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 65, 200])
def test_blocks_and_ffts_are_the_sum(length: int, shared: bool) -> None:
    torch.manual_seed(length)
    x = torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(3, length, 1 if shared else 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, length, 5, dtype=torch.float64)
    got, want = convolve(x, taps), summed(x, taps)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    gradients = (torch.autograd.grad((y * weight).sum(), (x, taps)) for y in (got, want))
    for mine, right in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-11)


def test_later_tokens_do_not_even_change_rounding() -> None:
    torch.manual_seed(0)
    x, taps = torch.randn(1, 2, 300, 3), torch.randn(2, 300, 3)
    other = x.clone()
    other[:, :, 150:] *= 1e6
    assert torch.equal(convolve(x, taps)[:, :, :150], convolve(other, taps)[:, :, :150])


@pytest.mark.parametrize(("outer", "width"), [(False, 4), (True, 8)])
def test_decoding_keeps_the_inputs(outer: bool, width: int) -> None:
    """k * v for each token, or k and v."""
    layer = RuleLayer(deltalab.get_rule("hyena", outer=outer), 8, 2, key_dim=4, conv=0)
    initialize(layer, seed=0)
    _, cache = layer.advance(torch.randn(1, 7, 8))
    _, cache = layer.advance(torch.randn(1, 1, 8), cache)
    assert layer.cache_size(cache)._asdict() == {"recurrent": 0, "kv": 8 * 2 * width, "conv": 0}


def test_packed_sequences_of_several_lengths_are_each_by_itself() -> None:
    layer = RuleLayer("hyena", 8, 2, key_dim=4)
    initialize(layer, seed=0)
    x = torch.randn(1, 9, 8)
    y = layer(x, cu_seqlens=torch.tensor([0, 4, 9]))
    torch.testing.assert_close(y, torch.cat([layer(x[:, :4]), layer(x[:, 4:])], dim=1))
