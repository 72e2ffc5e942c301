"""Parameters that do nothing are counted; those that start at zero, or that only long sequences reach, are not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from deltalab.models.dead_parameters import MOST_COUNTED, TOKENS, dead_parameters
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.registry import list_rules

SPEC = ModelSpec(rule="comba", vocab_size=16, d_model=16, heads=2, layers=1)
OF_A_KEY = 16 * 16 + 4 * 16  # its projection, and its taps


@pytest.mark.parametrize(
    ("change", "dead"),
    [
        ({}, 0),
        ({"rule": "hgrn2"}, OF_A_KEY),
        ({"rule": "hgrn2", "layers": 3}, 3 * OF_A_KEY),
        ({"layers": ("rule", "hgrn2", "attention")}, OF_A_KEY),
        ({"rule": "gla", "block": "mamba", "layers": 2}, 0),
        ({"token_shift": True, "gate_rank": 4, "low_rank_bias": True, "rope": True, "qk_norm": True}, 0),
    ],
    ids=str,
)
def test_what_does_nothing_is_counted_in_every_block(change: dict[str, Any], dead: int) -> None:
    assert dead_parameters(replace(SPEC, **change), 48) == dead


@pytest.mark.slow
def test_few_built_in_rules_have_dead_parameters() -> None:
    """The key of HGRN2 is made of its gate, that of Reformer is its query. Recurrences of channels have neither.

    A level of log-linear attention needs as many tokens as it sums up.
    """
    without_keys = {"reformer", "hgrn", "lru", "min_gru", "rg_lru", "s4d", "s5", "slstm"}
    counts = {name: dead_parameters(replace(SPEC, rule=name), TOKENS) for name in list_rules()}
    assert {name for name, count in counts.items() if count} == {"hgrn2", "log_linear_attention"} | without_keys


def test_a_long_sequence_reaches_more() -> None:
    spec = replace(SPEC, rule="log_linear_attention")
    few, more = dead_parameters(spec, 8), dead_parameters(spec, 4 * TOKENS)
    assert few > dead_parameters(spec, TOKENS) > more > 0


def test_dead_parameters_do_nothing() -> None:
    """The output of a model stays when the projection and the taps of its key change."""
    model = build_model(replace(SPEC, rule="hgrn2"))
    tokens = torch.arange(12)[None] % 16
    before = model(tokens)
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        mixer.qkv.weight[16:32] += 1
        mixer.conv[:, 16:32] += 1
    assert torch.equal(model(tokens), before)


def test_blocks_that_are_too_large_are_not_counted() -> None:
    wide = replace(SPEC, rule="gla", d_model=8192)
    assert 4 * wide.d_model**2 > MOST_COUNTED
    assert dead_parameters(wide, TOKENS) is None
    assert dead_parameters(replace(SPEC, layers=("rule", "attention"), mlp_width=2**20), TOKENS) is None
