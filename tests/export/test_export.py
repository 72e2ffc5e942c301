"""An exported model is our model: same logits, same gradients, and a state that does not grow, without deltalab."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltalab import registry
from deltalab.errors import InputError
from deltalab.export import export_hf
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec

PLUGIN = '''
"""A rule that a user wrote: the keys' oldest values fade, and the write is squared."""
from dataclasses import dataclass
from typing import ClassVar
import math
from deltalab import gates as g8
from deltalab.rule import (
    Operands,
    UpdateRule,
    knob,
)
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class Squared(UpdateRule):
    """S_t = alpha_t S_{t-1} + beta_t^2 k_t v_t^T."""

    name: ClassVar[str] = "exported_squared"
    transition: Transition = DECAY
    g: g8.Gate = knob(g8.mamba2_decay())
    beta: g8.Gate = knob(g8.sigmoid())

    def operands(self, q, k, v, *, g, beta):
        from deltalab.structure import IPLR
        return Operands(r=q, k=k, u=math.pi * beta[..., None] ** 2 * v, g=g)
'''

MODELS = {
    "comba": {"rule": {"name": "comba", "transition": "iplr", "d": {"head": {"init": 1.0}}}},
    "a gate of the rule's own": {"rule": {"name": "comba", "transition": "dplr", "g": "low_rank_decay", "silu": "qk"}},
    "gated_deltanet": {"rule": "gated_deltanet", "tie_embeddings": False},
    "hybrid": {"rule": "comba", "attention": [1]},
    "mamba": {"rule": "mamba2", "block": "mamba"},
    "plugin": {"rule": "exported_squared"},
    "fast_weights": {"rule": {"name": "ttt_linear", "mini_batch": 4}},
    "ridge": {"rule": {"name": "gka", "iterations": 3}},
    "element-wise": {"rule": "hgrn"},
    "nonlinear": {"rule": "slstm"},
    "chosen blocks": {"rule": {"name": "moba", "block": 4, "top": 2}},
    "carry": {"rule": "preconditioned_gated_deltanet"},
    "every part of a layer": {
        "rule": "gated_deltanet",
        "heads": 4,
        "qk_heads": 2,
        "qk_norm": True,
        "rope": 500,
        "token_shift": True,
        "output_norm": "group",
        "output_gate": "silu",
    },
    "token shift": {"rule": "mamba2", "token_shift": True, "output_norm": "rms_all", "output_gate": "silu_before_norm"},
    "a rule for each layer": {
        "rule": "gated_deltanet",
        "layers": ["rule", "kda", {"name": "attention", "layer": {"heads": 4, "kv_heads": 2, "rope": True, "conv": 0}}],
    },
}


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    file = tmp_path_factory.mktemp("user") / "squared.py"
    file.write_text(PLUGIN)
    with registry.isolated():
        registry.add_plugin(file)
        yield


def trained(**spec) -> Model:
    """A model that an optimizer has moved, so that nothing stands where it started."""
    torch.set_num_threads(1)
    model = build_model({"vocab_size": 23, "d_model": 16, "chunk_size": 8, **spec}, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(3):
        inputs = tokens(4, 12, seed=step)
        torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(23, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request, tmp_path_factory):
    """Our model, and its export as loaded again by the class that the export is a copy of."""
    from deltalab.export.modeling_deltalab import DeltaLabForCausalLM

    ours = trained(**MODELS[request.param])
    folder = tmp_path_factory.mktemp("export") / request.param
    export_hf(ours.spec, ours.state_dict(), folder, provenance={})
    return ours, DeltaLabForCausalLM.from_pretrained(folder)


@pytest.mark.slow
def test_logits_loss_and_gradients_are_ours(pair):
    ours, theirs = pair
    inputs = tokens(3, 21)
    labels = inputs.masked_fill(tokens(3, 21, seed=1) < 5, -100)
    expected = ours(inputs)
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    out = theirs(inputs, labels=labels)
    torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.loss, loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(theirs(inputs, logits_to_keep=2).logits, expected[:, -2:], rtol=0, atol=1e-6)
    assert theirs(inputs, return_dict=False)[0].shape == expected.shape

    loss.backward()
    out.loss.backward()
    gradients = {name: value.grad for name, value in theirs.model.named_parameters()}
    assert all(torch.count_nonzero(gradient) for gradient in gradients.values())
    for name, value in ours.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [None, 100], ids=["mean", "part of a larger batch"])
def test_training_gives_the_loss_without_the_logits(pair, count):
    _, theirs = pair
    inputs = tokens(3, 21)
    labels = inputs.masked_fill(tokens(3, 21, seed=1) < 5, -100)
    whole = theirs(inputs, labels=labels, num_items_in_batch=count)
    asked = theirs(inputs, labels=labels, num_items_in_batch=count, skip_logits=True)
    theirs.train()
    try:
        training = theirs(inputs, labels=labels, num_items_in_batch=count)
        logits = theirs(inputs, labels=labels, skip_logits=False).logits
    finally:
        theirs.eval()
    assert asked.logits is training.logits is None
    torch.testing.assert_close(logits, whole.logits)
    torch.testing.assert_close(training.loss, whole.loss)
    parameters = list(theirs.parameters())
    for one, other in zip(*(torch.autograd.grad(out.loss, parameters) for out in (training, whole)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3, "num_return_sequences": 2}])
def test_generating_with_the_state_equals_recomputing_everything(pair, how):
    _, theirs = pair
    prompt = tokens(2, 7)
    with_state = theirs.generate(prompt, max_new_tokens=9, do_sample=False, **how)
    assert torch.equal(with_state, theirs.generate(prompt, max_new_tokens=9, do_sample=False, use_cache=False, **how))
    assert with_state.shape == (2 * how.get("num_return_sequences", 1), 16)


def test_the_state_grows_only_with_attention(pair):
    ours, theirs = pair
    held = [
        theirs.generate(tokens(2, 5), max_new_tokens=n, return_dict_in_generate=True).past_key_values for n in (4, 12)
    ]
    # The last token that is generated is never read.
    assert [cache.get_seq_length() for cache in held] == [8, 16]
    assert [cache.numel() for cache in held] == [2 * sum(ours.cache_size(8)), 2 * sum(ours.cache_size(16))]
    assert (held[0].numel() == held[1].numel()) != any(rule.name in ("attention", "moba") for rule in ours.spec.rules())


def test_a_kept_state_goes_on(pair):
    _, theirs = pair
    text = tokens(2, 12)
    whole = theirs(text).logits
    cache = theirs(text[:, :5], use_cache=True).past_key_values
    rest = theirs(text[:, 5:], past_key_values=cache)
    torch.testing.assert_close(rest.logits, whole[:, 5:], rtol=1e-4, atol=1e-5)
    assert rest.past_key_values is cache
    assert cache.get_seq_length() == 12
    going_on = theirs.generate(torch.cat([text, text[:, :1]], dim=1), past_key_values=cache, max_new_tokens=4)
    assert torch.equal(going_on, theirs.generate(torch.cat([text, text[:, :1]], dim=1), max_new_tokens=4))
    with pytest.raises(ValueError, match="cannot give its last tokens back"):
        cache.crop(1)


@pytest.mark.slow
def test_padding_changes_nothing_for_the_text(pair):
    _, theirs = pair
    lengths = [9, 4, 1]
    prompts = [tokens(1, length, seed=length) for length in lengths]
    alone = [theirs.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :] for prompt in prompts]
    for side in ("left", "right"):
        pads = [(9 - n, 0) if side == "left" else (0, 9 - n) for n in lengths]
        padded = torch.cat([torch.nn.functional.pad(p, pad, value=7) for p, pad in zip(prompts, pads, strict=True)])
        ones = [torch.ones(1, n, dtype=torch.long) for n in lengths]
        mask = torch.cat([torch.nn.functional.pad(one, pad) for one, pad in zip(ones, pads, strict=True)])
        logits = theirs(padded, attention_mask=mask).logits
        for row, there, prompt in zip(logits, mask.bool(), prompts, strict=True):
            torch.testing.assert_close(row[there], theirs(prompt).logits[0], rtol=1e-4, atol=1e-5)
        for use_cache in (True, False) if side == "left" else (True,):
            text = theirs.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=use_cache)
            assert torch.equal(text[:, 9:], torch.stack(alone))
    beams = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 3, "do_sample": False}
    text = theirs.generate(padded, attention_mask=mask, **beams)
    assert torch.equal(text[:, 9:], torch.cat([theirs.generate(prompt, **beams)[:, -3:] for prompt in prompts]))


def test_what_a_model_cannot_do_is_refused(pair):
    from transformers import DynamicCache

    _, theirs = pair
    with pytest.raises(ValueError, match="returns no attentions"):
        theirs(tokens(1, 3), output_attentions=True)
    with pytest.raises(ValueError, match="must be a StateCache"):
        theirs(tokens(1, 3), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="stateful"):
        theirs.generate(tokens(1, 3), max_new_tokens=2, assistant_model=theirs)


def test_what_no_checkpoint_gives_starts_as_ours_does(pair, tmp_path):
    from safetensors.torch import load_file, save_file

    from deltalab.export.modeling_deltalab import DeltaLabForCausalLM

    ours, theirs = pair
    expected = build_model(ours.spec, seed=11).state_dict()
    torch.manual_seed(11)
    started = DeltaLabForCausalLM(theirs.config).model.state_dict()
    assert all(torch.equal(started[name], value) for name, value in expected.items())

    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = [f"blocks.1.mixer.{name}" for name in ("conv", "qkv.weight")]
    save_file({name: w for name, w in weights.items() if name[6:] not in lost}, tmp_path / "model.safetensors")
    loaded = DeltaLabForCausalLM.from_pretrained(tmp_path).model.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(loaded[name], expected[name] if name in lost else value)


ELSEWHERE = """
import json, os, sys

class NoDeltalab:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("deltalab", "deltalab_rules", "triton"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, NoDeltalab())
import torch
from transformers import AutoConfig, AutoModelForCausalLM

root, loaded = sys.argv[1], {}
for name in sys.argv[2:]:
    folder = os.path.join(root, name, "model")
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "deltalab"
    loaded[name] = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
for name, model in loaded.items():
    case = torch.load(os.path.join(root, name, "case.pt"))
    difference = (model(case["inputs"]).logits - case["logits"]).abs().max().item()
    text = model.generate(case["inputs"], max_new_tokens=4, do_sample=False)
    again = os.path.join(root, name, "again")
    model.save_pretrained(again)
    same = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)(case["inputs"]).logits
    print(json.dumps({
        "name": name, "difference": difference, "generated": text[:, -4:].tolist(),
        "saved again": (same - case["logits"]).abs().max().item(),
        "bfloat16": str(AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype="bfloat16")(case["inputs"]).logits.dtype),
    }))
"""


@pytest.mark.slow
def test_all_of_it_loads_in_one_process_that_has_no_deltalab(tmp_path):
    expected = {}
    for name, spec in MODELS.items():
        ours = trained(**spec)
        inputs = tokens(2, 11)
        # The folders share a last name, by which transformers caches their code.
        export_hf(ours.spec, ours.state_dict(), tmp_path / name / "model", provenance={})
        torch.save({"inputs": inputs, "logits": ours(inputs).detach()}, tmp_path / name / "case.pt")
        text = inputs
        for _ in range(4):
            text = torch.cat([text, ours(text)[:, -1:].argmax(-1)], dim=1)
        expected[name] = text[:, -4:].tolist()
    environment = {
        "PATH": os.environ["PATH"],
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path), *MODELS],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert {result["name"]: result["generated"] for result in results} == expected
    for result in results:
        assert result["difference"] < 1e-6
        assert result["saved again"] < 1e-6
        assert result["bfloat16"] == "torch.bfloat16"


@pytest.mark.slow(keep="comba")
@pytest.mark.parametrize("rule", sorted(set(registry.list_rules())))
def test_every_shipped_rule_can_leave(rule, tmp_path):
    """Its file imports nothing that an exported model lacks."""
    ours = build_model({"vocab_size": 8, "d_model": 8, "layers": 1, "rule": rule})
    export_hf(ours.spec, ours.state_dict(), tmp_path / "out", provenance={})
    assert (tmp_path / f"out/rule_{rule}.py").exists()


def test_the_folder_says_what_it_holds(tmp_path):
    ours = trained(**MODELS["comba"])
    export_hf(ours.spec, ours.state_dict(), tmp_path / "out", provenance={"study": "a|b", "seeds": [1, 2]})
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert ModelSpec.of({key: config[key] for key in ("vocab_size", "rule")}).make_rule() == ours.spec.make_rule()
    assert config["rule"]["beta"] == {"sigmoid": {"max": 1.0}}
    assert config["provenance"] == {"study": "a|b", "seeds": [1, 2]}
    readme = (tmp_path / "out/README.md").read_text()
    assert f"The state of one sequence is {sum(ours.cache_size(3)):,} numbers, however long" in readme
    assert r"| study | a\|b |" in readme
    assert "S_t = alpha_t (I - 2 b beta_t k_t k_t^T) S_{t-1}" in readme
    hybrid = trained(**MODELS["hybrid"])
    export_hf(hybrid.spec, hybrid.state_dict(), tmp_path / "hybrid", provenance={})
    readme = (tmp_path / "hybrid/README.md").read_text()
    assert (
        f"grows with it, as attention remembers every token: {sum(hybrid.cache_size(32)):,} numbers after 32" in readme
    )
    assert "The layers, from first to last: comba, attention.\n" in readme
    windowed = trained(**MODELS["hybrid"], window=4)
    export_hf(windowed.spec, windowed.state_dict(), tmp_path / "windowed", provenance={})
    assert "however long" in (tmp_path / "windowed/README.md").read_text()


class TestNothingIsHalfWritten:
    @pytest.fixture
    def model(self):
        return build_model({"vocab_size": 8, "d_model": 8, "rule": "deltanet"})

    def export(self, model, directory, weights=None):
        export_hf(model.spec, model.state_dict() if weights is None else weights, directory, provenance={})

    def test_an_empty_directory_is_taken_and_any_other_left_alone(self, model, tmp_path):
        (tmp_path / "empty").mkdir()
        self.export(model, tmp_path / "empty")
        assert (tmp_path / "empty/model.safetensors").stat().st_size > 0
        before = {file: file.read_bytes() for file in (tmp_path / "empty").glob("*.*")}
        for target in (tmp_path / "empty", tmp_path / "empty/README.md"):
            with pytest.raises(InputError, match="exists and is not an empty directory"):
                self.export(model, target)
        assert {file: file.read_bytes() for file in (tmp_path / "empty").glob("*.*")} == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]

    def test_a_place_where_nothing_can_be_written(self, model, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot be written: Not a directory"):
            self.export(model, tmp_path / "file/out")

    def test_a_full_disk(self, model, tmp_path, monkeypatch):
        def full(self, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(InputError, match="out: cannot be written: No space left on device"):
            self.export(model, tmp_path / "out")
        assert not list(tmp_path.iterdir())

    def test_weights_that_do_not_fit(self, model, tmp_path):
        weights = model.state_dict()
        weights["norm.weight"] = torch.ones(9)
        weights["nrom.weight"] = weights.pop("embed.weight")
        with pytest.raises(InputError, match=r"no embed.weight; unknown nrom.weight; norm.weight is \[9\], not \[8\]"):
            self.export(model, tmp_path / "out", weights)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "line",
        [
            "import numpy as np",
            "import os.path, numpy",
            "from deltalab.models.layer import linear",
            "from deltalab import scan",
            "import deltalab.gates",
            "from .squared import Squared",
        ],
    )
    def test_a_rule_that_would_not_import_there(self, line, tmp_path):
        from deltalab.export.modules import _refuse_other_imports
        from deltalab.registry import Plugin, rule_plugin

        file = tmp_path / "rule.py"
        file.write_text(f"def lazily():\n    {line}\n")
        wrong = line.replace("os.path, ", "").replace("from deltalab import scan", "x deltalab.scan").split()[1]
        with pytest.raises(InputError, match=rf"rule.py:2: imports '{wrong}'; the rule of an exported model may"):
            _refuse_other_imports(Plugin(rule_plugin("comba").kind, file))
