"""A supernet computes what an ordinary hybrid computes, and a kill changes none of its weights."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from deltalab import InputError
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.study.placing import supernet as supernets
from deltalab.study.placing.supernet import Supernet, drawn
from deltalab.tasks import MQAR
from deltalab.training.spec import TrainSpec

TASK = MQAR(length=16, pairs=2, vocab_size=32)
MODEL = ModelSpec(rule="gated_deltanet", vocab_size=32, d_model=16, layers=3, heads=2, chunk_size=16, attention=(2,))
TRAIN = TrainSpec(steps=6, batch_size=4, lr=1e-2, evaluations=3, eval_batches=1, device="cpu")


def trained(supernet: Supernet, **calls: Any) -> Supernet:
    supernet.advance(calls.get("tell", lambda step, loss: None), calls.get("save", lambda: None))
    return supernet


def weights(supernet: Supernet) -> torch.Tensor:
    return supernet.state_dict()["state"][0]


@pytest.mark.parametrize("placement", combinations(range(3), 1))
def test_a_placement_computes_what_a_hybrid_with_the_same_weights_does(placement: tuple[int, ...]) -> None:
    supernet = trained(Supernet(TASK, MODEL, TRAIN))
    stack = supernet._stack
    by_name = {name: rows[0] for name, rows in stack.layout.unpack(stack.state.weights).items()}
    hybrid = build_model(replace(MODEL, attention=placement))
    of_hybrid = {}
    for name in hybrid.state_dict():
        _, layer, part = (*name.split("."), "", "")[:3]
        kind = "attention" if layer.isdigit() and int(layer) in placement else "rule"
        of_hybrid[name] = by_name[name.replace(".mixer.", f".mixer.{kind}.") if part == "mixer" else name]
    hybrid.load_state_dict(of_hybrid)
    tokens = TASK.batch("validation", 4, 0, 0).inputs
    supernet._place(placement)
    features, _ = stack.measure(tokens)
    torch.testing.assert_close(features[0], hybrid.read(tokens)[0], rtol=1e-4, atol=1e-5)


def test_placements_differ_in_their_scores() -> None:
    supernet = trained(Supernet(TASK, MODEL, replace(TRAIN, lr=0.05, steps=20)))
    tokens, seen = TASK.batch("validation", 4, 0, 0).inputs, []
    for layer in range(3):
        supernet._place((layer,))
        seen.append(supernet._stack.measure(tokens)[0])
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])


def test_a_mixer_starts_as_in_a_model_of_that_mixer_alone() -> None:
    network = supernets.of_both(MODEL).state_dict()
    rule = build_model(replace(MODEL, attention=()), seed=supernets.SEED).state_dict()
    attention = build_model(replace(MODEL, attention=(0, 1, 2)), seed=supernets.SEED).state_dict()
    for name, value in network.items():
        source = attention if ".mixer.attention." in name else rule
        assert torch.equal(
            value, source[name.replace(".mixer.attention.", ".mixer.").replace(".mixer.rule.", ".mixer.")]
        )


def test_steps_draw_all_placements_alike() -> None:
    counts = Counter(drawn(step, 4, 2) for step in range(1200))
    assert counts.keys() == {*combinations(range(4), 2)}
    assert all(150 < count < 250 for count in counts.values())
    assert [drawn(step, 4, 2) for step in range(9)] == [drawn(step, 4, 2) for step in range(9)]


def test_a_mixer_that_no_step_draws_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernets, "drawn", lambda step, layers, count: (1,))
    supernet = Supernet(TASK, MODEL, replace(TRAIN, weight_decay=0.0))
    before = {name: rows[0].clone() for name, rows in supernet._stack.layout.unpack(weights(supernet)).items()}
    trained(supernet)
    after = {name: rows[0] for name, rows in supernet._stack.layout.unpack(weights(supernet)).items()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    idle = ("blocks.0.mixer.attention.", "blocks.1.mixer.rule.", "blocks.2.mixer.attention.")
    assert not any(name.startswith(idle) for name in moved)
    assert any(name.startswith("blocks.1.mixer.attention.") for name in moved)
    assert any(name.startswith("blocks.0.mixer.rule.") for name in moved)


def test_a_supernet_that_was_killed_ends_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernets, "SAVED_EVERY", 0.0)
    whole = trained(Supernet(TASK, MODEL, TRAIN))
    killed, kept = Supernet(TASK, MODEL, TRAIN), []

    def save() -> None:
        state = killed.state_dict()
        kept.append({"step": state["step"], "state": tuple(part.clone() for part in state["state"])})
        if len(kept) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(killed, save=save)
    assert kept[-1]["step"] == 4
    again = Supernet(TASK, MODEL, TRAIN)
    again.load_state_dict(kept[-1])
    trained(again)
    assert again.step == 6
    assert torch.equal(weights(again), weights(whole))


def test_a_supernet_that_diverges_says_so() -> None:
    supernet = Supernet(TASK, MODEL, TRAIN)
    weights(supernet).fill_(torch.nan)
    with pytest.raises(InputError, match=r"the supernet diverged at step 0: lower train\.lr"):
        trained(supernet)
