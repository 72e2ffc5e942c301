"""Packed sequences give what each gives alone, and padded batches what their rows give without the padding, in fp64."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import deltalab
from deltalab.errors import InputError
from deltalab.models.layer import LayerCache, RuleLayer, initialize
from deltalab.models.model import Model, build_model

D = 8

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "comba": ("comba", {}),
    "no convolution": ("gated_deltanet", {"conv": 0}),
    "rotary positions": ("gated_deltanet", {"rope": 100.0, "qk_norm": True}),
    "token shift": ("mamba2", {"token_shift": True, "output_norm": "rms_all"}),
    "vectors beside q, k and v": ("rwkv7", {"token_shift": True}),
    "vectors, convolved": ("gated_deltanet2", {}),
    "steps": ("delta_product", {"rope": 50.0}),
    "grouped values": ("gated_deltanet", {"heads": 4, "qk_heads": 2}),
    "grouped queries": ("gla", {"heads": 4, "kv_heads": 2}),
    "attention": ("attention", {"conv": 0, "rope": 100.0, "heads": 4, "kv_heads": 2}),
    "attention with a window": ("attention", {"knobs": {"window": 3}}),
    "attention that forgets": ("forgetting_attention", {}),
    "attention that subtracts, with a window": ("differential_attention", {"knobs": {"window": 3}}),
    "a carry": ("preconditioned_gated_deltanet", {}),
    "mini-batches": ("ttt_linear", {"knobs": {"mini_batch": 4}}),
    "a count of tokens": ("log_linear_attention", {}),
    "ridge regression": ("mesa_net", {}),
    "several passes": ("rla", {}),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(name: str) -> RuleLayer:
    rule, how = LAYERS[name]
    how = {"key_dim": 4, "value_dim": 4, "knobs": {}, **how}
    made = deltalab.get_rule(rule, **how.pop("knobs"))
    layer = RuleLayer(made, D, how.pop("heads", 2), chunk_size=4, **how)
    initialize(layer, 1)
    return layer.double()


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def close(actual: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(actual, right, rtol=1e-9, atol=1e-10)


def same(actual: LayerCache, alone: list[LayerCache]) -> None:
    """The caches of each sequence."""
    assert actual.numel() == sum(tensor.numel() for tensor in alone)
    for i, tensor in enumerate(alone):
        row = actual.rows(torch.tensor([i]))
        for part, right in zip((row.conv, row.place, row.last), (tensor.conv, tensor.place, tensor.last), strict=True):
            close(part, right)
        for part, right in zip(row.apart[0] if row.apart else row.state, tensor.state, strict=True):
            close(part, right)


@pytest.mark.slow(keep="comba")
@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=3, deadline=None)
@example(lengths=[1, 2, 9, 1, 5], more=[3, 1, 2, 5, 1])
@example(lengths=[6], more=[2])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), more=st.lists(st.integers(1, 4), min_size=4))
def test_a_packed_sequence_gives_what_it_gives_alone(name: str, lengths: list[int], more: list[int]) -> None:
    layer, x = layer_of(name), normal(1, sum(lengths), D)
    bounds = bounds_of(lengths)
    y, cache = layer.advance(x, cu_seqlens=bounds)
    alone = [layer.advance(part) for part in x.split(lengths, dim=1)]
    close(y, torch.cat([tensor for tensor, _ in alone], dim=1))
    close(layer(x, cu_seqlens=bounds.int()), y)
    same(cache, [tensor for _, tensor in alone])
    # Each goes on by itself, with as many tokens as the others or with other numbers of them.
    token = normal(len(lengths), 1, D, seed=1)
    y, cache = layer.advance(token, cache)
    alone = [layer.advance(tensor[None], now) for tensor, (_, now) in zip(token, alone, strict=True)]
    close(y, torch.cat([tensor for tensor, _ in alone]))
    more = more[: len(lengths)]
    x = normal(1, sum(more), D, seed=2)
    y, cache = layer.advance(x, cache, cu_seqlens=bounds_of(more))
    alone = [layer.advance(part, now) for part, (_, now) in zip(x.split(more, dim=1), alone, strict=True)]
    close(y, torch.cat([tensor for tensor, _ in alone], dim=1))
    same(cache, [tensor for _, tensor in alone])


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_packed_sequences_are_the_sums_of_each(name: str) -> None:
    layer, lengths = layer_of(name), [1, 5, 2, 8]
    x, above = normal(1, 16, D).requires_grad_(), normal(1, 16, D, seed=1)
    leaves = [x, *(p for p in layer.parameters())]
    packed = layer(x, cu_seqlens=bounds_of(lengths))
    alone = torch.cat([layer(part) for part in x.split(lengths, dim=1)], dim=1)
    actual, right = (torch.autograd.grad(y, leaves, above, allow_unused=True) for y in (packed, alone))
    for tensor, other in zip(actual, right, strict=True):
        assert (tensor is None) == (other is None)
        if tensor is not None:
            close(tensor, other)


MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("name", LAYERS)
def test_padding_anywhere_changes_nothing_for_the_others(name: str) -> None:
    layer, x = layer_of(name), normal(4, 7, D)
    y = layer(x, attention_mask=MASK)
    assert torch.equal(y, layer(x, attention_mask=MASK.bool()))
    for row, there, tensor in zip(y, MASK.bool(), x, strict=True):
        close(row[there], layer(tensor[None, there])[0])
        assert not row[~there].any()
    assert torch.equal(layer(x, attention_mask=torch.ones(4, 7)), layer(x))


def test_a_layer_stands_in_a_sequence_of_modules() -> None:
    net = nn.Sequential(layer_of("comba"), nn.LayerNorm(D).double(), layer_of("attention"))
    assert net(normal(2, 5, D)).shape == (2, 5, D)


def test_a_row_without_a_token_gives_zeros() -> None:
    layer, x, mask = layer_of("comba"), normal(2, 3, D), torch.tensor([[0, 0, 0], [0, 1, 1]])
    y = layer(x, attention_mask=mask)
    assert not y[0].any()
    close(y[1, 1:], layer(x[1:, 1:])[0])


def test_a_nan_stays_in_its_sequence() -> None:
    layer, x = layer_of("vectors, convolved"), normal(1, 8, D)
    x[0, 3] = torch.nan
    y = layer(x, cu_seqlens=torch.tensor([0, 4, 8]))
    close(y[:, 4:], layer(x[:, 4:]))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens must rise from 0 to the number of tokens, 4: \[0, 3\]"),
        ({"cu_seqlens": torch.tensor([0, 2, 2, 4])}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([1, 4])}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, r"cu_seqlens must be whole numbers \[N \+ 1\] on cpu"),
        ({"cu_seqlens": torch.tensor([0])}, "cu_seqlens must be whole numbers"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask must be \[B, T\] = \[1, 4\] on cpu, not \[1, 3\]"),
        ({"attention_mask": torch.zeros(1, 4)}, "attention_mask holds no token"),
        ({"attention_mask": torch.ones(1, 4), "cu_seqlens": torch.tensor([0, 4])}, "give cu_seqlens or attention_mask"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(given: dict[str, Tensor], says: str) -> None:
    with pytest.raises(InputError, match=says):
        layer_of("comba")(normal(1, 4, D), **given)


def test_a_batch_of_rows_is_not_packed() -> None:
    with pytest.raises(InputError, match="beside a batch of 2"):
        layer_of("comba")(normal(2, 4, D), cu_seqlens=torch.tensor([0, 4]))


# --- models -----------------------------------------------------------------------------------------------------

MODELS = {
    "recurrent": {"rule": "comba"},
    "hybrid": {"rule": "gated_deltanet", "attention": [1], "rope": True},
    "with a window": {"rule": "kda", "attention": [0], "window": 3},
    "of several rules": {"rule": "rwkv7", "layers": ["rule", "mamba2", "forgetting_attention"], "token_shift": True},
    "mamba blocks": {"rule": "mamba2", "block": "mamba"},
}


def model_of(name: str) -> Model:
    return build_model(
        {"vocab_size": 16, "d_model": 8, "heads": 2, "layers": 2, "chunk_size": 4, **MODELS[name]}
    ).double()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(16, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_packed_sequences(name: str) -> None:
    model, lengths, x = model_of(name), [3, 1, 6], tokens(1, 10)
    with torch.no_grad():
        alone = torch.cat([model(part) for part in x.split(lengths, dim=1)], dim=1)
        close(model(x, cu_seqlens=bounds_of(lengths)), alone)
        logits, cache = model.step(x, cu_seqlens=bounds_of(lengths))
        close(logits, alone)
        following = tokens(3, 2)
        logits, _ = model.step(following, cache)
        for part, more, actual in zip(x.split(lengths, dim=1), following, logits, strict=True):
            close(actual, model(torch.cat([part[0], more])[None])[0, -2:])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_padded_batches(name: str) -> None:
    model, x = model_of(name), tokens(4, 7)
    with torch.no_grad():
        logits = model(x, attention_mask=MASK)
        for row, there, tensor in zip(logits, MASK.bool(), x, strict=True):
            close(row[there], model(tensor[None, there])[0])
            assert not row[~there].any()
        where = torch.rand(4, 7, generator=torch.Generator().manual_seed(1)) < 0.4
        assert torch.equal(model(x, where, attention_mask=MASK), logits[where])
        at = torch.tensor([[3, 6], [0, 1], [0, 5], [2, 4]])
        features = model.features(x, attention_mask=MASK)
        assert torch.equal(model.features(x, at, attention_mask=MASK), features[torch.arange(4)[:, None], at])


def test_a_model_that_rebuilds_whole_sequences_takes_no_padding() -> None:
    model = build_model({"vocab_size": 16, "d_model": 8, "rule": "comba", "readout": "last"})
    with pytest.raises(InputError, match="takes none packed or padded"):
        model(tokens(2, 4), attention_mask=torch.ones(2, 4))


def test_scanning_says_what_it_cannot_join() -> None:
    q = normal(1, 5, 2, 4)
    with pytest.raises(InputError, match="states of several sizes"):
        deltalab.scan(deltalab.get_rule("attention"), q, q, q, {}, cu_seqlens=torch.tensor([0, 2, 5]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_gpu_packs_as_a_cpu_does_in_fp64(name: str) -> None:
    """With the kernels, forward and backward."""
    lengths, layer = [1, 70, 3, 130, 64], layer_of(name)
    x, above = normal(1, sum(lengths), D), normal(1, sum(lengths), D, seed=1)
    actual = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        layer, given = layer.to(device, dtype), x.to(device, dtype).requires_grad_()
        y = layer(given, cu_seqlens=bounds_of(lengths).to(device))
        leaves = [given, *layer.parameters()]
        grads = torch.autograd.grad(y, leaves, above.to(y), allow_unused=True)
        actual.append([tensor.double().cpu() for tensor in (y, *grads) if tensor is not None])
    for right, tensor in zip(*actual, strict=True):
        assert float((tensor - right).norm() / right.norm().clamp_min(1e-9)) < 1e-3
