"""An exported folder has its kernels, and they give what the model gives without them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltalab import registry
from deltalab.authoring.files.scaffold import new_rule
from deltalab.export import export_hf
from deltalab.models.model import build_model

pytest.importorskip("triton")
pytest.importorskip("transformers")

MODELS = {
    "scalar": {"rule": "comba"},
    "diagonal": {"rule": "kda", "tie_embeddings": False},
    "ridge": {"rule": {"name": "gka", "iterations": 3}, "layers": 1},
    "own_kernel": {"rule": "saturates", "layers": 1},
}

ELSEWHERE = """
import copy, importlib, json, os, sys

class NoDeltalab:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("deltalab", "deltalab_rules"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, NoDeltalab())
import torch
from transformers import AutoModelForCausalLM

root, loaded = sys.argv[1], {}
for name in sys.argv[2:]:
    loaded[name] = AutoModelForCausalLM.from_pretrained(os.path.join(root, name), trust_remote_code=True)
missing = {}
for name, model in loaded.items():
    # A CPU has kernels in Triton's interpreter alone, where they are asked for.
    backends = importlib.import_module(type(model).__module__.rsplit(".", 1)[0] + ".ops_backends")
    backends._unasked = lambda device: True
    missing[name] = backends.lacks_triton("cpu")
for name, model in loaded.items():
    case = torch.load(os.path.join(root, name, "case.pt"))
    out = model(case["inputs"], labels=case["inputs"])
    out.loss.backward()
    gradient = model.model.embed.weight.grad
    print(json.dumps({
        "name": name, "lacks": missing[name],
        "logits": (out.logits - case["logits"]).abs().max().item(),
        "gradient": (gradient - case["gradient"]).abs().max().item(),
        "copy": (copy.deepcopy(model)(case["inputs"]).logits - case["logits"]).abs().max().item(),
    }))
"""


def tokens() -> torch.Tensor:
    return torch.randint(23, (1, 19), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_the_kernels_of_several_folders_run_in_one_process_without_deltalab(tmp_path: Path) -> None:
    with registry.isolated():
        registry.add_plugin(new_rule("saturates", tmp_path, kernel=True))
        for name, spec in MODELS.items():
            ours = build_model({"vocab_size": 23, "d_model": 32, "chunk_size": 16, **spec}, seed=3)
            export_hf(ours.spec, ours.state_dict(), tmp_path / name, provenance={})
            out = ours(tokens())
            torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
            case = {"inputs": tokens(), "logits": out.detach(), "gradient": ours.embed.weight.grad}
            torch.save(case, tmp_path / name / "case.pt")
    environment = {
        "PATH": os.environ["PATH"],
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path), *MODELS],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [result["name"] for result in results] == list(MODELS)
    for result in results:
        assert result["lacks"] is None
        assert result["logits"] < 1e-4
        assert result["gradient"] < 1e-4
        assert result["copy"] < 1e-4
        assert result["logits"] > 0, "the kernels ran: they round as PyTorch does nowhere else"
