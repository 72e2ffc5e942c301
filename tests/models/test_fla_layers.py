"""Layers of flash-linear-attention train as arms, unchanged, on a GPU."""

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from deltalab import get_task
from deltalab.authoring.module_checks.module_suite import check_module
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

pytestmark = pytest.mark.gpu
ASKED = 25
"""How many layers of FLA 0.6 train."""
PATIENCE = 200
"""Seconds for one layer."""
HEADS = "$heads"
KWARGS: dict[str, dict[str, Any]] = {
    "BasedLinearAttention": {"num_heads": HEADS, "num_key_value_heads": HEADS},
    "Mamba2": {"num_heads": 8},
    "ReBasedLinearAttention": {"num_heads": HEADS, "num_key_value_heads": HEADS},
    "RWKV7Attention": {"num_heads": HEADS, "layer_idx": 0, "num_hidden_layers": 2},
}
"""The arguments of layers whose defaults do not fit each other at width 256."""
NEED_MORE = {"YOCOCrossAttention": "keys and values of another layer", "YOCOSharedKVBuilder": "returns keys and values"}


def take_first_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the first form of each kernel: FLA tries dozens, for minutes."""
    tuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    run = tuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    monkeypatch.setattr(tuner, "run", run_first)


@pytest.fixture(autouse=True)
def first_form(monkeypatch: pytest.MonkeyPatch) -> None:
    take_first_form(monkeypatch)


def layers() -> dict[str, Any]:
    module = pytest.importorskip("fla.layers")
    return {
        name: KWARGS.get(name, {"num_heads": HEADS} if "num_heads" in inspect.signature(kind).parameters else {})
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and name not in NEED_MORE
    }


def train_one(name: str) -> None:
    task = get_task("mqar", length=128, pairs=4, vocab_size=64)
    spec = TrainSpec(steps=4, batch_size=8, lr=1e-3, evaluations=1, eval_batches=1, device="cuda")
    mixer = {"module": f"fla.layers.{name}", "kwargs": layers()[name]}
    model = ModelSpec.of({"mixer": mixer, "vocab_size": 64, "d_model": 256, "heads": 4, "layers": 1})
    assert train(task, model, spec, [1]).runs[0].diverged_at is None


def outcome(name: str) -> str:
    """Trains one layer in a process of its own: a kernel that reads beyond its memory ends all that share it."""
    try:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=PATIENCE)
        error = "" if not done.returncode else done.stderr.strip().splitlines()[-1]
    except subprocess.TimeoutExpired:
        error = f"took over {PATIENCE} s"
    print(f"{name}: {error or 'trains'}", flush=True)
    return error


def test_layers_of_fla_train() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        refused = {name: error for name, error in zip(layers(), pool.map(outcome, layers()), strict=True) if error}
    assert len(layers()) - len(refused) >= ASKED, refused


@pytest.mark.parametrize("name", ["DeltaNet", "GatedLinearAttention", "MultiScaleRetention"])
def test_a_layer_of_fla_passes_the_checks(name: str) -> None:
    pytest.importorskip("fla.layers")
    mixer = {"module": f"fla.layers.{name}", "kwargs": {"num_heads": HEADS}}
    spec = ModelSpec.of({"mixer": mixer, "vocab_size": 2, "d_model": 256, "heads": 4})
    rule = spec.make_rule()
    assert isinstance(rule, OwnModule)
    assert [result.message for result in check_module(rule, spec) if not result.passed] == []


if __name__ == "__main__":
    take_first_form(pytest.MonkeyPatch())
    train_one(sys.argv[1])
