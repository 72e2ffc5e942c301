"""Layers of flash-linear-attention train as arms, unchanged, on a GPU."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from deltalab import get_task
from deltalab.authoring.module_checks import check_module
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

pytestmark = pytest.mark.gpu
ASKED = 25
"""How many layers of FLA 0.6 train."""
NEED_MORE = {"YOCOCrossAttention": "keys and values of another layer", "YOCOSharedKVBuilder": "returns keys and values"}


def layers() -> dict[str, Any]:
    module = pytest.importorskip("fla.layers")
    return {
        name: {"num_heads": "$heads"} if "num_heads" in inspect.signature(kind).parameters else {}
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and name not in NEED_MORE
    }


def test_layers_of_fla_train() -> None:
    task = get_task("mqar", length=128, pairs=4, vocab_size=64)
    spec = TrainSpec(steps=4, batch_size=8, lr=1e-3, evaluations=1, eval_batches=1, device="cuda")
    trained, refused = [], {}
    for name, kwargs in layers().items():
        settings = {"module": f"fla.layers.{name}", "kwargs": kwargs}
        try:
            model = ModelSpec.of({"mixer": settings, "vocab_size": 64, "d_model": 256, "heads": 4, "layers": 1})
            run = train(task, model, spec, [1]).runs[0]
            assert run.diverged_at is None
            trained.append(name)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {str(error)[:120]}"
        torch.cuda.empty_cache()
    print(f"{len(trained)} train: {trained}; not: {refused}")
    assert len(trained) >= ASKED, refused


@pytest.mark.parametrize("name", ["GatedDeltaNet", "GatedLinearAttention", "MultiScaleRetention"])
def test_a_layer_of_fla_passes_the_checks(name: str) -> None:
    pytest.importorskip("fla.layers")
    mixer = {"module": f"fla.layers.{name}", "kwargs": {"num_heads": "$heads"}}
    spec = ModelSpec.of({"mixer": mixer, "vocab_size": 2, "d_model": 256, "heads": 4})
    rule = spec.make_rule()
    assert isinstance(rule, OwnModule)
    assert [result.message for result in check_module(rule, spec) if not result.passed] == []
