"""Measures how near iterative solvers come to the exact one, in values and in gradients, iteration by iteration.

    python benchmarks/chebyshev.py --out docs

The script writes docs/chebyshev.md, docs/chebyshev.png and docs/chebyshev-conditions.png. It takes minutes of a
CPU thread, and needs matplotlib. arXiv:2511.21016 has the same comparison as Figure 1.
"""

import argparse
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.authoring.inputs import normal
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, build_model
from deltalab.ops.reference import into_chunks
from deltalab.ridge import SOLVERS, Grams, Product, Solver, System, regression, solve
from deltalab.rule import State
from deltalab.structure import Ridge
from deltalab_rules.gka import GKA

BATCH, LENGTH, HEADS, KEY, LAYERS = 1, 512, 4, 64, 5
STEPS = (1, 2, 3, 5, 8, 10, 15, 20, 30, 40, 60)
METHODS = {
    "gd": "gradient descent",
    "agd": "accelerated gradient",
    "cg": "conjugate gradient",
    "chebyshev": "Chebyshev",
    "cg_eps": "conjugate gradient + 1e-6",
}
CURVES = [*((method, "implicit") for method in METHODS), ("cg", "autograd"), ("chebyshev", "autograd")]
STRENGTHS = (0.2, 0.02, 0.002, 0.0002)
"""The factors a of lambda_t = a ||H_t||_F, each with a condition number of at most (1 + a) / a."""
PANELS = ("residual of one layer", "gradient of q and k, one layer", f"gradient of the weights, {LAYERS} layers")
OUTPUT = "output of one layer"
Figures = dict[tuple[str, str, str, str], dict[int, float]]
"""Errors by number of iterations, for each (precision, panel, method, backward)."""


def descent(times: Product, q: Tensor, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Iterates gradient descent, with the step that is best for eigenvalues in [low, high]."""
    x = torch.zeros_like(q)
    while True:
        x = x - 2 / (low + high) * (times(x) - q)
        yield x


def accelerated(times: Product, q: Tensor, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Iterates Nesterov's method, with the constant momentum that is best for eigenvalues in [low, high]."""
    momentum = ((high / low).sqrt() - 1) / ((high / low).sqrt() + 1)
    before = y = torch.zeros_like(q)
    while True:
        x = y - (times(y) - q) / high
        before, y = x, x + momentum * (x - before)
        yield x


def padded_conjugate_gradient(times: Product, q: Tensor) -> Iterator[Tensor]:
    """Iterates conjugate gradient as it is often written, with 1e-6 added to both divisors.

    The constant prevents 0 / 0, and outweighs the divisors where gradients are small.
    """
    x, r, p = torch.zeros_like(q), q, q
    squared = (r * r).sum(-1, keepdim=True)
    while True:
        product = times(p)
        alpha = squared / ((p * product).sum(-1, keepdim=True) + 1e-6)
        x, r = x + alpha * p, r - alpha * product
        before, squared = squared, (r * r).sum(-1, keepdim=True)
        p = r + squared / (before + 1e-6) * p
        yield x


def in_bf16(solver: Solver) -> Solver:
    """Returns the solver in bf16. H and its bounds are made in fp32 and rounded once; all iterations are in bf16."""

    def iterates(system: System, q: Tensor) -> Iterator[Tensor]:
        x = system.grams
        grams = Grams(*(part.bfloat16() for part in (x.start, x.k, x.within, x.since)))
        rounded = replace(system, grams=grams, low=system.low.bfloat16(), high=system.high.bfloat16())
        return (x.to(q.dtype) for x in solver(rounded, q.bfloat16()))

    return iterates


ITERATIONS: dict[str, Solver] = {
    **SOLVERS,
    "gd": lambda system, q: descent(system.times, q, system.low, system.high),
    "agd": lambda system, q: accelerated(system.times, q, system.low, system.high),
    "cg_eps": lambda system, q: padded_conjugate_gradient(system.times, q),
}
ITERATIONS |= {f"{method}_bf16": in_bf16(ITERATIONS[method]) for method in METHODS}


@dataclass(frozen=True)
class Method:
    """A ridge, and the solver that makes its iterations; None means the ridge's own solver."""

    ridge: Ridge
    solver: Solver | None = None


@dataclass(frozen=True, kw_only=True)
class Solved(GKA):
    """GKA with any solver of this script, and either backward."""

    name: ClassVar[str] = "gka_solved"
    how: Method

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, *, scale: float, state: State) -> tuple[Tensor, State]:
        held = cast(tuple[Tensor, Tensor], state)
        return regression(self.how.ridge, q, k, v, gates["g"], scale=scale, state=held, solver=self.how.solver)


EXACT = Method(Ridge(solver="exact"))


def iterated(precision: str, method: str, iterations: int, backward: str, strength: float = 0.02) -> Method:
    """Returns a method of `METHODS` with a number of iterations, for lambda_t = strength ||H_t||_F."""
    solver = ITERATIONS[method + ("_bf16" if precision == "bf16" else "")]
    return Method(Ridge(strength=strength, iterations=iterations, backward=cast(Any, backward)), solver)


def apart(value: Tensor, reference: Tensor) -> float:
    """Returns the relative error of a value."""
    error = float((value.double() - reference).norm() / reference.norm())
    return error if math.isfinite(error) else math.inf


def one_layer(figures: Figures, strength: float = 0.02, curves: list[tuple[str, str]] = CURVES) -> None:
    """Measures one layer on random unit keys and queries and gates whose median is 0.98. Values have no part in it."""
    right = Method(Ridge(solver="exact", strength=strength))
    q, k = (F.normalize(normal(BATCH, LENGTH, HEADS, KEY, seed=i), dim=-1) for i in (1, 2))
    g = F.logsigmoid(4 + normal(BATCH, LENGTH, HEADS, seed=3))
    dx, empty = normal(BATCH, LENGTH, HEADS, KEY, seed=4), torch.zeros(BATCH, HEADS, KEY, KEY).double()

    def run(how: Method, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k)]
        x, _ = solve(how.ridge, leaves[0], leaves[1], g.to(dtype), empty.to(dtype), solver=how.solver)
        gradients = torch.autograd.grad((x * dx.to(dtype)).sum(), leaves)
        return x.detach(), torch.cat([d.flatten() for d in gradients])

    solution, reference = run(right, torch.float64)
    grams, _ = Grams.of(k, g, empty, 64)
    system = System.of(Ridge(strength=strength), grams)
    chunks = into_chunks(q, 64)

    @torch.no_grad()
    def residual(x: Tensor) -> float:
        errors = system.times(into_chunks(x.double(), 64)) - chunks
        return float(errors.norm(dim=-1).mean())  # q has unit norm

    exact, exact_gradient = run(right, torch.float32)
    for precision in ("fp32", "bf16"):
        figures[precision, PANELS[0], "exact", "implicit"] = dict.fromkeys(STEPS, residual(exact))
        figures[precision, OUTPUT, "exact", "implicit"] = dict.fromkeys(STEPS, apart(exact, solution))
        figures[precision, PANELS[1], "exact", "implicit"] = dict.fromkeys(STEPS, apart(exact_gradient, reference))
        for method, backward in curves:
            for steps in STEPS:
                x, gradient = run(iterated(precision, method, steps, backward, strength), torch.float32)
                figures.setdefault((precision, PANELS[1], method, backward), {})[steps] = apart(gradient, reference)
                if backward == "implicit":
                    figures.setdefault((precision, OUTPUT, method, backward), {})[steps] = apart(x, solution)
                    figures.setdefault((precision, PANELS[0], method, backward), {})[steps] = residual(x)


def five_layers(figures: Figures) -> None:
    """Measures an untrained model on a random sequence. Everything but the solver computes in fp32."""
    spec = {"rule": "gka", "vocab_size": 64, "d_model": 128, "heads": 2, "layers": LAYERS}
    model = build_model(spec, seed=0)
    tokens = torch.randint(64, (BATCH, LENGTH // 2 + 1), generator=torch.Generator().manual_seed(0))

    def run(model: Model, how: Method) -> Tensor:
        for layer in model.modules():
            if isinstance(layer, RuleLayer):
                layer.rule = Solved(how=how)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return torch.cat([d.flatten() for d in torch.autograd.grad(loss, list(model.parameters()))])

    reference = run(build_model(spec, seed=0).double(), EXACT)
    exact = apart(run(model, EXACT), reference)
    for precision in ("fp32", "bf16"):
        figures[precision, PANELS[2], "exact", "implicit"] = dict.fromkeys(STEPS, exact)
        for method, backward in CURVES:
            for steps in STEPS:
                error = apart(run(model, iterated(precision, method, steps, backward)), reference)
                figures.setdefault((precision, PANELS[2], method, backward), {})[steps] = error


def label(method: str, backward: str) -> str:
    """Returns the name of a curve."""
    if method == "exact":
        return "exact, fp32"
    return METHODS[method] + (", autograd" if backward == "autograd" else "")


def picture(figures: Figures, path: Path) -> None:
    """Draws the errors by iterations into a file."""
    colors = {
        "gd": "tab:gray",
        "agd": "tab:orange",
        "cg": "tab:red",
        "chebyshev": "tab:blue",
        "cg_eps": "tab:purple",
        "exact": "black",
    }
    fig, axes = plt.subplots(2, len(PANELS), figsize=(13, 7), sharex=True, layout="constrained")
    for row, precision in zip(axes, ("fp32", "bf16"), strict=True):
        for axis, panel in zip(row, PANELS, strict=True):
            for (p, where, method, backward), errors in figures.items():
                if (p, where) == (precision, panel):
                    style = ":" if method == "exact" else "--" if backward == "autograd" else "-"
                    values = [value if math.isfinite(value) else math.nan for value in errors.values()]
                    axis.plot(list(errors), values, style, color=colors[method], label=label(method, backward))
            axis.set(yscale="log", title=f"{panel}, {precision}", xlabel="iterations", ylim=(None, 3))
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("relative error")
    axes[1, 0].set_ylabel("relative error")
    fig.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    fig.savefig(path, dpi=110, metadata={"Software": None})


def picture_by_condition(by_strength: dict[float, Figures], path: Path) -> None:
    """Draws the errors of conjugate gradient and Chebyshev iteration by iterations, a curve for each strength."""
    fig, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    for row, precision in zip(axes, ("fp32", "bf16"), strict=True):
        for axis, panel in zip(row, (OUTPUT, PANELS[1]), strict=True):
            for i, (strength, figures) in enumerate(by_strength.items()):
                for method, style in (("cg", "-"), ("chebyshev", "--"), ("exact", ":")):
                    errors = figures[precision, panel, method, "implicit"]
                    name = f"{label(method, 'implicit')}, condition <= {bound(strength)}"
                    values = [value if math.isfinite(value) else math.nan for value in errors.values()]
                    axis.plot(list(errors), values, style, color=f"C{i}", label=name)
            axis.set(yscale="log", title=f"{panel}, {precision}", xlabel="iterations")
            axis.grid(alpha=0.3)
        row[0].set_ylabel("relative error")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    fig.savefig(path, dpi=90, metadata={"Software": None})


def bound(strength: float) -> int:
    """Returns the largest condition number of H + strength ||H||_F I."""
    return round((1 + strength) / strength)


def table_by_condition(by_strength: dict[float, Figures]) -> list[str]:
    """Returns the lines of a table of outputs and gradients by the bound of the condition number."""
    steps = (10, 30, 60)
    lines = ["| condition <= | solver | precision | " + " | ".join(f"output, {n}" for n in steps)]
    lines[0] += " | " + " | ".join(f"gradient, {n}" for n in steps) + " |"
    lines += ["| --: | --- | --- " + "| --: " * 2 * len(steps) + "|"]
    for strength, figures in by_strength.items():
        for method in ("cg", "chebyshev", "exact"):
            for precision in ("fp32",) if method == "exact" else ("fp32", "bf16"):
                row = [figures[precision, panel, method, "implicit"][n] for panel in (OUTPUT, PANELS[1]) for n in steps]
                name = label(method, "implicit").removesuffix(", fp32")
                lines += [f"| {bound(strength)} | {name} | {precision} | " + " | ".join(f"{e:.1e}" for e in row) + " |"]
    return [*lines, ""]


def table(figures: Figures, precision: str, panel: str) -> list[str]:
    """Returns the lines of a panel's table."""
    lines = [f"### {panel.capitalize()}, {precision}", "", "| solver | " + " | ".join(map(str, STEPS)) + " |"]
    lines += ["| --- " + "| --: " * len(STEPS) + "|"]
    for (p, where, method, backward), errors in figures.items():
        if (p, where) == (precision, panel):
            lines += [f"| {label(method, backward)} | " + " | ".join(f"{e:.1e}" for e in errors.values()) + " |"]
    return [*lines, ""]


def claims(figures: Figures) -> list[str]:
    """Returns the lines of a table with the statements of Section 4.2.3 on Figure 1 beside our measurements."""

    def at(panel: int, method: str, steps: int = STEPS[-1], backward: str = "implicit") -> str:
        return ", ".join(f"{figures[p, PANELS[panel], method, backward][steps]:.1e} {p}" for p in ("fp32", "bf16"))

    def caught_up(precision: str) -> str:
        cg, chebyshev = (figures[precision, PANELS[0], method, "implicit"] for method in ("cg", "chebyshev"))
        reached = [steps for steps in STEPS[2:] if chebyshev[steps] <= cg[steps]]
        return f"at {reached[0]}" if reached else "never"

    def both_cg(panel: int) -> str:
        return f"{at(panel, 'cg')}; with + 1e-6: {at(panel, 'cg_eps')}"

    best = {p: min(METHODS, key=lambda m: figures[p, PANELS[0], m, "implicit"][STEPS[-1]]) for p in ("fp32", "bf16")}
    last = STEPS[-1]
    rows = [
        (
            "CG converges fastest within a few iterations",
            f"residual after 5: CG {at(0, 'cg', 5)}; Chebyshev {at(0, 'chebyshev', 5)}",
        ),
        (
            "Chebyshev reaches CG's accuracy at iteration 10",
            f"{caught_up('fp32')} in fp32, {caught_up('bf16')} in bf16",
        ),
        (
            "Chebyshev eventually attains the smallest errors",
            f"after {last}: CG {at(0, 'cg')}; Chebyshev {at(0, 'chebyshev')}; smallest of all: "
            + ", ".join(f"{METHODS[m]} in {p}" for p, m in best.items()),
        ),
        ("CG's implicit gradient comes within 1e-3 of the exact one, one layer", both_cg(1)),
        (f"it is amplified to almost 1 in {LAYERS} layers", both_cg(2)),
        ("Chebyshev's implicit gradient comes within 1e-6, one layer", at(1, "chebyshev")),
        (f"and in {LAYERS} layers", at(2, "chebyshev")),
        ("as does the gradient through its iterations, one layer", at(1, "chebyshev", backward="autograd")),
        (f"and in {LAYERS} layers", at(2, "chebyshev", backward="autograd")),
    ]
    return ["| the paper | here |", "| --- | --- |", *(f"| {statement} | {result} |" for statement, result in rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    start = time.perf_counter()
    figures: Figures = {}
    one_layer(figures)
    five_layers(figures)
    by_strength: dict[float, Figures] = {}
    for strength in STRENGTHS:
        implicit = [("cg", "implicit"), ("chebyshev", "implicit")]
        one_layer(by_strength.setdefault(strength, {}), strength, implicit)
    out.mkdir(parents=True, exist_ok=True)
    picture(figures, out / "chebyshev.png")
    picture_by_condition(by_strength, out / "chebyshev-conditions.png")
    lines = ["# Solvers of the ridge regression in `gka`", "", "![Errors by iteration](chebyshev.png)", ""]
    lines += [
        f"Written by `python benchmarks/chebyshev.py` in {time.perf_counter() - start:.0f} s on one thread of a CPU "
        f"({platform.machine()}, torch {torch.__version__}): arXiv:2511.21016, Figure 1, at a size for one core.",
        "",
    ]
    lines += [
        INTRODUCTION.strip(),
        "",
        "## Against the paper",
        "",
        *claims(figures),
        READING.strip(),
        "",
        "## By condition number",
        "",
        "![Errors by iteration and condition number](chebyshev-conditions.png)",
        "",
        BY_CONDITION.strip(),
        "",
        *table_by_condition(by_strength),
        "## Figures",
        "",
    ]
    for precision in ("fp32", "bf16"):
        for panel in PANELS:
            lines += table(figures, precision, panel)
    (out / "chebyshev.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print("\n".join(claims(figures)))


INTRODUCTION = f"""
Each token t has a system (H_t + lambda_t I) x_t = q_t with lambda_t = 0.02 ||H_t||_F, so a condition number of at
most 51. Errors are relative, against the exact solution of the same system in fp64.

- One layer: batch {BATCH}, {LENGTH} tokens, {HEADS} heads, K = {KEY}; random keys and queries of unit norm, gates
  alpha_t = sigmoid(4 + noise). The residual is the mean of ||(H_t + lambda_t I) x_t - q_t|| over tokens, the gradient
  that of a random linear function of all x_t in (q, k).
- {LAYERS} layers: a `gka` model of width 128 with 2 heads as it starts, {LENGTH // 2} random tokens; the gradient of
  the cross-entropy in all weights together.
- fp32: all is fp32. bf16: each H_t and its bounds are made in fp32 and rounded once, and all iterations, forward and
  backward, compute and store bf16; all else is fp32. So this is the solver's error alone.
- Gradient descent and accelerated gradient have the best constant step and momentum for the bounds that Chebyshev
  gets. Conjugate gradient stops moving where its residual, as it computes it, is at rounding.
- Conjugate gradient + 1e-6 has that number added to its two divisors, as it is often written.
- Backward is implicit differentiation (the same solver, as many iterations), or autograd through the iterations where
  it says so. `exact, fp32` is `torch.linalg.solve` in fp32: what rounding leaves to be had.
"""

READING = """
The paper's finding that conjugate gradient fails in backward is not one of conjugate gradient as such: where each
system stops at its own rounding and is scaled by its right-hand side, its gradients are as good as Chebyshev's at
half the iterations. With a constant in its divisors the errors come near what the paper describes, since the
right-hand sides of backward are small and a deep model's are smaller. Whether the paper's code has such a constant
is not known to us. Without either guard it divides 0 by 0 soon after it converges (the first tokens do so at once).
What stands is that Chebyshev iteration needs no guard, and that in bf16 it is level with the best at this condition
number. Gradients through the iterations of conjugate gradient, in contrast, are far off in five layers and bf16.
"""

BY_CONDITION = """
One layer, as above, with other factors in lambda_t = a ||H_t||_F, so with other bounds (1 + a) / a of the condition
number. Errors of outputs and gradients are relative, against the exact solution in fp64, by number of iterations.

At 51, the bound of the rule's default, both come near the exact solver of fp32. At 501 and more in bf16, Chebyshev's
gradient is farther from the exact one after 60 iterations than after 10, where conjugate gradient stands still at its
rounding. Rounding H_t to bf16 moves its eigenvalues by up to about ||H_t|| / 256, more than lambda_t then is;
eigenvalues below the bounds that Chebyshev iteration gets would grow with each iteration. That this is the cause was
not tested.
"""

if __name__ == "__main__":
    main()
