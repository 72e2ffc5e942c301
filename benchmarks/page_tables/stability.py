"""Tables of stability: outputs over lengths and precisions, condition numbers and eigenvalues in use."""

import math
from collections.abc import Sequence

from page_tables.markdown import load, table


def sizes_of_outputs() -> list[str]:
    """Lists the root mean square of the outputs of `rla` and `rdn` in fp32, the mean of the seeds by logarithm."""
    figures = [f for f in load("stability_cpu")["activations"]["figures"] if f["precision"] == "fp32"]
    rows = []
    for rule, width, arm in dict.fromkeys((f["rule"], f["K"], f["arm"]) for f in figures):
        row, losses = [rule, str(width), arm], []
        for step in sorted({f["step"] for f in figures}):
            chosen = [f for f in figures if (f["rule"], f["K"], f["arm"], f["step"]) == (rule, width, arm, step)]
            losses = [f["loss"] for f in chosen]
            for place in (0, 2, -1):
                row.append(scientific([f["rms"][place] for f in chosen]))
        known = [loss for loss in losses if loss is not None]
        lost = len(losses) - len(known)
        rows.append([*row, f"{lost} of {len(losses)} diverged" if lost else f"{sum(known) / len(known):.2f}"])
    lengths = [f"{when}, {n}" for when in ("start", "trained") for n in ("128", "512", "4096")]
    return table(["rule", "K", "arm", *lengths, "loss"], rows)


def scientific(values: Sequence[float | None]) -> str:
    """Returns the geometric mean of positive figures as text; one that is None is not finite, and so is their mean."""
    if any(value is None for value in values):
        return "not finite"
    return f"{math.exp(sum(math.log(value) for value in values if value is not None) / len(values)):.2g}"


def sizes_by_precision() -> list[str]:
    """Lists how far the outputs of 4096 tokens are from those in fp64, after the short training, of the first seed."""
    figures = [f for f in load("stability_cpu")["activations"]["figures"] if f["seed"] == 0 and f["step"]]
    by = {(f["rule"], f["K"], f["arm"], f["precision"]): f["rms"][-1] for f in figures}
    rows = []
    for rule, width, arm in dict.fromkeys(key[:3] for key in by):
        exact = by[rule, width, arm, "fp64"]
        row = [rule, str(width), arm, scientific([exact])]
        for precision in ("fp32", "bf16"):
            value = by[rule, width, arm, precision]
            finite = value is not None and exact is not None
            row.append(f"{value / exact - 1:+.1e}" if finite else "not finite")
        rows.append(row)
    return table(["rule", "K", "arm", "fp64", "fp32 beside it", "bf16 beside it"], rows)


def condition_numbers() -> list[str]:
    """Lists the condition numbers of `gka` by step, median and largest of all tokens, layers and seeds."""
    figures = load("stability_cpu")["systems"]["figures"]
    bounds = {"0.02 ||H||": "51", "0.2 ||H||": "6"}
    steps = sorted({f["step"] for f in figures})
    rows = []
    for ridge in dict.fromkeys(f["ridge"] for f in figures):
        row = [ridge, bounds.get(ridge, "none")]
        for step in steps:
            chosen = [f for f in figures if (f["ridge"], f["step"]) == (ridge, step)]
            middle = sorted(f["median"] for f in chosen)
            row.append(f"{middle[0]:.3g} to {middle[-1]:.3g}; {max(f['largest'] for f in chosen):.4g}")
        rows.append(row)
    return table(["lambda", "bound", *(f"step {step}" for step in steps)], rows)


def eigenvalues_in_use() -> list[str]:
    """Lists the eigenvalues of transitions in use beside the declared range."""
    figures = load("stability_cpu")["spectra"]["figures"]
    rows = []
    for rule in dict.fromkeys(f["rule"] for f in figures):
        start, end = sorted((f for f in figures if f["rule"] == rule), key=lambda f: f["step"])
        row = [f"`{rule}`", "{:.3g} to {:.3g}".format(*start["declared"])]
        for f in (start, end):
            row += [f"{f['low']:.3f} to {f['high']:.3f}", f"{f['median']:.3f}"]
        outside = max(f["outside"] for f in (start, end))
        rows.append([*row, f"{max(f['turn'] for f in (start, end)):.2g}", "0" if outside < 1e-9 else f"{outside:.1e}"])
    header = ["rule", "declared", "start", "median", "trained", "median", "imaginary part", "outside"]
    return table(header, rows)


TABLES = (
    sizes_of_outputs,
    sizes_by_precision,
    condition_numbers,
    eigenvalues_in_use,
)
