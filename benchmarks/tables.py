"""Writes the tables of figures in docs/ from the JSON files in this folder.

    python benchmarks/tables.py            # writes the tables
    python benchmarks/tables.py --check    # exits 1 if a page differs from what would be written

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is a function in `TABLES`.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kernels import TARGETS

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = (
    DOCS / "performance.md",
    DOCS / "explanation" / "statistics.md",
    DOCS / "how-to" / "train.md",
    DOCS / "stability.md",
)
MAIN_SHAPE = "8,4096,16,128,128"
REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
LABELS = {
    "comba": "Comba",
    "deltanet": "DeltaNet",
    "gated_deltanet": "Gated DeltaNet",
    "gla": "GLA",
    "sgla": "sGLA",
    "rla": "RLA",
    "rdn": "RDN",
    "gka_10": "GKA, 10 iterations",
    "linear_attention": "linear attention",
    "mamba2": "Mamba2",
    "attention": "attention",
}
PEERS = {
    "comba": "FLA's Comba",
    "deltanet": "FLA's DeltaNet",
    "gated_deltanet": "FLA's Gated DeltaNet, by FlashQLA",
    "gla": "FLA's GLA",
    "gka_10": "FLA's MesaNet",
}


def load(name: str) -> dict[str, Any]:
    """Reads a JSON file of this folder."""
    return json.loads((HERE / f"{name}.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def ms(value: float) -> str:
    """Returns milliseconds as text."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def kernels_against_peers() -> list[str]:
    """Compares each rule with its peer in the same run.

    A goal is the least ratio of times, or the largest ratio of memory.
    """
    parts = load("kernels_h200")
    goals = {(rule, other, figure): goal for rule, _, other, _, figure, goal in TARGETS if goal is not None}
    rows = []
    for rule, by, other, peer, figure, _ in TARGETS:
        if figure != "forward" or (rule, other, figure) not in goals:
            continue
        for part in parts.values():
            figures = {(f["rule"], f["by"]): f for f in part["figures"] if f["shape"] == MAIN_SHAPE}
            if (rule, by) in figures and (other, peer) in figures:
                ours, theirs = figures[rule, by], figures[other, peer]
                break
        else:
            raise SystemExit(f"kernels_h200.json: no part has both {rule} by {by} and {other} by {peer}")
        name = PEERS[other] if peer != "triton" else f"our {LABELS[other]}"
        row = [f"{LABELS[rule]} beside {name}"]
        for passes in ("forward", "both"):
            ratio = theirs[passes] / ours[passes]
            row += [ms(ours[passes]), ms(theirs[passes]), judged(ratio, goals[rule, other, passes], least=True)]
        memory = goals.get((rule, other, "both_memory"))
        row.append("" if memory is None else judged(ours["both_memory"] / theirs["both_memory"], memory, least=False))
        rows.append(row)
    header = ["", "forward, ms", "peer, ms", "times as fast"]
    return table([*header, "with backward, ms", "peer, ms", "times as fast", "memory / peer's"], rows)


def judged(ratio: float, goal: float, *, least: bool, digits: int = 2) -> str:
    """Returns a ratio with its goal, with three digits if two would not show on which side of the goal the ratio is."""
    is_met = ratio >= goal if least else ratio <= goal
    digits = digits if abs(ratio - goal) >= 0.005 else 3
    return f"{ratio:.{digits}f} (goal {goal:.{digits}f}{'' if is_met else ', missed'})"


def kernels_by_rule() -> list[str]:
    """Lists the times and the memory of all rules at the main shape."""
    parts = load("kernels_h200")
    figures = {f["rule"]: f for part in ("fla_mesanet", "ours") for f in parts[part]["figures"] if f["by"] == "triton"}
    rows = [
        [
            LABELS[rule],
            ms(f["forward"]),
            ms(f["both"]),
            f"{f['decode'] * 1e3:.1f}",
            f"{f['both_memory'] / 2**20:.0f}",
            f"{f['forward_launch']:.1f}",
            f"{f['both_launch']:.1f}",
            "" if f["first_call"] is None else f"{f['first_call']:.1f}",
        ]
        for rule, f in sorted(figures.items(), key=lambda item: item[1]["both"])
    ]
    header = ["rule", "forward, ms", "with backward, ms", "decode, us a token", "extra memory, MiB"]
    return table([*header, "host time forward, ms", "host time with backward, ms", "first call, s"], rows)


def other_shapes() -> list[str]:
    """Lists the times of rules at other shapes."""
    figures = load("kernels_h200")["shapes"]["figures"]
    shapes = list(dict.fromkeys(f["shape"] for f in figures))
    by = {(f["rule"], f["shape"]): f for f in figures}
    rows = []
    for rule in dict.fromkeys(f["rule"] for f in figures):
        row = [LABELS[rule]]
        for shape in shapes:
            f = by.get((rule, shape))
            row += ["", ""] if f is None else [ms(f["forward"]), ms(f["both"])]
        rows.append(row)
    titles = [f"({shape.replace(',', ', ')}) {passes}" for shape in shapes for passes in ("forward", "with backward")]
    return table(["ms", *titles], rows)


def against_length() -> list[str]:
    """Compares Comba with attention at several lengths."""
    figures = load("kernels_h200")["sdpa"]["figures"]
    sizes = {f["shape"]: [int(n) for n in f["shape"].split(",")[:2]] for f in figures}
    shapes = sorted((s for s, (batch, length) in sizes.items() if batch * length == 65536), key=lambda s: sizes[s][1])
    by = {(f["by"], f["shape"]): f for f in figures}
    rows = [
        [name, *(ms(by[peer, shape][passes]) for shape in shapes)]
        for name, peer, passes in (
            ("Comba, forward", "triton", "forward"),
            ("attention, forward", "sdpa", "forward"),
            ("Comba, with backward", "triton", "both"),
            ("attention, with backward", "sdpa", "both"),
        )
    ]
    return table(["ms", *(f"{sizes[s][0]} x {sizes[s][1]:,}" for s in shapes)], rows)


def training_step() -> list[str]:
    """Lists the time of a trial's step by the size of the stack."""
    rows: dict[str, dict[int, float]] = {}
    for row in load("throughput_h200")["rows"]:
        if row["part"] == "step":
            rows.setdefault(row["what"], {})[row["stack"]] = row["ms_per_trial_and_step"]
    sizes = sorted({size for times in rows.values() for size in times})
    header = ["ms a trial and step", *("alone" if size == 1 else f"{size} as one" for size in sizes)]
    return table(header, ([named(title), *(f"{times[size]:.2f}" for size in sizes)] for title, times in rows.items()))


def training_stacks() -> list[str]:
    """Compares trials one after another with stacks."""
    rows: dict[str, dict[int, float]] = {}
    for row in load("throughput_h200")["rows"]:
        if row["part"] == "stacks" and "stack" in row:
            rows.setdefault(row["what"], {})[row["stack"]] = row["ms_per_trial_and_step"]
    header = ["ms a trial and step", "one after another", "20 as one", "times as fast"]
    return table(header, ([named(w), f"{f[1]:.3f}", f"{f[20]:.3f}", f"{f[1] / f[20]:.1f}"] for w, f in rows.items()))


def gpu_busy() -> list[str]:
    """Lists the shares of time in which the GPU has a kernel."""
    rows = [
        [named(row["what"]), f"{row['seconds']:.1f}", f"{row['busy']:.1%}", f"{row['in_trace']:.1%}"]
        for row in load("throughput_h200")["rows"]
        if row["part"] == "busy"
    ]
    return table(["20 runs of 1,000 steps", "wall time, s", "GPU busy", "busy while profiled"], rows)


def named(title: str) -> str:
    """Returns the title of a row with the rule's full name."""
    rule, _, rest = title.partition(", ")
    return f"{LABELS[rule]}, {rest}"


def parallel_form() -> list[str]:
    """Compares the chunked form with the recurrence token by token."""
    places = {"16 CPU cores, 2 threads": load("scan_cpu"), "H100": load("scan_h100")}
    rows: dict[tuple[str, str], list[str]] = {}
    for results in places.values():
        for f in results["figures"]:
            slow, fast = f["seconds"]["recurrent"] * 1e3, f["seconds"]["chunked"] * 1e3
            rows.setdefault((f["rule"], f["what"]), []).extend([f"{slow:.1f}", f"{fast:.2f}", f"{f['ratio']:.1f}"])
    columns = ("token by token, ms", "chunked, ms", "times as fast")
    titles = [f"{place}: {column}" for place in places for column in columns]
    return table(["", *titles], ([f"{LABELS[rule]}, {passes}", *cells] for (rule, passes), cells in rows.items()))


def calibration_goals() -> list[str]:
    """Compares the statistics with their goals."""
    results = load("calibration")
    rows = []
    ways = {way: [row for row in results["choices"] if row["choice"] == way] for way in WAYS_TO_CHOOSE}
    for key, title in (("equal", "arms alike"), ("better", "an arm of twice the sd alone called better")):
        for before, now in zip(ways["its own best run; flips of differences"], ways[WAYS_TO_CHOOSE[-1]], strict=True):
            name = f"false verdicts a study, {now['candidates']} candidates, noise of {now['noise']} sd, {title}"
            rows.append([name, f"{before[key]:.3f}", judged(now[key], 0.055, least=False, digits=3)])
    for row in results["failures"]:
        lost = f"the last of 3 candidates failed in {'the base' if row['failed'] == 'base' else 'one arm'}"
        name = f"false verdicts a study, {lost}, the others worse by {row['loss']:g} sd"
        rows.append([name, f"{row['before']:.3f}", judged(row["now"], 0.055, least=False, digits=3)])
    for row in results["families"]:
        name = f"false verdicts a study of {row['tasks']} task{'s' * (row['tasks'] > 1)}"
        rows.append([name, f"{row['task']:.3f}", judged(row["study"], 0.055, least=False, digits=3)])
    for part, title, worst, goal in (
        ("error", "false verdicts", max, 0.055),
        ("coverage", "joint coverage", min, 0.94),
    ):
        means: dict[str, list[float]] = {}
        for row in results[f"over_tasks_{part}"]:
            means.setdefault(row["scores"], []).append(row["mean"])
        for scores, of_designs in means.items():
            figure = judged(worst(of_designs), goal, least=worst is min, digits=3)
            rows.append([f"{title} over tasks, {scores}, the worst of {len(of_designs)} designs", "", figure])
    powers = {(row["setting"], row["constant"]): row["power"] for row in results["powers"]}
    for setting, goal in (
        ("equal variances", 0.80),
        ("one arm with 10 times the sd", 0.55),
        ("two arms collapse on a fifth of the seeds", 0.70),
        ("equal variances, 7 seeds", 0.65),
    ):
        before, power = powers[setting, "separate tests"], powers[setting, results["constant"]]
        rows.append([f"power, {setting}", f"{before:.3f}", judged(power, goal, least=True, digits=3)])
    for row in results["sequential"]:
        if "ratio" in row:
            name = f"runs at equal power, sequential over fixed, {effects(row)}"
            has_goal = (row["effects"], row["size"]) == (1, results["effect"])
            rows.append(
                [name, "1", judged(row["ratio"], 0.67, least=False, digits=3) if has_goal else f"{row['ratio']:.3f}"]
            )
    for row in results["extrapolation"]:
        name = f"coverage of a ladder's prediction, {row['seeds']} seeds, {row['noise']}"
        rows.append([name, f"{row['bootstrap']:.3f}", judged(row["agrees"], 0.94, least=True, digits=3)])
    settings = [row for row in results["transfer_tau"] if (row["apart"], row["seeds"]) == (1, 6)]
    for row in settings:
        name = f"coverage of Kendall's tau {row['tau']:.2f}, 6 seeds, arms 1 sd apart"
        rows.append([name, f"{row['bootstrap_coverage']:.3f}", judged(row["coverage"], 0.92, least=True, digits=3)])
    checked = results["checked"]
    rows.append([f"of {checked['rows']:,} rows, contradict", "", str(checked["contradictions"])])
    return table(["", "before", "now"], rows)


def over_tasks_cell(row: dict[str, Any]) -> str:
    """What a figure on means over tasks is of."""
    return f"{row['scores']}, {row['tasks']} tasks, {row['seeds']} seeds"


WAYS_TO_CHOOSE = (
    "its own best run; flips of differences",
    "its runs, weighed by the other seeds; flips of differences",
    "its runs, weighed by the other seeds; exchange of whole seeds",
)


def calibration_of_choices() -> list[str]:
    """Compares the ways in which a seed may choose among its runs."""
    results = load("calibration")["choices"]
    cells = {(row["choice"], row["candidates"], row["noise"]): row for row in results}
    heads = sorted({(row["candidates"], row["noise"]) for row in results})
    rows = []
    for way in WAYS_TO_CHOOSE:
        of_way = [cells[way, candidates, noise] for candidates, noise in heads]
        figures = [[f"{row[key]:.2f}" for key in ("equal", "noisy", "all_noisy", "power")] for row in of_way]
        rows.append([way, *(" / ".join(of_cell) for of_cell in figures)])
    head = [f"{candidates} candidates, noise {noise}" for candidates, noise in heads]
    return table(["equal / one noisy / all noisy / power", *head], rows)


def effects(row: dict[str, Any]) -> str:
    """Returns the effects of a row as text."""
    if not row["effects"]:
        return "no effect"
    return f"{row['effects']} arm{'s' if row['effects'] > 1 else ''} off by {row['size']:g} sd"


WHOLE_MODELS = {
    "ours:comba": "Comba",
    "ours:gated_deltanet": "Gated DeltaNet",
    "ours:transformer": "Transformer++",
    "export": "Comba, exported, without deltalab",
    "fla:comba": "FLA's Comba",
    "fla:gated_deltanet": "FLA's Gated DeltaNet",
}


def host_times() -> list[str]:
    """Compares the host's time of a call with that before decision 112, in the same run."""
    results = load("host_h100")
    rows = []
    for name, now in results["ms"].items():
        before = results["before"].get(name)
        row = [name.replace("gated_deltanet", "Gated DeltaNet").replace("comba", "Comba").replace("fla's", "FLA's")]
        for passes in ("forward", "both"):
            row += ["" if before is None else ms(before[passes]["median"]), ms(now[passes]["median"])]
        rows.append([*row, str(now["launches"]["both"])])
    return table(
        ["", "forward before, ms", "forward, ms", "with backward before, ms", "with backward, ms", "launches"], rows
    )


HOWS = {
    "checkpoint": "checkpointed",
    "compiled": "compiled",
    "graphs": "blocks as CUDA graphs",
    "step_graph": "a step as one CUDA graph",
}


def whole_models() -> list[str]:
    """Lists every row of the benchmark of whole models."""
    rows = []
    for row in load("pretrain_h100")["rows"]:
        how = row["precision"] + "".join(f", {label}" for key, label in HOWS.items() if row[key])
        cells = [WHOLE_MODELS[row["model"]], row["size"], row["shape"].replace("x", " x "), str(row["gpus"]), how]
        if "error" in row:
            rows.append([*cells, "does not fit", "", "", "", ""])
            continue
        rate, share = row["tokens_per_second"] / 1e3, row["share_of_peak"]
        measured = [
            f"{row['ms']:.1f}",
            f"{rate:.1f}",
            f"{share:.3f}",
            f"{row['peak_gib']:.1f}" if "peak_gib" in row else "",
        ]
        rows.append([*cells, *measured, f"{row['first_step_s']:.1f}" if "first_step_s" in row else ""])
    header = ["model", "size", "sequences x tokens", "GPUs", "how", "ms a step", "thousand tokens/s"]
    return table([*header, "share of peak", "memory, GiB", "first step, s"], rows)


def sharded_models() -> list[str]:
    """Compares FSDP2 on one GPU and on two, with 394M parameters."""
    rows = []
    one_gpu = next(row for row in load("sharded_h200")["rows"] if row["gpus"] == 1)
    for row in load("sharded_h200")["rows"]:
        kept = "to the backward" if row["keep"] else "for a block's forward"
        times = row["tokens_per_second"] / one_gpu["tokens_per_second"]
        measured = [
            f"{row['ms']:.1f}",
            f"{row['tokens_per_second'] / 1e3:.1f}",
            f"{times:.2f}",
            f"{row['peak_gib']:.1f}",
        ]
        rows.append([str(row["gpus"]), "" if row["gpus"] == 1 else kept, *measured])
    header = ["GPUs", "gathered weights stay", "ms a step", "thousand tokens/s", "over one GPU", "memory, GiB a GPU"]
    return table(header, rows)


def trained_winner() -> list[str]:
    """Lists the trainings of benchmarks/winner.py."""
    results = load("winner_h200")
    names = {
        "one": "Comba without b, killed after step {killed_after} and trained on",
        "two": "Comba without b, two GPUs",
        "gated_deltanet": "Gated DeltaNet",
        "transformer": "Transformer++",
    }
    rows = []
    for name, title in names.items():
        losses = results["losses"][name]
        last = [f"{list(losses[split].values())[-1]:.3f}" for split in ("train", "validation")]
        rows.append([title.format(**results), *last, f"{results[name]['tokens_per_second'] / 1e3:.0f}"])
    return table(["340M, 13.1 million tokens", "loss of the last step", "validation", "thousand tokens/s"], rows)


def whole_model_kinds() -> list[str]:
    """Lists the milliseconds of a step in each kind of kernel, before decision 204 and after."""
    results = load("pretrain_h100")
    shapes = ("8x4096", "8x2048")
    columns = [
        next(row for row in rows if row["shape"] == shape and row["model"] == "ours:comba" and "kinds" in row)
        for shape in shapes
        for rows in (results["before"], results["profiled"])
    ]
    kinds = list(dict.fromkeys(kind for row in columns for kind in row["kinds"]))
    header = [f"{shape.replace('x', ' x ')}, {when}" for shape in shapes for when in ("before", "after")]
    rows = [[kind, *(f"{row['kinds'].get(kind, 0):.1f}" for row in columns)] for kind in kinds]
    rows.append(["all kernels", *(f"{row['device_ms']:.1f}" for row in columns)])
    rows.append(["a step", *(f"{row['ms']:.1f}" for row in columns)])
    return table(["ms, Comba, 394M", *header], rows)


def whole_model_goals() -> list[str]:
    """Compares whole models with their goals, by the way in which the kernels of a step are launched."""
    launches = {"one by one": (False, False), "blocks as CUDA graphs": (True, False), "a step as one": (False, True)}
    by_case = {
        (
            row["model"],
            row["size"],
            row["shape"],
            row["gpus"],
            row["precision"],
            (row["graphs"], row["step_graph"]),
        ): row
        for row in load("pretrain_h100")["rows"]
        if not ("error" in row or row["compiled"] or row["checkpoint"])
    }

    def figures(launch: tuple[bool, bool]) -> list[float]:
        def of(
            key: str, shape: str, model: str = "ours:comba", gpus: int = 1, size: str = "394M", precision: str = "bf16"
        ) -> float:
            graphs = (False, False) if model.startswith("fla:") else launch
            row = by_case.get((model, size, shape, gpus, precision, graphs))
            if row is None and model == "ours:comba":  # the export is the same model
                row = by_case.get(("export", size, shape, gpus, precision, graphs), {})
            return float((row or {}).get(key, math.nan))

        rate, memory = "tokens_per_second", "peak_gib"
        return [
            of(rate, "8x2048", "export") / of(rate, "8x2048", "fla:comba"),
            of("share_of_peak", "8x4096"),
            of("share_of_peak", "4x4096", size="1.3B"),
            of(rate, "8x4096") / of(rate, "8x2048"),
            of("first_step_s", "8x2048"),
            of(memory, "8x2048") / of(memory, "8x2048", "fla:comba"),
            of(rate, "8x4096", gpus=4, precision="fsdp") / of(rate, "8x4096", precision="fsdp"),
        ]

    goals = [
        ("394M, 8 x 2048, export without deltalab, tokens/s over FLA's Comba", ">= 2.4"),
        ("394M, 8 x 4096, share of peak", ">= 0.45"),
        ("1.3B, 4 x 4096, share of peak", ">= 0.45"),
        ("394M, time a token at 8 x 2048 over that at 8 x 4096", "<= 1.15"),
        ("394M, first step of a cold process, s", "<= 20"),
        ("394M, 8 x 2048, peak memory over FLA's Comba", "<= 0.9"),
        ("394M, 8 x 4096 a GPU, FSDP2, tokens/s on 4 GPUs over 1", ">= 3.8"),
    ]

    def cell(value: float, goal: str) -> str:
        if math.isnan(value):
            return "not measured"
        is_met = value >= float(goal[3:]) if goal.startswith(">") else value <= float(goal[3:])
        return f"{value:.2f}" + ("" if is_met else ", missed")

    columns = [figures(launch) for launch in launches.values()]
    rows = [[title, goal, *(cell(column[i], goal) for column in columns)] for i, (title, goal) in enumerate(goals)]
    return table(["kernels of a step launched", "asked", *launches], rows)


def calibration_of_designs() -> list[str]:
    """Lists error, coverage and power of the designs of tuning."""
    rows: dict[str, list[str]] = {}
    designs = load("calibration")["designs"]
    for row in designs:
        cells = rows.setdefault(row["design"], [str(row["runs_per_arm"])])
        cells.append(f"{row['error']:.3f} / {row['coverage']:.3f} / {row['power']:.2f}")
    noises = [f"noise of {noise} sd" for noise in dict.fromkeys(row["noise"] for row in designs)]
    return table(["error / coverage / power", "runs an arm", *noises], ([name, *cells] for name, cells in rows.items()))


def calibration_of_constants() -> list[str]:
    """Lists the power of the test by its constant c."""
    rows: dict[str, list[str]] = {}
    results = load("calibration")
    for row in results["powers"]:
        rows.setdefault(row["constant"], []).append(f"{row['power']:.3f}")
    settings = list(dict.fromkeys(row["setting"] for row in results["powers"]))
    titles = {name: f"**c = {name}**" if name == results["constant"] else f"c = {name}" for name in rows}
    titles["separate tests"] = "separate tests, Holm"
    return table(["power", *settings], ([titles[name], *cells] for name, cells in rows.items()))


def calibration_by_distribution() -> list[str]:
    """Lists error and coverage by the distribution of scores."""
    rows = [
        [row["distribution"], str(row["seeds"])]
        + [f"{row[key]:.3f}" for key in ("error_0", "coverage_0", "error_2", "coverage_2")]
        for row in load("calibration")["distributions"]
    ]
    header = ["scores", "seeds", "no effect: error", "coverage"]
    return table([*header, "two effects: error on the other arms", "coverage"], rows)


def calibration_of_looks() -> list[str]:
    """Lists power and runs of sequential designs."""
    rows = []
    for row in load("calibration")["sequential"]:
        cells = [f"{row[key]:.2f}" if key in row else "" for key in ("power", "seeds_per_arm", "fixed_seeds", "ratio")]
        rows.append([effects(row), f"{row['error']:.3f}", *cells])
    header = ["", "error", "power", "seeds an arm, on average", "seeds of a fixed design of that power"]
    return table([*header, "runs, sequential over fixed"], rows)


def calibration_over_tasks() -> list[str]:
    """Lists error and coverage of means and interquartile means over tasks."""
    results = load("calibration")
    covered = {over_tasks_cell(row): row for row in results["over_tasks_coverage"]}
    keys = ("mean", "iqm", "iqm_bootstrap", "iqm_of_base", "iqm_of_base_bootstrap")
    rows = []
    for row in results["over_tasks_error"]:
        held = covered.get(over_tasks_cell(row))
        cells = [f"{row[key]:.3f}" for key in ("mean", "iqm", "either")]
        cells += [f"{held[key]:.3f}" if held else "" for key in keys]
        rows.append([row["scores"], f"{row['tasks']}, {row['seeds']}", *cells])
    header = ["scores", "tasks, seeds", "error: mean", "IQM", "either", "joint coverage: mean", "IQM"]
    return table([*header, "each: IQM, bootstrap", "base's IQM, t interval", "bootstrap"], rows)


def calibration_of_power_over_tasks() -> list[str]:
    """Lists how often an arm is told from the base over tasks, and on at least one task."""
    keys = ("mean", "iqm", "some_task")
    rows = [
        [row["scores"], f"{row['tasks']}, {row['seeds']}"]
        + [" / ".join(f"{row[f'{arm}_{key}']:.2f}" for key in keys) for arm in ("all", "one")]
        for row in load("calibration")["over_tasks_power"]
    ]
    return table(["mean / IQM / some task", "tasks, seeds", "better on all tasks", "worse on one task"], rows)


def calibration_of_early_decisions() -> list[str]:
    """Lists how far means and unbiased differences are from the truth after an early decision."""
    names = ("mean", "unbiased")
    rows = []
    for row in load("calibration")["early_decisions"]:
        early = row["early"]
        cells = [f"{early['share']:.2f}", *(f"{early[name]['average'] - 1:+.0%}" for name in names)]
        for group, figure in (("early", "median"), ("early", "above"), ("early", "rmse"), ("not_given_up", "above")):
            cells.append(" / ".join(f"{row[group][name][figure]:.2f}" for name in names))
        rows.append([str(row["arms"]), row["scores"], f"{row['size']:g} sd", *cells])
    header = ["arms", "scores", "true difference", "decided early", "mean off by", "unbiased off by"]
    header += ["median / truth", "above the truth", "rms error / truth", "with those of the last look, above the truth"]
    return table(header, rows)


def calibration_of_ladders() -> list[str]:
    """Lists how often the intervals of a ladder hold the truth."""
    shares = ("bootstrap", "agrees", "predicted", "measured", "a", "b", "c")
    rows = [
        [row["noise"], str(row["seeds"])]
        + [f"{row[key]:.3f}" for key in shares]
        + [f"{row[key]:.2f}" for key in ("bootstrap_width", "width")]
        for row in load("calibration")["extrapolation"]
    ]
    header = ["noise", "seeds", "predicted minus measured, bootstrap", "now", *shares[2:]]
    return table([*header, "width, bootstrap", "now"], rows)


def calibration_of_tau() -> list[str]:
    """Lists bias, coverage and width of Kendall's tau, by bootstrap and now, over the numbers of seeds."""
    cells: dict[tuple[float, float], list[dict[str, float]]] = {}
    for row in load("calibration")["transfer_tau"]:
        cells.setdefault((row["tau"], row["apart"]), []).append(row)
    rows = []
    for (tau, apart), members in cells.items():
        means = {key: sum(row[key] for row in members) / len(members) for key in members[0]}
        figures = (
            f"{means[f'{when}bias']:+.2f} / {means[f'{when}coverage']:.3f} / {means[f'{when}width']:.2f}"
            for when in ("bootstrap_", "")
        )
        rows.append([f"{tau:.2f}", f"{apart:g} sd", *figures])
    return table(["true tau", "sd of the true means", "bias / coverage / width, bootstrap", "now"], rows)


def engine_kills() -> list[str]:
    """Counts what was struck in studies of each engine, and how many of the studies ended with equal numbers."""
    rows = []
    for file in ("engine_kills_cpu", "engine_kills_accelerate_cpu"):
        found = load(file)
        struck = [victim for study in found["studies"] for victim in study["struck"] if victim != "again"]
        whole = sum(study["equal"] and not study["left"] for study in found["studies"])
        counts = [str(struck.count(victim)) for victim in ("driver", "child", "torchrun", "rank", "disk")]
        rows.append([found["engine"], *counts, f"{whole} of {len(found['studies'])}", str(found["numbers"])])
    header = "engine", "driver", "its child", "torchrun", "a rank", "full disk", "studies as without", "numbers of each"
    return table(header, rows)


def study_overhead() -> list[str]:
    """Sets the time of studies of trainings beside that of the trainings."""
    rows = []
    for row in load("study_overhead_cpu")["studies"]:
        beside, cores, again = row["seconds"] - row["trained"], row.get("cores"), row.get("cores_again")
        by = "deltalab" if row["engine"] == "none" else row["engine"]
        size = f"{row['arms']} x {row['runs'] // row['arms']}"
        by_clock = f"{row['seconds']:.0f}", f"{beside:.0f} ({beside / row['trained']:.0%})"
        by_cores = ("", "") if cores is None else (f"{cores:.0f}", f"{again:.1f} ({again / (cores - again):.0%})")
        rows.append([by, size, *by_clock, *by_cores])
    header = "trained by", "arms x seeds", "s", "of them beside trainings", "s of cores", "of them beside trainings"
    return table(header, rows)


def calibration_of_unbalanced() -> list[str]:
    """Lists the error of studies whose base has more seeds, and that by relabelling without Welch's test."""
    results = load("calibration")
    rows = [[r["scores"], f"{r['error']:.3f}", f"{r['relabelling_alone']:.3f}"] for r in results["unbalanced_error"]]
    rows += [[f"{r['scores']}; 2 arms, 3 candidates", f"{r['error']:.3f}", ""] for r in results["unbalanced_tuned"]]
    return table(["scores", "error", "alone"], rows)


def calibration_of_unbalanced_power() -> list[str]:
    """Lists how often studies whose base has more seeds find an arm off by 2 sd, beside pairs with as many runs."""
    results = load("calibration")["unbalanced_power"]
    runs = f"{results[0]['runs_unbalanced']} runs", f"{results[0]['runs_pairs']} runs"
    rows = [[f"{row['correlation']:g}", f"{row['unbalanced']:.2f}", f"{row['pairs']:.2f}"] for row in results]
    return table(["correlation", f"6 seeds an arm, 16 of the base: {runs[0]}", f"7 pairs: {runs[1]}"], rows)


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


def calibration_of_margins() -> list[str]:
    """Lists what verdicts by a margin get wrong where arms differ by the margin, and what they find elsewhere."""
    rows = []
    for row in load("calibration")["margins"]:
        wrong = [f"{row[key]:.3f}" for key in ("equal_up", "equal_turns", "beyond")]
        found = [f"{row[key]:.2f}" for key in ("equal", "different")]
        rows.append([str(row["arms"]), str(row["seeds"]), "3" if row["tuned"] else "1", *wrong, *found])
    wrong = "by the margin, all up: some equal", "in turns: some equal", "all up: some beyond"
    return table(["arms", "seeds", "candidates", *wrong, "alike: equal", "3 sd off: beyond"], rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    make.__name__: make
    for make in (
        kernels_against_peers,
        kernels_by_rule,
        other_shapes,
        against_length,
        training_step,
        training_stacks,
        gpu_busy,
        host_times,
        parallel_form,
        whole_models,
        whole_model_kinds,
        whole_model_goals,
        sharded_models,
        trained_winner,
        engine_kills,
        study_overhead,
        calibration_goals,
        calibration_of_designs,
        calibration_of_choices,
        calibration_of_constants,
        calibration_by_distribution,
        calibration_of_looks,
        calibration_of_early_decisions,
        calibration_over_tasks,
        calibration_of_power_over_tasks,
        calibration_of_margins,
        calibration_of_unbalanced,
        calibration_of_unbalanced_power,
        calibration_of_ladders,
        calibration_of_tau,
        sizes_of_outputs,
        sizes_by_precision,
        condition_numbers,
        eigenvalues_in_use,
    )
}


def written(page: str) -> str:
    """Returns the page with every table made anew."""
    return REGION.sub(lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    names = [name for text in pages.values() for _, name, _ in REGION.findall(text)]
    if sorted(names) != sorted(TABLES):
        sys.exit(f"the pages have the tables {sorted(names)}, and this script makes {sorted(TABLES)}")
    for page, text in pages.items():
        if not options.check:
            page.write_text(written(text), encoding="utf-8")
        elif written(text) != text:
            sys.exit(f"{page.name} differs from the JSON files: run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
