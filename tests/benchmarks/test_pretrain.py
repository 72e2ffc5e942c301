"""The benchmark of whole models, on a CPU at toy size: what a row says, and which models it takes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.folders import ROOT

from deltalab.export import export_hf
from deltalab.models.model import build_model

SCRIPT = ROOT / "benchmarks" / "pretrain.py"
TOY = {"vocab_size": 64, "d_model": 32, "layers": 2, "heads": 2}


@pytest.fixture(scope="module")
def pretrain() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_pretrain", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(out: Path, *given: str, processes: int = 0) -> tuple[list[dict[str, Any]], str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    command = [
        sys.executable,
        *torchrun,
        str(SCRIPT),
        "--out",
        str(out),
        "--size",
        "toy",
        "--steps",
        "1",
        "--warm",
        "0",
        *given,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    file = out / "pretrain.json"
    return json.loads(file.read_text())["rows"] if file.exists() else [], done.stdout + done.stderr


@pytest.mark.slow
def test_rows_of_several_shapes_are_added_to_those_before(tmp_path: Path) -> None:
    rows, _ = measured(tmp_path, "--model", "ours:comba", "--shape", "2x32", "--shape", "1x64")
    assert [row["shape"] for row in rows] == ["2x32", "1x64"]
    rows, said = measured(
        tmp_path, "--model", "ours:transformer", "--shape", "2x32", "--checkpoint", "--precision", "bf16", "--profile"
    )
    assert [row["model"] for row in rows] == ["ours:comba", "ours:comba", "ours:transformer"]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(64 / row["ms"] * 1e3)
        assert 3 < row["first_loss"] < 7  # ln 64 = 4.2
        assert row["first_step_s"] > 0.5  # PyTorch alone takes as long to import
    assert rows[0]["precision"] == "fsdp"
    assert sum(rows[2]["kinds"].values()) == pytest.approx(rows[2]["device_ms"])
    assert "aten::mm" in said


@pytest.mark.slow
def test_processes_that_share_sequences_have_the_loss_of_one_and_count_tokens_once(tmp_path: Path) -> None:
    given = ("--model", "ours:comba", "--shape", "2x64")
    rows, said = measured(tmp_path, *given, "--context", "--checkpoint", processes=2)
    (alone,), _ = measured(tmp_path / "alone", *given)
    assert [(row["context"], row["gpus"], row["shape"]) for row in rows] == [(True, 2, "2x64")], said
    assert rows[0]["tokens_per_second"] == pytest.approx(128 / rows[0]["ms"] * 1e3)
    assert rows[0]["first_loss"] == pytest.approx(alone["first_loss"], rel=1e-3)
    assert "2 GPU fsdp     sharing each sequence checkpointed" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--model", "ours:comba"), "--context needs several processes: start it by torchrun"),
        (("--model", "fla:comba"), "--context is for models of ours with precision fsdp"),
        (("--model", "ours:comba", "--precision", "bf16"), "--context is for models of ours with precision fsdp"),
    ],
)
def test_sequences_that_cannot_be_shared_are_refused(tmp_path: Path, given: tuple[str, ...], message: str) -> None:
    rows, said = measured(tmp_path, *given, "--context", "--shape", "2x64")
    assert not rows
    assert message in said


@pytest.mark.slow
def test_an_export_trains_where_deltalab_cannot_be_imported(tmp_path: Path) -> None:
    model = build_model({"rule": "comba", **TOY, "tie_embeddings": False})
    export_hf(model.spec, model.state_dict(), tmp_path / "export", provenance={})
    rows, said = measured(
        tmp_path, "--model", f"export:{tmp_path / 'export'}", "--shape", "2x32", "--precision", "bf16"
    )
    assert [row["model"] for row in rows] == ["export"], said
    assert 3 < rows[0]["first_loss"] < 7


def test_a_model_that_takes_too_long_is_ended_and_said(tmp_path: Path) -> None:
    rows, said = measured(tmp_path, "--model", "ours:comba", "--shape", "2x32", "--limit", "0.5")
    assert not rows
    assert "ours:comba: ended after 0.5 s" in said


def test_kinds_of_kernels(pretrain: Any) -> None:
    kinds = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "products",
        "norm_backward_kernel": "norm",
        "swiglu_kernel": "SwiGLU",
        "backward": "convolution",
        "gradients": "mixer",
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_backward_kernel>": "elementwise",
    }
    assert {kernel: pretrain.kind_of(kernel) for kernel in kinds} == kinds
