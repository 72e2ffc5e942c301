"""A model of images reads patches in every stated order, trains stacked as alone, and refuses what it cannot do."""

from typing import Any

import pytest
import torch
from tests.support.stacks import trained_stacked

from deltalab.errors import InputError
from deltalab.models.costs import CostCounter, training_flops
from deltalab.models.model import Model, build_model
from deltalab.models.parts.images import Scans, sincos
from deltalab.models.spec import ModelSpec
from deltalab.tasks.images.digit_patches import DigitPatches
from deltalab.training.evaluation import costs

IMAGES: dict[str, Any] = {
    "rule": "gated_deltanet", "vocab_size": 10, "patches": [4, 4, 4], "d_model": 16, "layers": 1, "chunk_size": 16,
}  # fmt: skip


def model(**settings: Any) -> Model:
    return build_model({**IMAGES, **settings})


def images(seed: int = 0, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 16, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bidirectional", "axes"), [(False, 2), (True, 1), (True, 2)])
def test_scans_are_the_mean_over_orders_written_out(bidirectional: bool, axes: int) -> None:
    x = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    by_row, by_column = [0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]  # of 2 x 3 patches
    orders = [by_row, by_column][:axes]
    orders += [order[::-1] for order in orders] if bidirectional else []
    expected = torch.zeros_like(x)
    for order in orders:
        total = torch.zeros(2, 3, dtype=torch.float64)
        for token in order:
            total = total + x[:, token]
            expected[:, token] += total / len(orders)
    scans = Scans((2, 3, 1), bidirectional=bidirectional, axes=axes)
    y, _ = scans(x, lambda inputs: (inputs.cumsum(1), None))
    torch.testing.assert_close(y, expected)


def test_the_first_patch_sees_later_ones_only_in_both_directions() -> None:
    for settings, seen in (({}, 1), ({"axes": 2}, 1), ({"bidirectional": True}, 16)):
        block = model(**settings, mlp=False)
        x = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        block.transform(x)[0][0, 0].square().sum().backward()
        assert x.grad is not None
        assert int((x.grad[0].abs().sum(-1) > 0).sum()) == seen


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_class_is_read_from_the_pool_and_gradients_reach_the_embedding(pool: str) -> None:
    network = model(pool=pool, bidirectional=True, axes=2)
    logits = network(images())
    hidden = network.transform(network.embed(images()))[0]
    pooled = hidden.mean(1) if pool == "mean" else hidden[:, -1]
    torch.testing.assert_close(logits[:, -1], pooled @ network.head.T)
    logits[:, -1].square().sum().backward()
    assert network.unembed is not None
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert {"embed.positions", "embed.project.weight", "embed.project.bias"} <= dict(network.named_parameters()).keys()


def test_fixed_positions_tell_all_places_apart_and_are_no_parameters() -> None:
    places = sincos(3, 5, 8)
    assert places.shape == (15, 8)
    assert torch.equal(places[7, :4], places[5, :4])  # one row
    assert torch.equal(places[7, 4:], places[12, 4:])  # one column
    assert len(places.unique(dim=0)) == 15
    assert "embed.positions" not in dict(model(positions="sincos").named_parameters())


def test_costs_are_those_of_the_model_and_grow_with_scans() -> None:
    counter = CostCounter()
    for settings, scans in (({}, 1), ({"bidirectional": True}, 2), ({"bidirectional": True, "axes": 2}, 4)):
        network = model(**settings)
        found = counter.costs(network.spec, 16)
        assert found.parameters == sum(p.numel() for p in network.parameters())
        measured = {name: value for _, name, _, value in costs(network, 16, 0)}
        assert measured["flops_per_token"] == pytest.approx(found.flops_per_token)
        assert measured["state_size"] == found.cache.state == scans * 2 * 8 * 8
    assert training_flops(network.spec, 0.0, 16, 1) == 3 * 2 * 16 * (4 * 16 + 10)


def test_stacked_runs_equal_runs_alone() -> None:
    spec = ModelSpec(**{**IMAGES, "bidirectional": True, "axes": 2})
    weights = trained_stacked(DigitPatches(), spec)
    start = build_model(spec, seed=1).state_dict()
    assert all(not torch.equal(weights[name], start[name]) for name in start if name.startswith("embed."))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"axes": 3}, "model.axes must be 1 or 2, not 3"),
        ({"bidirectional": 1}, "model.bidirectional must be true or false, not 1"),
        ({"pool": "max"}, "model.pool: unknown pool 'max'"),
        ({"positions": "sin"}, "model.positions: unknown positions 'sin'"),
        ({"patches": [4, 4]}, "model.patches must be [rows, columns, numbers of a patch], not [4, 4]"),
        ({"patches": [1, 4, 4], "axes": 2}, "model.axes 2 needs rows and columns, and the task has 1 x 4 patches"),
        ({"patches": None, "axes": 2}, "model.axes needs a task of images: this one has tokens"),
        ({"patches": None, "bidirectional": True}, "model.bidirectional needs a task of images: this one has tokens"),
        ({"positions": "sincos", "d_model": 18}, "model.positions sincos needs a d_model that is a multiple of 4"),
    ],
)
def test_settings_of_images_refuse(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        model(**settings)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_of_images_refuses_tokens_packing_and_decoding() -> None:
    network = model()
    with pytest.raises(InputError, match=r"images must be patches \[B, 16, 4\] of floats, not torch.int64 \[1, 16\]"):
        network(torch.zeros(1, 16, dtype=torch.long))
    with pytest.raises(InputError, match="takes no image packed or padded"):
        network(images(rows=1), cu_seqlens=torch.tensor([0, 8, 16]))
    with pytest.raises(InputError, match="cannot go token by token"):
        network.step(images())
