"""The class for `transformers`: packed and padded inputs, losses, checkpointing, compiling, generating, its Trainer."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

transformers = pytest.importorskip("transformers")

from deltalab.export.modeling_deltalab import DeltaLabConfig, DeltaLabForCausalLM, StateCache  # noqa: E402
from deltalab.models.graphs import tokens as graphs  # noqa: E402
from deltalab.models.spec import ModelSpec  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.compile", "ignore:Mismatch dtype")

VOCABULARY = 23
MODELS: dict[str, dict[str, Any]] = {
    "recurrent": {"rule": "comba"},
    "hybrid": {"rule": "gated_deltanet", "attention": [1], "rope": True},
    "token shift": {"rule": "rwkv7", "token_shift": True},
    "attention over depth": {"rule": "gla", "attention_residuals": 2},
    "latent attention": {"rule": "attention", "conv": 0, "rope": True, "rope_dim": 4, "kv_rank": 6, "q_rank": 5},
    "capped logits": {"rule": "gla", "logit_cap": 2.0},
    "canon layers": {"rule": "comba", "canon": ["A", "B", "C", "D"]},
    "value residual": {"rule": "kda", "value_residual": {}},
    "blocks of RWKV-7": {"preset": "rwkv7", "layers": 2},
    "blocks of RWKV-6": {"preset": "rwkv6", "layers": 2},
    "experts": {"rule": "gla", "experts": {"count": 4, "width": 8, "balance": 0}},
}


def made(**given: Any) -> DeltaLabForCausalLM:
    spec = ModelSpec.of({"vocab_size": VOCABULARY, "d_model": 16, "layers": 2, "heads": 2, "chunk_size": 8, **given})
    config = {f.name: getattr(spec, f.name) for f in fields(ModelSpec)} | {"rule": spec.make_rule().spec()}
    torch.manual_seed(5)
    return DeltaLabForCausalLM(DeltaLabConfig(**config)).double().eval()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> DeltaLabForCausalLM:
    return made(**MODELS[request.param])


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def texts(*lengths: int) -> list[Tensor]:
    return [tokens(1, length, seed=i) for i, length in enumerate(lengths)]


def padded(rows: list[Tensor], *, left: bool) -> tuple[Tensor, Tensor]:
    """The rows as a batch, and its mask."""
    longest = max(row.shape[1] for row in rows)

    def pad(row: Tensor, value: int) -> Tensor:
        missing = longest - row.shape[1]
        return F.pad(row, (missing, 0) if left else (0, missing), value=value)

    return torch.cat([pad(row, 3) for row in rows]), torch.cat([pad(torch.ones_like(row), 0) for row in rows])


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10)


def loss_of(model: DeltaLabForCausalLM, rows: list[Tensor]) -> Tensor:
    """The mean loss of all tokens but the first of each row, each row by itself."""
    logits = torch.cat([model(row).logits[0, :-1] for row in rows])
    return F.cross_entropy(logits.float(), torch.cat([row[0, 1:] for row in rows]))


# --- packed and padded ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [{}, {"return_flash_attn_kwargs": True}, {"return_flash_attn_kwargs": True, "return_position_ids": False},
     {"return_seq_idx": True, "return_position_ids": False}, {"position_ids_start": 2}],
)  # fmt: skip
def test_what_the_collator_flattens_stays_apart(model: DeltaLabForCausalLM, how: dict[str, Any]) -> None:
    rows = texts(4, 1, 7)
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **how)
    batch = collator([{"input_ids": row[0].tolist()} for row in rows])
    out = model(**batch)
    close(out.logits, torch.cat([model(row).logits for row in rows], dim=1))
    torch.testing.assert_close(out.loss, loss_of(model, rows))


def test_the_first_token_of_a_sequence_is_predicted_by_no_other(model: DeltaLabForCausalLM) -> None:
    rows = texts(4, 1, 7)
    row = torch.cat(rows, dim=1)
    out = model(row, labels=row, cu_seqlens=torch.tensor([0, 4, 5, 12]))
    torch.testing.assert_close(out.loss, loss_of(model, rows))
    total = model(row, labels=row, cu_seqlens=torch.tensor([0, 4, 5, 12]), num_items_in_batch=5).loss
    torch.testing.assert_close(total, loss_of(model, rows) * 9 / 5)


def test_rows_may_hold_several_sequences_and_padding(model: DeltaLabForCausalLM) -> None:
    rows = texts(3, 4, 5, 2)
    batch = torch.stack([torch.cat([rows[0], rows[1]], 1)[0], torch.cat([rows[2], rows[3]], 1)[0]])
    places = torch.stack([torch.cat([torch.arange(3), torch.arange(4)]), torch.cat([torch.arange(5), torch.arange(2)])])
    right = [torch.cat([model(row).logits[0] for row in pair]) for pair in (rows[:2], rows[2:])]
    close(model(batch, position_ids=places).logits, torch.stack(right))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 6] = 0
    found = model(batch, position_ids=places, attention_mask=mask, labels=batch)
    close(found.logits[1, :6], right[1][:6])
    torch.testing.assert_close(found.loss, loss_of(model, [*rows[:3], rows[3][:, :1]]))


@pytest.mark.parametrize("left", [True, False])
def test_the_loss_of_a_padded_batch_is_that_of_its_rows(model: DeltaLabForCausalLM, left: bool) -> None:
    rows = texts(6, 2, 9)
    batch, mask = padded(rows, left=left)
    out = model(batch, attention_mask=mask, labels=batch)
    torch.testing.assert_close(out.loss, loss_of(model, rows))
    for logits, there, row in zip(out.logits, mask.bool(), rows, strict=True):
        close(logits[there], model(row).logits[0])
    last = model(batch, attention_mask=mask, logits_to_keep=1).logits
    close(last[:, 0], torch.stack([model(row).logits[0, -1] for row in rows]))


@pytest.mark.parametrize("left", [True, False])
def test_a_padded_batch_goes_on_from_its_cache(model: DeltaLabForCausalLM, left: bool) -> None:
    first, second = texts(6, 2, 9), texts(3, 3, 1)[::-1]
    batch, mask = padded(first, left=left)
    cache = model(batch, attention_mask=mask, use_cache=True).past_key_values
    assert cache.get_seq_length() == 9
    more, more_mask = padded(second, left=left)
    out = model(more, attention_mask=torch.cat([mask, more_mask], dim=1), past_key_values=cache)
    for logits, there, begin, end in zip(out.logits, more_mask.bool(), first, second, strict=True):
        close(logits[there], model(torch.cat([begin, end], dim=1)).logits[0, begin.shape[1] :])
    order = torch.tensor([2, 2, 0])
    cache.batch_select_indices(order)
    token = tokens(3, 1, seed=7)
    out = model(token, attention_mask=torch.ones(3, 13), past_key_values=cache)
    for logits, i, end in zip(out.logits, order.tolist(), token, strict=True):
        close(logits[0], model(torch.cat([first[i], second[i], end[None]], dim=1)).logits[0, -1])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cu_seqlens": torch.tensor([0, 5]), "use_cache": True}, "keep no cache"),
        ({"cu_seqlens": torch.tensor([0, 5]), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "not both"),
        ({"attention_mask": torch.zeros(1, 5), "use_cache": True}, "holds no token"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, r"attention_mask must be \[B, T\]"),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(rule="comba")(tokens(1, 5), **given)


def test_a_row_of_padding_alone_keeps_no_cache() -> None:
    mask = torch.tensor([[0, 0], [1, 1]])
    with pytest.raises(ValueError, match="each row needs a token"):
        made(rule="comba")(tokens(2, 2), attention_mask=mask, use_cache=True)


# --- training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_changes_no_gradient(model: DeltaLabForCausalLM, every: int) -> None:
    row, mask = padded(texts(5, 9), left=True)
    calls = {"n": 0}

    def count(*_: Any) -> None:
        calls["n"] += 1

    def gradients() -> list[Tensor]:
        calls["n"] = 0
        loss = model(row, attention_mask=mask, labels=row).loss
        return [
            one for one in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) if one is not None
        ]

    model.train()
    handles = [block.mlp.register_forward_pre_hook(count) for block in model.model.blocks]
    try:
        right = gradients()
        assert calls["n"] == 2
        model._set_gradient_checkpointing(
            True, lambda f, *x: torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=False), every
        )
        found = gradients()
        assert calls["n"] == 2 + 2 // every
    finally:
        model._set_gradient_checkpointing(False)
        model.eval()
        for handle in handles:
            handle.remove()
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)


def test_the_loss_of_training_needs_no_logits(model: DeltaLabForCausalLM) -> None:
    row, mask = padded(texts(5, 9), left=False)
    leaves = [p for p in model.parameters() if p.dim() > 1]
    for given in ({}, {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 7}):
        found = []
        for training in (True, False):
            out = model.train(training)(row, attention_mask=mask, labels=row, **given)
            assert (out.logits is None) == training
            found.append([out.loss, *torch.autograd.grad(out.loss, leaves, allow_unused=True)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, check_dtype=False)
    model.loss_function = lambda logits, **_: logits.sum()
    try:
        assert model.train()(row, labels=row).logits is not None
    finally:
        del model._loss_function
        model.eval()


@pytest.mark.parametrize("train", [True, False])
def test_targets_that_are_shifted_already_lose_no_token(train: bool) -> None:
    model, ids, left = made(rule="gla").train(train), tokens(2, 9), tokens(2, 9, seed=1)
    left[0, 3] = -100
    logits = model(input_ids=ids).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), left.flatten())
    found = model(input_ids=ids, labels=ids, shift_labels=left).loss
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=0)
    bounds = torch.arange(9).tile(2)[None]  # two rows packed into one
    packed = model(
        input_ids=ids.view(1, 18), labels=ids.view(1, 18), shift_labels=left.view(1, 18), position_ids=bounds
    )
    torch.testing.assert_close(packed.loss.double(), want, rtol=1e-6, atol=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift_lables'"):
        model(input_ids=ids, labels=ids, shift_lables=left)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_training_alone_has_the_balance_loss_of_experts() -> None:
    model, plain = (made(rule="gla", experts={"count": 4, "balance": b}) for b in (0.3, 0))
    row, mask = padded(texts(5, 9), left=False)
    tokens_alone = model.model.train().read(row, attention_mask=mask)[1]
    assert tokens_alone is not None
    assert tokens_alone > 0.5
    model.eval()
    for given, share in (({}, 1), ({"num_items_in_batch": 24}, 0.5)):  # 4 + 8 targets
        for skip in (True, False):
            of = {"input_ids": row, "attention_mask": mask, "labels": row, "skip_logits": skip, **given}
            close(model.eval()(**of).loss, plain.eval()(**of).loss)
            close(model.train()(**of).loss, plain(**of).loss + share * tokens_alone)
    weight = model.model.blocks[0].mlp.router.weight
    (right,) = torch.autograd.grad(model(**of).loss, weight)
    model.gradient_checkpointing_enable()  # what transformers does by default
    close(torch.autograd.grad(model(**of).loss, weight)[0], right)
    with pytest.raises(ValueError, match="no gradient under reentrant checkpoints"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_checkpoints_that_would_cut_a_value_residual_are_refused() -> None:
    model, ids = made(rule="gla", value_residual={}).train(), tokens(2, 9)
    weight = model.model.blocks[0].mixer.qkv.weight
    (right,) = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, weight)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    close(torch.autograd.grad(model(input_ids=ids, labels=ids).loss, weight)[0], right)
    with pytest.raises(ValueError, match=r"model\.value_residual has no gradient under reentrant checkpoints"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


def test_training_alone_has_the_z_loss() -> None:
    model, ids = made(rule="gla"), tokens(2, 9)
    plain = model(input_ids=ids, labels=ids).loss
    model.z_loss = 0.1
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, plain)
    logits = model(input_ids=ids).logits[:, :-1]
    torch.testing.assert_close(
        model.train()(input_ids=ids, labels=ids).loss, plain + 0.1 * logits.logsumexp(-1).square().mean()
    )


def test_parameters_that_a_checkpoint_lacks_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their start depends on torch's seed and on their names; no second model is made to copy from."""
    model = made(rule="comba", output_norm="layer")
    right = {name: value.clone() for name, value in model.named_parameters()}
    lacks = ["model.blocks.0.mixer.qkv.weight", "model.blocks.1.mixer.norm.bias"]
    for name, value in model.named_parameters():
        value.data.fill_(7.0)
        value._is_hf_initialized = name not in lacks
    monkeypatch.setattr("deltalab.export.modeling_deltalab.Model", None)
    model.initialize_weights()
    for name, value in model.named_parameters():
        assert torch.equal(value, right[name] if name in lacks else torch.full_like(value, 7.0)), name


@pytest.mark.slow
def test_a_compiled_model_gives_the_same() -> None:
    model = made(rule="deltanet", layers=1)
    compiled = torch.compile(model, backend="aot_eager")
    row = tokens(2, 5)
    found, right = (one(row, attention_mask=torch.ones_like(row), labels=row) for one in (compiled, model))
    close(found.logits, right.logits)
    close(found.loss, right.loss)
    close(*(torch.autograd.grad(one.loss, model.model.embed.weight)[0] for one in (found, right)))
    model.train()
    close(*(torch.autograd.grad(one(row, labels=row).loss, model.model.embed.weight)[0] for one in (compiled, model)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_trains_and_counts_tokens(tmp_path: Any) -> None:
    """Steps of two small batches are those of one large one, with checkpointing and padding."""
    rows = [{"input_ids": row[0].tolist()} for row in texts(9, 3, 6, 12, 5, 8, 2, 10)]

    def collate(given: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        batch, mask = padded([torch.tensor([one["input_ids"]]) for one in given], left=False)
        return {"input_ids": batch, "attention_mask": mask, "labels": batch.masked_fill(mask == 0, -100)}

    trained = []
    for size, accumulated in ((4, 1), (2, 2)):
        model = made(rule="comba").float()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=accumulated,
            max_steps=2, learning_rate=1e-2, report_to=[], save_strategy="no", logging_steps=1, use_cpu=True,
            gradient_checkpointing=size == 2, disable_tqdm=True, seed=1, remove_unused_columns=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        trained.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(trained[0]) == 2
    assert trained[0] == pytest.approx(trained[1], rel=1e-3)
    assert trained[0][-1] < trained[0][0]


# --- generating -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"do_sample": True}, {"do_sample": True, "num_beams": 2}, {"do_sample": True, "num_return_sequences": 3},
     {"num_beams": 2}],
    ids=str,
)  # fmt: skip
def test_generating_with_and_without_the_cache_is_the_same(model: DeltaLabForCausalLM, how: dict[str, Any]) -> None:
    batch, mask = padded(texts(5, 2), left=True)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        found.append(model.generate(batch, attention_mask=mask, max_new_tokens=5, use_cache=use_cache, **how))
    assert torch.equal(*found)


def test_generating_from_embeddings_and_in_two_turns(model: DeltaLabForCausalLM) -> None:
    batch, mask = padded(texts(5, 2), left=True)
    right = model.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False)
    given = {"inputs_embeds": model.model.embed(batch), "attention_mask": mask}
    assert torch.equal(model.generate(**given, max_new_tokens=6, do_sample=False), right[:, 5:])
    cache = StateCache()
    first = model.generate(batch, attention_mask=mask, max_new_tokens=3, do_sample=False, past_key_values=cache)
    mask = torch.cat([mask, torch.ones(2, 3)], dim=1)
    assert torch.equal(
        model.generate(first, attention_mask=mask, max_new_tokens=3, do_sample=False, past_key_values=cache), right
    )


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 2}])
def test_generating_that_takes_tokens_back_is_refused(model: DeltaLabForCausalLM, how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(tokens(1, 5), max_new_tokens=3, **how)


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_takes_prompts_of_several_lengths(model: DeltaLabForCausalLM) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w3", padding_side="left")
    write = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = [" ".join(f"w{i}" for i in row[0].tolist()) for row in texts(7, 3, 5)]
    how = {"max_new_tokens": 4, "do_sample": False}
    together = write(prompts, batch_size=3, **how)
    assert [one[0]["generated_text"] for one in together] == [
        write(prompt, **how)[0]["generated_text"] for prompt in prompts
    ]


# --- token by token as CUDA graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"left": True}, {"left": False}]
)
def test_graphs_of_tokens_generate_the_same(
    model: DeltaLabForCausalLM, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU stands for the GPU: its graph does the same work anew, on the same tensors."""
    captures = []

    def captured(work: Callable[[], Any]) -> Callable[[], Any]:
        work()
        captures.append(work)
        return work

    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **how}
    left = how.pop("left", None)
    batch, mask = (tokens(2, 5), torch.ones(2, 5)) if left is None else padded(texts(6, 2, 9), left=left)

    def generated() -> Tensor:
        torch.manual_seed(0)
        out: Tensor = model.generate(batch, attention_mask=mask, **how)
        return out

    wanted = generated()
    monkeypatch.setattr(graphs, "captured", captured)
    monkeypatch.setattr(graphs.TokenGraphs, "device_type", "cpu")
    model.token_graphs = graphs.TokenGraphs()
    for _ in range(2):
        assert torch.equal(generated(), wanted)
    spec = model.config.spec()
    assert len(captures) == (spec.make_rule().name != "attention" and not spec.attention)
    model.token_graphs = None
    assert torch.equal(generated(), wanted)
