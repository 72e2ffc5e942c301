"""Logits of our models against those of flash-linear-attention (FLA 0.6), both ways, on a GPU.

    python benchmarks/fla_logits.py                 # every case, several at a time; one row each, JSON in $OUT
    python benchmarks/fla_logits.py --case comba    # one case in this process
    TRITON_INTERPRET=1 python benchmarks/fla_logits.py --device cpu    # without a GPU, in Triton's interpreter, slowly
    python benchmarks/fla_logits.py --names tests/fla                  # the names and shapes of FLA's parameters

`to`: our model, exported by `to_fla`, against the model that `transformers` loads from the folder with FLA's code.
`back`: a model of FLA, saved, against ours from `from_fla`. An error is |a - b| / |b| over all logits, where b are our
logits in fp64. FLA's kernels are not tuned here: the first of their configurations is taken.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # FLA's products in fp32 are in TF32 otherwise

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.export.fla import from_fla, to_fla
from deltalab.models.model import Model, build_model

SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 64, "layers": 2, "heads": 2}
THEIRS: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}

CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "gated_deltanet": (
        {"rule": "gated_deltanet", "output_gate": "silu"},
        "GatedDeltaNet", {"head_dim": 32, "num_heads": 2, "num_v_heads": 4, "allow_neg_eigval": True},
    ),
    "gated_deltanet_sigmoid": (
        {"rule": {"name": "gated_deltanet", "beta": {"sigmoid": {"max": 2}}}, "qk_heads": 1, "expand_v": 2},
        "GatedDeltaNet", {"head_dim": 32, "num_heads": 4, "output_gate_activation": "sigmoid"},
    ),
    "deltanet": (
        {"rule": "deltanet", "output_gate": "silu"},
        "DeltaNet", {"num_heads": 2, "use_gate": True},
    ),
    "deltanet_sigmoid": (
        {"rule": {"name": "deltanet", "beta": {"sigmoid": {"max": 2}}}},
        "DeltaNet", {"num_heads": 4, "use_gate": False, "expand_v": 2.0, "allow_neg_eigval": True},
    ),
    "comba": (
        {"rule": {"name": "comba", "b": 1, "d": 0}, "output_gate": "silu"},
        "Comba", {"head_dim": 32, "num_heads": 2},
    ),
    "kda": ({}, "KDA", {"head_dim": 32, "num_heads": 2, "allow_neg_eigval": True}),
    "gla": (
        {"rule": "gla", "features": "silu", "output_gate": "silu", "low_rank_bias": True},
        "GLA", {"num_heads": 2},
    ),
    "gla_raw": (
        {"rule": "gla", "features": "silu_qk", "conv": 0, "output_gate": False},
        "GLA", {"num_heads": 2, "use_short_conv": True},
    ),
    "retnet": (
        {"rule": "retnet", "features": "raw", "conv": 0, "rope": True, "output_gate": "silu", "kv_heads": 1},
        "RetNet", {"num_heads": 2},
    ),
    "hgrn2": (
        {"rule": "hgrn2", "features": "silu_qk", "conv": 0, "output_norm": "rms_all", "output_gate": False},
        "HGRN2", {"expand_ratio": 32, "use_lower_bound": False, "norm_eps": 1e-5},
    ),
    "linear_attention": (
        {"rule": "linear_attention", "features": "raw", "conv": 0, "output_gate": False},
        "LinearAttention", {"num_heads": 2, "feature_map": "identity"},
    ),
    "delta_product": (
        {"rule": {"name": "delta_product", "g": "mamba2_decay"}, "output_gate": "silu"},
        "GatedDeltaProduct", {"head_dim": 32, "num_heads": 2, "num_householder": 3},
    ),
    "transformer": (
        {"rule": "attention", "conv": 0, "rope": True, "output_norm": False, "output_gate": False, "qk_norm": True},
        "Transformer", {"num_heads": 2, "num_kv_heads": 1, "window_size": 20},
    ),
    "hybrid": (
        {
            "rule": "gated_deltanet",
            "layers": ["rule", {"name": "attention", "window": 20, "layer": {
                "conv": 0, "rope": 5e4, "output_norm": False, "output_gate": False, "kv_heads": 1}}],
        },
        "GLA", {"num_heads": 2, "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2}},
    ),
}  # fmt: skip
"""A model of ours to export, none where it must come from FLA, and one of FLA to take back: its class and options."""

LENGTHS = {"cuda": (48, 160), "cpu": (9, 40)}
"""FLA goes token by token up to 64 tokens, and in chunks beyond, which Triton's interpreter does not take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--names", type=Path, help="write the names and shapes of FLA's parameters into this folder")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="the most that a case may take")
    given = parser.parse_args()
    if given.names:
        names(given.names)
    elif given.case and len(given.case) == 1:
        print(json.dumps(guarded(given.case[0], given.device)))
    else:
        table(given.case or list(CASES), given)


def table(cases: list[str], given: argparse.Namespace) -> None:
    def run(case: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--case", case, "--device", given.device]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=given.seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"case": case, "error": f"took over {given.seconds:g} s"}
        try:
            row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            return {"case": case, "error": done.stderr[-2000:]}
        return row

    rows = []
    with ThreadPoolExecutor(given.at_once) as pool:
        for row in pool.map(run, cases):
            rows.append(row)
            print(line(row), flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"]).mkdir(parents=True, exist_ok=True)
        (Path(os.environ["OUT"]) / "fla_logits.json").write_text(json.dumps(rows, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']:24} failed: {row['error']}"
    parts = [f"{way}: " + " ".join(f"{k} {v:.1e}" for k, v in row[way].items()) for way in ("to", "back") if way in row]
    failed = "".join(f" | {key}: {row[key]}" for key in ("to_error", "back_error") if key in row)
    return f"{row['case']:24} {row['seconds']:5.0f} s  " + " | ".join(parts) + failed


def guarded(case: str, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case}
    start = time.time()
    try:
        fla = imported()
        for way, measure in (("to", exported), ("back", taken_back)):
            try:
                row[way] = measure(fla, case, device)
            except Exception:
                row[f"{way}_error"] = traceback.format_exc(limit=-3)
    except Exception:
        row["error"] = traceback.format_exc(limit=-3)
    row["seconds"] = time.time() - start
    return row


def imported() -> Any:
    """fla.models, with the first configuration of each kernel in place of the fastest, and SDPA for flash-attn."""
    warnings.simplefilter("ignore")
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *args, **kwargs: [0.0, 0.0, 0.0]
    import fla.layers.attn as attn
    import fla.models

    if attn.flash_attn_func is None:
        attn.flash_attn_func = sdpa
    return fla.models


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """flash_attn_func by PyTorch's own attention: q [B, T, H, K], k and v [B, T, G, K]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    sees = (apart >= 0) & (apart <= (window_size[0] if window_size[0] >= 0 else apart.max()))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(1, 2)


def shaken(module: torch.nn.Module, seed: int) -> None:
    """Moves parameters of one dimension away from their starts, so that no gate or norm is idle."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if value.dim() <= 2 and "embed" not in name and not ("proj" in name and value.dim() == 2):
                noise = torch.randn(value.shape, generator=generator)
                value.add_((0.3 * noise * (1.0 if value.dim() == 1 else 0.1)).to(value))


def exported(fla: Any, case: str, device: str) -> dict[str, float]:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    if not CASES[case][0]:
        model = from_theirs(fla_model(fla, case))
    else:
        model = build_model({**SIZES, **CASES[case][0]}, seed=1)
        shaken(model, 2)
    config, weights = to_fla(model.spec, model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        theirs, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {key: found for key, found in loading.items() if found}
    if wrong:
        raise InputError(f"FLA does not take the weights as they are: {wrong}")
    return errors(model, theirs, device)


def taken_back(fla: Any, case: str, device: str) -> dict[str, float]:
    theirs = fla_model(fla, case)
    return errors(from_theirs(theirs), theirs, device)


def from_theirs(theirs: Any) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        spec, weights, _ = from_fla(Path(folder))
    model = Model(spec)
    model.load_state_dict(weights)
    return model


def fla_model(fla: Any, case: str) -> Any:
    _, kind, options = CASES[case]
    torch.manual_seed(0)
    model = getattr(fla, f"{kind}ForCausalLM")(getattr(fla, f"{kind}Config")(**{**THEIRS, **options}))
    shaken(model, 3)
    if kind == "Comba":  # its correction of q has no equal of ours
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.attn.D)
    return model


def errors(ours: Model, theirs: Any, device: str) -> dict[str, float]:
    """Relative errors of FLA's logits and of ours, by precision and length."""
    found = {}
    theirs = theirs.to(device).eval()
    with torch.no_grad():
        for length in LENGTHS[device]:
            tokens = torch.randint(0, SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(length))
            exact = ours.double().cpu()(tokens)
            ours = ours.float().to(device)
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                if device == "cpu" and dtype != torch.float32:
                    continue
                with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                    for whose, logits in (
                        ("fla", theirs(tokens.to(device), use_cache=False).logits),
                        ("ours", ours(tokens.to(device))),
                    ):
                        error = (logits.double().cpu() - exact).norm() / exact.norm()
                        found[f"{whose} {name} {length}"] = error.item()
    return found


def names(folder: Path) -> None:
    fla = imported()
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        model = fla_model(fla, case)
        config = model.config.to_diff_dict()
        shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
        (folder / f"{case}.json").write_text(json.dumps({"config": config, "parameters": shapes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
