"""An exported folder as a bare model, as a classifier, and with the hidden states between blocks."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from deltalab.export.hf import export_hf
from deltalab.export.modeling_deltalab import DeltaLabConfig, DeltaLabForCausalLM
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec

SPEC: dict[str, Any] = {"rule": "comba", "vocab_size": 23, "d_model": 16, "layers": 3, "heads": 2, "chunk_size": 8}
IDS = torch.arange(14).reshape(2, 7) * 5 % 23
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    export_hf(ModelSpec.of(SPEC), build_model(SPEC, seed=3).state_dict(), out, provenance={})
    return out


def loaded(kind: Any, folder: Path, **given: Any) -> Any:
    return kind.from_pretrained(folder, trust_remote_code=True, **given).double().eval()


def test_hidden_states_are_what_the_blocks_return(folder: Path) -> None:
    model = loaded(AutoModelForCausalLM, folder)
    out = model(input_ids=IDS, output_hidden_states=True)
    x, branch = model.model.embed(IDS), None
    want = [x]
    for block in model.model.blocks:
        x, branch, _ = block(x, branch)
        want.append(x + branch)
    want[-1] = model.model.norm(x, branch)[1]
    assert len(out.hidden_states) == 4
    for found, state in zip(out.hidden_states, want, strict=True):
        torch.testing.assert_close(found, state)
    torch.testing.assert_close(out.logits, model(input_ids=IDS).logits)
    assert model(input_ids=IDS).hidden_states is None


def test_hidden_states_of_padded_rows_are_those_of_each_row(folder: Path) -> None:
    model = loaded(AutoModelForCausalLM, folder)
    both = model(input_ids=IDS, attention_mask=MASK, output_hidden_states=True).hidden_states
    alone = model(input_ids=IDS[1:, :4], output_hidden_states=True).hidden_states
    for found, state in zip(both, alone, strict=True):
        torch.testing.assert_close(found[1:, :4], state)


def test_checkpointing_leaves_the_hidden_states(folder: Path) -> None:
    model = loaded(AutoModelForCausalLM, folder).train()
    want = model(input_ids=IDS, output_hidden_states=True).hidden_states
    model.gradient_checkpointing_enable()
    for found, state in zip(model(input_ids=IDS, output_hidden_states=True).hidden_states, want, strict=True):
        torch.testing.assert_close(found, state)


def test_attention_over_depth_has_no_state_between_blocks() -> None:
    spec = ModelSpec.of({**SPEC, "attention_residuals": 1})
    config = {f.name: getattr(spec, f.name) for f in fields(ModelSpec)} | {"rule": spec.make_rule().spec()}
    with pytest.raises(ValueError, match="a model with attention_residuals has no hidden state between blocks"):
        DeltaLabForCausalLM(DeltaLabConfig(**config))(input_ids=IDS, output_hidden_states=True)


def test_the_bare_model_has_the_vectors_before_the_logits(folder: Path) -> None:
    bare, model = loaded(AutoModel, folder), loaded(AutoModelForCausalLM, folder)
    out = bare(input_ids=IDS, attention_mask=MASK, output_hidden_states=True)
    torch.testing.assert_close(
        model.model.logits(out.last_hidden_state), model(input_ids=IDS, attention_mask=MASK).logits
    )
    torch.testing.assert_close(out.last_hidden_state, out.hidden_states[-1])
    first = bare(input_ids=IDS[:, :4], use_cache=True)
    rest = bare(input_ids=IDS[:, 4:], past_key_values=first.past_key_values).last_hidden_state
    torch.testing.assert_close(rest, bare(input_ids=IDS).last_hidden_state[:, 4:])


@pytest.mark.parametrize("left", [True, False])
def test_a_classifier_scores_the_last_token_of_each_row(folder: Path, left: bool) -> None:
    model = loaded(AutoModelForSequenceClassification, folder, num_labels=3)
    ids, mask = (IDS.flip(1), MASK.flip(1)) if left else (IDS, MASK)
    short = ids[1:][:, MASK.flip(1)[1].bool()] if left else ids[1:, :4]
    scores = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(scores[1:], model(input_ids=short).logits)
    torch.testing.assert_close(scores[:1], model(input_ids=ids[:1]).logits)
    labels = torch.tensor([0, 2])
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, labels))


def test_a_classifier_learns_and_comes_back(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=2)
    ids = torch.randint(0, 23, (32, 6), generator=torch.Generator().manual_seed(0))
    labels = (ids[:, 2] > 11).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
    model.save_pretrained(tmp_path / "trained")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "trained", trust_remote_code=True)
    torch.testing.assert_close(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
