"""FSDP2 with bf16 matrices keeps what gates learn in fp32, whoever shards the model."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from deltalab.models.spec import ModelSpec

pytestmark = pytest.mark.slow

SPEC = ModelSpec(rule="comba", vocab_size=16, d_model=8, heads=2, layers=2, tie_embeddings=False)

COMMON = """
import os
import sys
from copy import deepcopy

import torch
import torch.distributed as dist

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tokens = torch.arange(24).view(2, 12) % 7


def seen_by(model):
    # The dtypes of weights while they are used.
    seen = {}

    def note(part, given, found):
        seen.update({name: (type(value.data), value.dtype) for name, value in part.named_parameters()})

    for part in model.modules():
        if type(part).__name__ in ("Gates", "Linear"):
            part.register_forward_hook(note)
    return seen


def check(model, right, seen):
    # right: what the model was before it was sharded, with its gradients.
    learned = {name for name in seen if "learned" in name}
    assert learned and len(learned) < len(seen)
    for name, found in seen.items():
        assert found == (torch.Tensor, torch.float32 if name in learned else torch.bfloat16), (name, found)
    for (name, value), want in zip(model.named_parameters(), right.parameters(), strict=True):
        gradient = value.grad.full_tensor()
        assert gradient.dtype == torch.float32
        error = (gradient - want.grad).norm() / want.grad.norm()
        assert error < 0.15, (name, error)
"""

TORCHTITAN = """
from torch.distributed.device_mesh import init_device_mesh

os.environ.update(DELTALAB_FOLDER=folder, DELTALAB_RUN=folder, DELTALAB_DATA=folder)
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
from deltalab.engines.deltalab_train import titan

model = titan.Pretraining()
model.make()
model.init_weights()
right = deepcopy(model)
seen = seen_by(model)
given = {"dtypes": (torch.bfloat16, torch.float32), "backend": None, "offload": False}
titan.parallelize(model, init_device_mesh("cpu", (world,)), **given)
for _ in range(2):
    for one in (model, right):
        one.zero_grad()
        one(tokens, tokens).backward()
for value in right.parameters():
    value.grad *= world  # the engine divides by the tokens of all processes
check(model, right, seen)
with torch.no_grad():
    model(tokens, tokens)
dist.destroy_process_group()
"""

ACCELERATE = """
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="localhost")
os.environ.update(MASTER_PORT=sys.argv[4], ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE=str(world))
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

from deltalab.engines.deltalab_train import folder as exported
from deltalab.export.modeling_deltalab import DeltaLabConfig, DeltaLabForCausalLM

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Block"])
plugin.set_mixed_precision("bf16")
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=True)
# Accelerate shards on accelerators alone.
accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, DistributedType.FSDP
torch.manual_seed(0)  # the same weights in all processes
model = DeltaLabForCausalLM(DeltaLabConfig(**vars(exported.spec())))
right = deepcopy(model)
seen = seen_by(model)
model.shard_gates()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
for _ in range(2):
    for one in (model, right):
        one.zero_grad()
        one(tokens, labels=tokens).loss.backward()
check(model, right, seen)
optimizer.step()
for (name, value), before in zip(model.named_parameters(), right.parameters(), strict=True):
    assert torch.equal(value.full_tensor() != before, value.grad.full_tensor() != 0), name
dist.destroy_process_group()
"""


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "script", "spec"),
    [
        ("torchtitan", TORCHTITAN, SPEC),
        ("accelerate", ACCELERATE, SPEC),
        ("torchtitan", TORCHTITAN, replace(SPEC, value_residual={})),
        ("accelerate", ACCELERATE, replace(SPEC, value_residual={"rank": 2})),
    ],
    ids=["torchtitan", "accelerate", "torchtitan-values", "accelerate-values"],
)
def test_gates_learn_in_fp32_beside_matrices_in_bf16(engine: str, script: str, spec: ModelSpec, tmp_path: Path) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    (tmp_path / "config.json").write_text(json.dumps(asdict(spec)))
    (tmp_path / "recipe.yaml").write_text("{}")
    (tmp_path / "train.py").write_text(COMMON + script)
    world, port = 2, free_port()
    command = [sys.executable, str(tmp_path / "train.py")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DELTALAB_FOLDER": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path), port], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors
