"""A rule's layer in a model of transformers: it trains, it generates with a cache as without, and it takes padding."""

import copy
from typing import Any

import pytest
import torch

import deltalab
from deltalab import InputError

transformers = pytest.importorskip("transformers")


def llama(rule: Any = "comba", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for i, block in enumerate(model.model.layers):
        block.self_attn = deltalab.layer(rule, dim=32, returns="hf", layer_idx=i, **settings)
    return model


@pytest.mark.slow(keep="comba")
@pytest.mark.parametrize("rule", ["comba", "mamba2@published", {"name": "attention"}], ids=str)
def test_llama_with_its_attention_replaced(rule: Any) -> None:
    model, tokens = llama(rule), torch.arange(64).reshape(2, 32) * 5 % 32
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    model.eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompt = torch.arange(10).reshape(2, 5)
    for beams in (1, 3):
        options |= {"num_beams": beams, "attention_mask": torch.ones_like(prompt)}
        cached = copy.deepcopy(model).generate(prompt, **options)
        assert torch.equal(cached, model.generate(prompt, use_cache=False, **options)), beams


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_is_left_out(attention: str) -> None:
    model, tokens = llama(), torch.arange(20).reshape(2, 10)
    model.config._attn_implementation = attention
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    with torch.no_grad():
        found = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[1, 4:]
        alone = model(input_ids=tokens[1:, 4:], use_cache=False).logits[0]
    torch.testing.assert_close(found, alone)


def test_what_a_call_returns() -> None:
    x = torch.randn(1, 6, 64)
    for returns, count in (("hf", 2), ("fla", 3)):
        assert len(deltalab.layer("gla", dim=64, returns=returns)(hidden_states=x)) == count  # type: ignore[arg-type]
    assert deltalab.layer("gla", dim=64)(x).shape == x.shape
    assert deltalab.layer("gla", dim=192).mixer.heads == 3


def test_wrong_use_is_one_line() -> None:
    with pytest.raises(InputError, match="unknown setting of a layer 'cnv'; did you mean 'conv'"):
        deltalab.layer("comba", dim=64, cnv=2)
    with pytest.raises(InputError, match="returns: unknown form 'x'"):
        deltalab.layer("comba", dim=64, returns="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown rule 'combo'"):
        deltalab.layer("combo", dim=64)
    model, tokens = llama(), torch.arange(20).reshape(2, 10)
    with pytest.raises(InputError, match="a cache does not go with padding"):
        model(input_ids=tokens, attention_mask=torch.tensor([[1] * 10, [0] * 4 + [1] * 6]), use_cache=True)
