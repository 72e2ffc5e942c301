"""Measures how stable rules are: their outputs, the systems of `gka`, and the eigenvalues of their transitions.

    python benchmarks/stability.py                       # writes benchmarks/stability_cpu.json and docs/stability-*.png
    python benchmarks/stability.py --parts spectra       # measures one part anew, and keeps the others
    python benchmarks/stability.py --parts               # draws the pictures alone

docs/stability.md says what came out; `python benchmarks/tables.py` writes its tables. The script needs matplotlib.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, learned
from deltalab.authoring.rule_checks.number_checks import outside, transitions
from deltalab.authoring.rule_checks.rule_runs import run
from deltalab.models import layer as layers
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_rule, list_rules
from deltalab.ridge import CHUNK, Grams, System
from deltalab.rule import UpdateRule
from deltalab.structure import Ridge
from deltalab.tasks import Task
from deltalab.training.spec import TrainSpec
from deltalab.training.trainer import LockStep

Figure = dict[str, Any]
HERE = Path(__file__).parent
RULES = ("rla", "rdn")
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
WIDTHS = (32, 64, 128)
TRAINED = 50
"""The steps of the short training."""
ARMS = {
    "both": {},
    "no clipping": {"loss": "l2"},
    "no norm": {"normalize": False},
    "neither": {"loss": "l2", "normalize": False},
}
PRECISIONS = ("fp64", "fp32", "bf16")
RIDGES = {
    "0.02 ||H||": {},
    "0.2 ||H||": {"ridge": 0.2},
    "0.25 fixed": {"ridge": 0.25, "adaptive": False},
    "0.02 fixed": {"ridge": 0.02, "adaptive": False},
}


def trained(task: Task, model: Figure, steps: list[int], seeds: range, **how: Any) -> Iterator[tuple[int, list[Any]]]:
    """Trains a model, and yields the runs with their weights at each of the steps, of which 0 is the start."""
    spec = ModelSpec.of({"vocab_size": task.vocab_size, "readout": task.readout, **model})
    trial = LockStep(task, [(spec, TrainSpec(steps=max(steps), precision="fp32", device="cpu", **how))], list(seeds))
    for step in steps:
        if step:
            with torch.enable_grad():
                trial.advance(step)
        yield step, trial.results(0, weights=True)


def loaded(task: Task, model: Figure, weights: dict[str, Tensor], dtype: torch.dtype) -> Model:
    """Returns a model with trained weights."""
    network = build_model({"vocab_size": task.vocab_size, "readout": task.readout, **model})
    network.load_state_dict(weights)
    return network.to(dtype).eval()


@torch.no_grad()
def sizes(model: Model, tokens: Tensor, *, bf16: bool) -> list[float | None]:
    """Returns the root mean square of outputs before the norm, of the layer where it is largest, by `LENGTHS`.

    The figure of a length is that of the second half of its tokens. It is None where outputs are not finite.
    """
    found: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...]) -> None:
        found.append(torch.stack([args[0][:, n // 2 : n].double().square().mean().sqrt() for n in LENGTHS]))

    hooks = [x.norm.register_forward_pre_hook(keep) for x in model.modules() if isinstance(x, RuleLayer)]
    with torch.autocast("cpu", torch.bfloat16, bf16):
        model(tokens)
    for hook in hooks:
        hook.remove()
    largest = torch.stack(found).amax(0).tolist()
    return [value if math.isfinite(value) else None for value in largest]


def activations() -> Iterator[Figure]:
    """Measures the outputs of `rla` and `rdn`, with and without clipping and the unit norm of q and k."""
    task = deltalab.get_task("text", length=LENGTHS[0])
    tokens = replace(task, length=LENGTHS[-1]).batch("validation", 1, 0, 0, torch.device("cpu")).inputs
    for name in RULES:
        for width in WIDTHS:
            for arm, knobs in ARMS.items():
                model = {"rule": {"name": name, **knobs}, "d_model": width, "layers": 2, "heads": 2}
                for step, runs in trained(task, model, [0, TRAINED], range(2), batch_size=4, lr=4e-3):
                    for result in runs:
                        losses = [value for _, metric, _, value in result.metrics if metric == "loss"]
                        for precision in PRECISIONS if step and result.seed == 0 else ("fp32",):
                            dtype = torch.float64 if precision == "fp64" else torch.float32
                            network = loaded(task, model, result.weights, dtype)
                            rms = sizes(network, tokens, bf16=precision == "bf16")
                            yield {
                                "rule": name, "K": width // 2, "arm": arm, "step": step, "seed": result.seed,
                                "precision": precision, "rms": rms, "loss": losses[-1] if losses else None,
                                "diverged_at": result.diverged_at,
                            }  # fmt: skip


@contextmanager
def scanned() -> Iterator[list[tuple[UpdateRule, Inputs]]]:
    """Collects the inputs of every scan of a model, in the order of the layers."""
    found: list[tuple[UpdateRule, Inputs]] = []
    scan = layers.scan

    def kept(rule: UpdateRule, q: Tensor, k: Tensor, v: Tensor, gates: Any, **options: Any) -> Any:
        found.append((rule, Inputs(q, k, v, {name: gates[name] for name in learned(rule)})))
        return scan(rule, q, k, v, gates, **options)

    layers.scan = kept  # type: ignore[assignment]
    try:
        yield found
    finally:
        layers.scan = scan


def conditions(rule: Any, x: Inputs) -> Tensor:
    """Returns the condition number of H_t + lambda_t I for each token, [N, B H, C], with the solver's own lambda_t."""
    empty = x.k.new_zeros(x.k.shape[0], x.k.shape[2], x.k.shape[3], x.k.shape[3])
    grams, _ = Grams.of(x.k, x.gates["g"], empty, min(CHUNK, x.k.shape[1]))
    low = System.of(Ridge(strength=rule.ridge, adaptive=rule.adaptive), grams).low
    values = torch.linalg.eigvalsh(grams.formed()).clamp_min(0) + low
    return values[..., -1] / values[..., 0]


@torch.no_grad()
def systems() -> Iterator[Figure]:
    """Measures the condition numbers of `gka` on the states of a model at several steps of its training, in fp64."""
    task = deltalab.get_task("text", length=64)
    tokens = task.batch("validation", 4, 0, 0, torch.device("cpu")).inputs
    for name, knobs in RIDGES.items():
        model = {"rule": {"name": "gka", **knobs}, "d_model": 32, "layers": 2, "heads": 2}
        for step, runs in trained(task, model, [0, 10, 30, 100], range(2), batch_size=4, lr=4e-3):
            for result in runs:
                with scanned() as found:
                    loaded(task, model, result.weights, torch.float64)(tokens)
                for layer, (rule, x) in enumerate(found):
                    kappa = conditions(rule, x).flatten()
                    yield {
                        "ridge": name, "step": step, "seed": result.seed, "layer": layer,
                        "median": float(kappa.median()), "largest": float(kappa.max()),
                    }  # fmt: skip


def spectrum(rule: UpdateRule, x: Inputs) -> Tensor:
    """Returns the eigenvalues of every token's transition, for each state, sequence and head."""
    width = rule.start(x.k, x.v)[0].shape[2]
    x = replace(x, v=x.v.new_zeros(*x.v.shape[:3], max(width, x.v.shape[3])))
    state, found = rule.start(x.k, x.v), []
    for t in range(x.q.shape[1]):
        token = x.span(t, t + 1, state=state)
        found += [torch.linalg.eigvals(transition).flatten() for transition in transitions(rule, token)]
        state = run(rule, token, "recurrent")[1]
    return torch.cat(found)


@torch.no_grad()
def spectra() -> Iterator[Figure]:
    """Measures the eigenvalues in use of every rule that declares a range, in fp64."""
    task = deltalab.get_task("mqar", length=32, pairs=4, vocab_size=64)
    tokens = task.batch("validation", 4, 0, 0, torch.device("cpu")).inputs
    for name in list_rules():
        if get_rule(name).transition is None:
            continue
        model = {"rule": name, "d_model": 32, "layers": 1, "heads": 2}
        for step, runs in trained(task, model, [0, 200], range(1), batch_size=16, lr=1e-2):
            with scanned() as found:
                loaded(task, model, runs[0].weights, torch.float64)(tokens)
            rule, x = found[0]
            values = spectrum(rule, x)
            yield {
                "rule": name, "step": step, "declared": rule.eigenvalues,
                "low": float(values.real.min()), "high": float(values.real.max()),
                "median": float(values.real.median()),
                "modulus": float(values.abs().max()), "turn": float(values.imag.abs().max()),
                "outside": float(outside(rule, values).max()),
            }  # fmt: skip


PARTS = {"activations": activations, "systems": systems, "spectra": spectra}


def measured(names: list[str], path: Path) -> Figure:
    """Measures parts, writes each into the file when it is whole, and returns all that the file holds."""
    held: Figure = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        start, figures = time.perf_counter(), []
        for figure in PARTS[name]():
            figures.append(figure)
            print(f"\r{name}: {len(figures)} figures, {time.perf_counter() - start:.0f} s", end="", file=sys.stderr)
        print(file=sys.stderr)
        held[name] = {
            "machine": f"one thread of a CPU, {platform.machine()}, torch {torch.__version__}",
            "seconds": round(time.perf_counter() - start),
            "figures": figures,
        }
        path.write_text(json.dumps(held, indent=None).replace("}, {", "},\n{") + "\n")
    return held


def draw(held: Figure, folder: Path) -> None:
    """Draws one picture for each part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def saved(fig: Any, name: str) -> None:
        fig.savefig(folder / f"stability-{name}.png", dpi=90, metadata={"Software": None})
        plt.close(fig)

    figures = held["activations"]["figures"]
    fig, axes = plt.subplots(2, len(WIDTHS), figsize=(12, 6.5), sharex=True, sharey="row", layout="constrained")
    for row, name in zip(axes, RULES, strict=True):
        for axis, width in zip(row, WIDTHS, strict=True):
            for color, arm in zip(("tab:blue", "tab:orange", "tab:green", "tab:red"), ARMS, strict=True):
                for step, style in ((0, ":"), (TRAINED, "-")):
                    chosen = {"rule": name, "K": width // 2, "arm": arm, "step": step, "precision": "fp32"}
                    for f in figures:
                        if chosen.items() <= f.items():
                            rms = [math.nan if value is None else value for value in f["rms"]]
                            label = f"{arm}, {'start' if step == 0 else 'trained'}" if f["seed"] == 0 else None
                            axis.plot(LENGTHS, rms, style, color=color, label=label, alpha=0.8)
            axis.set(xscale="log", yscale="log", title=f"{name}, K = {width // 2}", xlabel="tokens")
            axis.set_xticks(LENGTHS, list(map(str, LENGTHS)), minor=False)
            axis.tick_params(axis="x", which="minor", labelbottom=False)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("RMS of the output before its norm")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    saved(fig, "activations")

    fig, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for color, name in zip(("tab:blue", "tab:green", "tab:orange", "tab:red"), RIDGES, strict=True):
        chosen = [f for f in held["systems"]["figures"] if f["ridge"] == name]
        steps = sorted({f["step"] for f in chosen})
        for figure, style in (("median", "--"), ("largest", "-")):
            values = [max(f[figure] for f in chosen if f["step"] == step) for step in steps]
            axis.plot([step + 1 for step in steps], values, style, color=color, label=f"{name}, {figure}")
    for color, ridge in (("tab:blue", 0.02), ("tab:green", 0.2)):
        axis.axhline((1 + ridge) / ridge, color=color, ls=":")
    axis.set(xscale="log", yscale="log", xlabel="step of the training + 1", ylabel="condition number")
    axis.grid(alpha=0.3)
    fig.legend(fontsize="small", ncols=4, loc="outside lower center")
    saved(fig, "systems")

    rules = sorted({f["rule"] for f in held["spectra"]["figures"]}, reverse=True)
    fig, axis = plt.subplots(figsize=(8, 9), layout="constrained")
    for f in held["spectra"]["figures"]:
        y, is_start = rules.index(f["rule"]), f["step"] == 0
        if is_start:
            axis.plot(f["declared"], (y, y), color="lightgray", lw=9, solid_capstyle="butt")
        color = "tab:blue" if is_start else "tab:red"
        place = y + (0.15 if is_start else -0.15)
        axis.plot((f["low"], f["high"]), (place, place), ".-", color=color, lw=1.5)
    axis.set(
        yticks=range(len(rules)),
        yticklabels=rules,
        xlabel="real part: declared (gray), at the start (blue), trained (red)",
    )
    axis.grid(alpha=0.3, axis="x")
    saved(fig, "spectra")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, default=HERE / "stability_cpu.json")
    parser.add_argument("--pictures", type=Path, default=HERE.parent / "docs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    held = measured(options.parts, options.json)
    missing = [name for name in PARTS if name not in held]
    if missing:
        sys.exit(f"{options.json}: no picture is drawn, for it lacks {', '.join(missing)}")
    draw(held, options.pictures)


if __name__ == "__main__":
    main()
