"""The engines of others on an exported folder, where deltalab is not installed: Trainer, FSDP2, pipeline, lm-eval."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deltalab.export.folders import from_folder
from deltalab.export.recipe import make_recipe
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.spec import TrainSpec

pytest.importorskip("transformers")

START = """
import json, os, sys

class NoDeltalab:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("deltalab", "deltalab_rules"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, NoDeltalab())
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, out = sys.argv[1], sys.argv[2]

def say(value):
    print("said: " + json.dumps(value), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model over bytes, with its tokenizer."""
    model = ModelSpec.of({"rule": "comba", "vocab_size": 256, "d_model": 32, "layers": 2, "heads": 2, "chunk_size": 16})
    train = TrainSpec(steps=20, batch_size=2, lr=1e-2, evaluations=1)
    recipe = make_recipe(train, length=32, seed=0, origin="trial abc")
    source = Source(model, build_model(model, seed=0).state_dict, recipe, {}, {}, "bytes")
    directory = tmp_path_factory.mktemp("exported") / "model"
    export(source, directory)
    return directory


def elsewhere(script: str, *words: object, launcher: tuple[str, ...] = ()) -> list[Any]:
    """What a script says, in a process without deltalab."""
    out = Path(str(words[-1]))
    file = out.parent / "script.py"
    file.write_text(START + script)
    environment = {
        "PATH": os.environ["PATH"],
        "HF_HOME": str(out.parent / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    run = subprocess.run(
        [sys.executable, *launcher, str(file), *map(str, words)],
        env=environment, cwd=out.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()
    return [json.loads(line.removeprefix("said: ")) for line in lines if line.startswith("said: ")]


TRAINER = """
from transformers import Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("so it goes, and so it goes, and so it goes on and on!").input_ids
rows = [{"input_ids": ids[:32], "labels": ids[:32]}] * 64
arguments = TrainingArguments(
    out, max_steps=30, per_device_train_batch_size=2, learning_rate=1e-2, save_steps=30, logging_steps=1, report_to=[],
    use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
case = torch.tensor([ids[:12]])
model.eval()
again = AutoModelForCausalLM.from_pretrained(os.path.join(out, "checkpoint-30"), trust_remote_code=True)
say({
    "losses": [losses[0], losses[-1]],
    "again": (again(case).logits - model(case).logits).abs().max().item(),
    "files": sorted(name for name in os.listdir(os.path.join(out, "checkpoint-30"))),
    "logits": again(case).logits[0, -1, :4].tolist(),
})
"""


@pytest.mark.slow
def test_trainer_trains_a_folder_and_what_it_saves_loads_and_exports_again(folder: Path, tmp_path: Path) -> None:
    (said,) = elsewhere(TRAINER, folder, tmp_path / "out")
    assert said["losses"][1] < said["losses"][0] / 3
    assert said["again"] < 1e-6
    assert {"modeling_deltalab.py", "ops_triton_kernels.py", "config.json", "tokenizer.json"} <= set(said["files"])
    saved = from_folder(tmp_path / "out/checkpoint-30")
    assert saved.weights is not None
    assert saved.tokenizer
    written = export(saved, tmp_path / "again")
    assert written.trained
    ours = build_model(saved.model)
    ours.load_state_dict(dict(saved.weights()))
    ids = torch.tensor([list(b"so it goes, ")])
    assert ours(ids)[0, -1, :4].tolist() == pytest.approx(said["logits"], abs=1e-5)


PIPELINE = """
from transformers import pipeline

write = pipeline("text-generation", model=folder, tokenizer=folder, trust_remote_code=True, device="cpu")
texts = ["so it", "and then, some time later"]
together = write(texts, max_new_tokens=5, do_sample=False, batch_size=2, return_full_text=False)
alone = [write(text, max_new_tokens=5, do_sample=False, return_full_text=False) for text in texts]
say([together == alone, len(alone[0][0]["generated_text"])])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = torch.randint(256, (1, 24))
compiled = torch.compile(model)
say((compiled(ids).logits - model(ids).logits).abs().max().item())
"""


@pytest.mark.slow
def test_a_pipeline_generates_and_a_compiled_model_gives_the_same(folder: Path, tmp_path: Path) -> None:
    (same, length), difference = elsewhere(PIPELINE, folder, tmp_path / "out")
    assert same
    assert length
    assert difference < 1e-5


FSDP = """
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
for block in model.model.blocks:
    fully_shard(block)
fully_shard(model)
sharded = sum(type(p).__name__ == "DTensor" for p in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
ids = torch.tensor([list(b"so it goes, and so it goes, and so it goes on"[:32])] * 2)
losses = []
for _ in range(8):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    whole = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    whole.load_state_dict(state, strict=False)
    whole.save_pretrained(out)
    count = len(list(model.parameters()))
    say({"processes": dist.get_world_size(), "losses": losses, "sharded": sharded, "all": count})
dist.destroy_process_group()
"""

ALONE = """
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
ids = torch.tensor([list(b"so it goes, and so it goes, and so it goes on"[:32])] * 2)
for _ in range(8):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    say(loss.item())
"""


@pytest.mark.slow
def test_fsdp2_on_two_processes_trains_as_one_process_does(folder: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29613")
    (said,) = elsewhere(FSDP, folder, tmp_path / "out", launcher=launcher)
    alone = elsewhere(ALONE, folder, tmp_path / "alone")
    assert said["processes"] == 2
    assert said["sharded"] == said["all"] > 0
    assert said["losses"] == pytest.approx(alone, rel=1e-4)
    assert from_folder(tmp_path / "out").weights is not None


LM_EVAL = """
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

model = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", batch_size=2, max_length=64)
tasks = TaskManager(include_path=out, include_defaults=False)
found = simple_evaluate(model, tasks=["choices", "perplexity"], task_manager=tasks, bootstrap_iters=0)
say({name: {k: v for k, v in each.items() if not isinstance(v, str)} for name, each in found["results"].items()})
for text in ("so it", "then"):
    full = torch.tensor([list(b"\\0" + text.encode())])
    logits = model.model(full).logits[0, :-1]
    say(-torch.nn.functional.cross_entropy(logits, full[0, 1:], reduction="sum").item())
"""


@pytest.mark.slow
def test_lm_evaluation_harness_scores_a_folder_on_local_tasks(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [
        {"question": "so it", "choices": [" goes", " went"], "answer": 0},
        {"question": "on", "choices": ["!", "?"], "answer": 1},
    ]
    (tasks / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("so it", "then")))

    def task(name: str, file: str, **given: Any) -> None:
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tasks / file)}},
            "test_split": "test",
        }
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **given}))

    task(
        "choices", "choices.jsonl", output_type="multiple_choice", doc_to_text="{{question}}",
        doc_to_target="{{answer}}", doc_to_choice="{{choices}}", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    task(
        "perplexity", "text.jsonl", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    )  # fmt: skip
    results, *likelihoods = elsewhere(LM_EVAL, folder, tasks)
    assert results["choices"]["acc,none"] in (0.0, 0.5, 1.0)
    bits = -sum(likelihoods) / math.log(2) / len(b"so itthen")
    assert results["perplexity"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
