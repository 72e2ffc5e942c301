"""Compares the logits of our models with those of flash-linear-attention (FLA 0.6), both ways, on a GPU.

    python benchmarks/fla_logits.py                 # all cases, several at a time; a row for each, JSON in $OUT
    python benchmarks/fla_logits.py --case comba    # one case in this process
    TRITON_INTERPRET=1 python benchmarks/fla_logits.py --device cpu    # without a GPU, in Triton's interpreter, slowly
    python benchmarks/fla_logits.py --names tests/export/fla                  # the names and shapes of FLA's parameters

`to` exports our model by `to_fla`, and compares it with the model that `transformers` loads from the folder with FLA's
code. `back` saves a model of FLA, and compares it with our model from `from_fla`. An error is |a - b| / |b| over all
logits, where b are our logits in fp64. FLA goes token by token up to 64 tokens, and in chunks beyond. The chunks are
measured in bf16 alone, since FLA computes them in TF32 for inputs in fp32, or refuses such inputs. FLA's kernels are
not tuned here: each takes the first of its configurations.
"""

import argparse
import copy
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

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.export.fla import from_fla, to_fla
from deltalab.export.fla.conversion import FORMS, SHARED
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
        {"rule": {"name": "comba", "b": 1, "d": 0}},
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
    "hgrn": (
        {
            "rule": "min_gru", "features": "silu", "conv": 0, "scale": 1.0, "output_norm": "rms_all",
            "output_gate": "silu", "expand_v": 2.0,
        },
        "HGRN", {"expand_ratio": 2, "use_lower_bound": False},
    ),
    "hgrn2": (
        {"rule": "hgrn2", "features": "silu_qk", "conv": 0, "output_norm": "rms_all", "output_gate": False},
        "HGRN2", {"expand_ratio": 32, "use_lower_bound": False, "norm_eps": 1e-5},
    ),
    "mamba2": (
        {
            "rule": "mamba2", "block": "mamba", "features": "silu", "scale": 1.0, "output_norm": "rms_all",
            "output_gate": "silu_before_norm", "key_dim": 16, "expand_v": 2.0,
        },
        "Mamba2", {"head_dim": 32, "state_size": 16, "use_conv_bias": False, "chunk_size": 32},
    ),
    "linear_attention": (
        {"rule": "linear_attention", "features": "raw", "conv": 0, "output_gate": False},
        "LinearAttention", {"num_heads": 2, "feature_map": "identity"},
    ),
    "delta_product": (
        {"rule": {"name": "delta_product", "g": "mamba2_decay"}, "output_gate": "silu"},
        "GatedDeltaProduct", {"head_dim": 32, "num_heads": 2, "num_householder": 3},
    ),
    "lightnet": (
        {"rule": "lightnet", "output_norm": "rms_all", "output_gate": "silu", "gate_rank": 8, "norm_eps": 1e-6},
        "LightNet", {"num_heads": 2, "expand_ratio": 16, "gate_low_rank_dim": 16},
    ),
    "abc": (
        {"rule": "abc", "output_gate": "silu", "rope": True},
        "ABC", {"num_heads": 2, "num_slots": 16},
    ),
    "forgetting_attention": (
        {"rule": "forgetting_attention", "conv": 0, "output_norm": False, "kv_heads": 1},
        "ForgettingTransformer", {"num_heads": 2},
    ),
    "preconditioned": (
        {"rule": "preconditioned_gated_deltanet", "output_gate": "silu"},
        "PrecondGatedDeltaNet", {"head_dim": 32, "num_heads": 2},
    ),
    "preconditioned_kda": ({}, "PrecondKDA", {"head_dim": 32, "num_heads": 2}),
    "gsa": (
        {"rule": "gsa@published", "features": "silu"},
        "GSA", {"num_heads": 2, "num_slots": 16, "norm_eps": 1e-5},
    ),
    "raven": (
        {
            "rule": "raven", "features": "silu", "conv": 0, "scale": 1.0, "output_norm": "rms_all_of_silu",
            "output_gate": False,
        },
        "Raven", {"num_heads": 2, "num_slots": 16, "topk": 6, "norm_eps": 1e-5},
    ),
    "log_linear_mamba2": (
        {"rule": "log_linear_attention@published", "mlp_width": 256, "key_dim": 64, "expand_v": 0.5},
        "LogLinearMamba2", {"head_dim": 32, "state_size": 64},
    ),
    "mamba3": (
        {
            "rule": {"name": "mamba3@published", "a": "rate", "theta": {"shared_angular_velocity": {"pairs": 8}}},
            "block": "mamba", "key_dim": 16, "expand_v": 2.0, "heads": 4,
        },
        "Mamba3", {"head_dim": 32, "state_size": 16, "n_groups": 2},
    ),
    "rwkv7": (
        {"preset": "rwkv7", "d_model": 64, "heads": 2, "gate_rank": 16, "value_residual": {"rank": 8}},
        "RWKV7", {"head_dim": 32},
    ),
    "rwkv6": (
        {"preset": "rwkv6", "d_model": 64, "heads": 2, "key_dim": 16, "expand_v": 2.0, "token_shift": {"rank": 8}},
        "RWKV6", {"num_heads": 2},
    ),
    "mesa_net": ({}, "MesaNet", {"head_dim": 32, "num_heads": 2, "use_output_gate": True}),
    "latent_attention": (
        {
            "rule": "attention", "conv": 0, "rope": True, "output_norm": False, "output_gate": False, "key_dim": 24,
            "expand_v": 2 / 3, "kv_rank": 16, "q_rank": 24, "rope_dim": 8,
        },
        "MLA",
        {
            "num_heads": 2, "q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "qk_head_dim": 24, "v_head_dim": 16, "window_size": 20, "norm_eps": 1e-5,
        },
    ),
    "tied": (
        {"rule": "gated_deltanet", "d_model": 96, "heads": 2},
        "GLA", {"num_heads": 2, "tie_word_embeddings": True},
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
"""The cases: a model of ours to export, and a model of FLA to take back, by its class and options. If the model of ours
is empty, FLA's model is taken back first, and then exported."""

RUNS = (("fp32", 48), ("bf16", 160))
"""The precisions, each with its number of tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--names", type=Path, help="write the names and shapes of FLA's parameters into this folder")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="the most that a case may take")
    options = parser.parse_args()
    if options.names:
        names(options.names)
    elif options.case and len(options.case) == 1:
        measure(options.case[0], options.device)
    else:
        table(options.case or list(CASES), options)


def table(cases: list[str], options: argparse.Namespace) -> None:
    """Measures cases in processes of their own, and prints a row for each."""

    def run(case: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--case", case, "--device", options.device]
        late = {}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds, check=False)
            out, err = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            out, err = (error.stdout or b"").decode(), (error.stderr or b"").decode()
            late = {"late": f"not done after {options.seconds:g} s"}
        try:
            return {**json.loads(out.splitlines()[-1]), **late}
        except (IndexError, ValueError):
            return {"case": case, "seconds": options.seconds, **late, "error": err[-1000:]}

    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(run, cases):
            rows.append(row)
            print(line(row), flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"]).mkdir(parents=True, exist_ok=True)
        (Path(os.environ["OUT"]) / "fla_logits.json").write_text(json.dumps(rows, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    parts = [
        f"{way}: " + ", ".join(f"{k} {v:.1e}" for k, v in row[way].items()) for way in ("to", "back") if way in row
    ]
    parts += [f"{key}: {row[key]}" for key in ("late", "error", "to_error", "back_error") if key in row]
    return f"{row['case']:24} {row['seconds']:4.0f} s  " + " | ".join(parts)


def measure(case: str, device: str) -> None:
    """Measures a case, and prints its row after each way. The last line is the whole row."""
    row: dict[str, Any] = {"case": case}
    start = time.time()
    fla = imported()
    for way, pair in WAYS.items():
        try:
            row[way] = errors(*pair(fla, case), device)
        except Exception:
            row[f"{way}_error"] = traceback.format_exc(limit=-3)
        row["seconds"] = time.time() - start
        print(json.dumps(row), flush=True)


def imported() -> Any:
    """Imports fla.models, with the first configuration of each kernel in place of tuning, and SDPA for flash-attn."""
    warnings.simplefilter("ignore")
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *args, **kwargs: [0.0, 0.0, 0.0]
    import fla.layers.attn as attn
    import fla.layers.mla as mla
    import fla.models

    for layer in (attn, mla):
        if layer.flash_attn_func is None:
            layer.flash_attn_func = sdpa
    return fla.models


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """Computes flash_attn_func by PyTorch's attention: q [B, T, H, K], k and v [B, T, G, K]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    places = torch.arange(k.shape[2], device=q.device)
    distance = places[k.shape[2] - q.shape[2] :, None] - places
    mask = (distance >= 0) & (distance <= (window_size[0] if window_size[0] >= 0 else distance.max()))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def shaken(module: torch.nn.Module, seed: int) -> None:
    """Moves parameters that start nearly constant, so that no gate or norm is idle, and scales matrices as training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 1:
                value.add_(0.3 * noise)
            elif min(value.shape) > 4:
                value.copy_(noise * value.shape[1] ** -0.5)
            elif value.dim() == 3:  # FLA starts a convolution's taps around 0.02
                value.copy_(0.5 * noise)


def exported(fla: Any, case: str) -> tuple[Model, Any]:
    """Returns a model of ours, and the model that FLA loads from its export."""
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
    problems = {key: names for key, names in loading.items() if names}
    if problems:
        raise InputError(f"FLA does not take the weights as they are: {problems}")
    return model, theirs


def taken_back(fla: Any, case: str) -> tuple[Model, Any]:
    """Returns our model of a model of FLA, and that model."""
    theirs = fla_model(fla, case)
    return from_theirs(theirs), theirs


WAYS = {"to": exported, "back": taken_back}
"""The ways between a model of ours and a model of FLA."""


def from_theirs(theirs: Any) -> Model:
    """Converts a model of FLA to a model of ours, by a folder."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        spec, weights, _ = from_fla(Path(folder))
    model = Model(spec)
    model.load_state_dict(weights)
    return model


def fla_model(fla: Any, case: str) -> Any:
    """Makes FLA's model of a case."""
    _, kind, options = CASES[case]
    torch.manual_seed(0)
    sizes = {name: value for name, value in THEIRS.items() if "Mamba" not in kind or name != "intermediate_size"}
    model = getattr(fla, f"{kind}ForCausalLM")(getattr(fla, f"{kind}Config")(**{**sizes, **options}))
    shaken(model, 3)
    for name, value in model.named_parameters():
        # We have no equal of Comba's correction of q before the norm, and of the weights of Raven's norms.
        if kind == "Comba" and name.endswith(".D"):
            torch.nn.init.zeros_(value)
        if kind == "Raven" and name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.ones_(value)
    return model


def errors(ours: Model, theirs: Any, device: str) -> dict[str, float]:
    """Measures the relative errors of FLA's logits and of ours, by precision and length."""
    relative = {}
    theirs = theirs.to(device).eval()
    exact = copy.deepcopy(ours).double()
    ours = ours.to(device)
    with torch.no_grad():
        for precision, length in RUNS[:1] if device == "cpu" else RUNS:
            tokens = torch.randint(0, SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(length))
            reference = exact(tokens)
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                both = {
                    "fla": theirs(tokens.to(device), use_cache=False).logits,
                    "ours": ours(tokens.to(device)),
                }
            for whose, logits in both.items():
                error = (logits.double().cpu() - reference).norm() / reference.norm()
                relative[f"{whose} {precision} {length}"] = error.item()
    return relative


def names(folder: Path) -> None:
    """Writes the options of FLA's model of each case, its parameters, and the defaults of the options that we read."""
    fla = imported()
    folder.mkdir(parents=True, exist_ok=True)
    for case, (_, kind, _) in CASES.items():
        model = fla_model(fla, case)
        (form,) = {form.model_type: form for form in FORMS if form.model_type == model.config.model_type}.values()
        defaults = getattr(fla, f"{kind}Config")().to_dict()
        contents = {
            "config": json.loads(model.config.to_json_string()),
            "parameters": {name: list(value.shape) for name, value in model.state_dict().items()},
            "defaults": {name: defaults[name] for name in {**SHARED, **form.options} if name in defaults},
        }
        (folder / f"{case}.json").write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main()
