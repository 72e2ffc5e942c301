"""Tables of trainings: the steps of small trials, alone and in stacks, and of whole models."""

import math
from typing import Any

from page_tables.kernels import LABELS
from page_tables.markdown import load, table

WHOLE_MODELS = {
    "ours:comba": "Comba",
    "ours:gated_deltanet": "Gated DeltaNet",
    "ours:transformer": "Transformer++",
    "export": "Comba, exported, without deltalab",
    "fla:comba": "FLA's Comba",
    "fla:gated_deltanet": "FLA's Gated DeltaNet",
}
HOWS = {
    "checkpoint": "checkpointed",
    "compiled": "compiled",
    "graphs": "blocks as CUDA graphs",
    "step_graph": "a step as one CUDA graph",
}


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
        ]

    goals = [
        ("394M, 8 x 2048, export without deltalab, tokens/s over FLA's Comba", ">= 2.4"),
        ("394M, 8 x 4096, share of peak", ">= 0.45"),
        ("1.3B, 4 x 4096, share of peak", ">= 0.45"),
        ("394M, time a token at 8 x 2048 over that at 8 x 4096", "<= 1.15"),
        ("394M, first step of a cold process, s", "<= 20"),
        ("394M, 8 x 2048, peak memory over FLA's Comba", "<= 0.9"),
    ]

    def cell(value: float, goal: str) -> str:
        if math.isnan(value):
            return "not measured"
        is_met = value >= float(goal[3:]) if goal.startswith(">") else value <= float(goal[3:])
        return f"{value:.2f}" + ("" if is_met else ", missed")

    columns = [figures(launch) for launch in launches.values()]
    rows = [[title, goal, *(cell(column[i], goal) for column in columns)] for i, (title, goal) in enumerate(goals)]
    return table(["kernels of a step launched", "asked", *launches], rows)


def sharded_models() -> list[str]:
    """Compares FSDP2 on several GPUs with one GPU of the same host."""
    everything = load("sharded_h200")["rows"]
    alone = {(row["host"], row["size"]): row for row in everything if row["gpus"] == 1 and "error" not in row}
    rows = []
    for row in everything:
        kept = "to the backward" if row["keep"] else "for a block's forward"
        if row["context"]:
            shared, kept = "each sequence", "for the whole step"
        else:
            shared = ""
        cells = [row["host"], row["size"], row["shape"].replace("x", " x "), str(row["gpus"]), shared]
        cells += ["", ""] if row["gpus"] == 1 else [kept, "all" if row["context"] else str(row["together"])]
        if "error" in row:
            rows.append([*cells, "does not fit", "", "", ""])
            continue
        one = alone.get((row["host"], row["size"]))
        times = "" if one is None or row["context"] else f"{row['tokens_per_second'] / one['tokens_per_second']:.2f}"
        rows.append(
            [*cells, f"{row['ms']:.1f}", f"{row['tokens_per_second'] / 1e3:.1f}", times, f"{row['peak_gib']:.1f}"]
        )
    header = ["host", "size", "sequences x tokens", "GPUs", "they share", "gathered weights stay", "blocks a call"]
    return table([*header, "ms a step", "thousand tokens/s", "over one GPU", "memory, GiB a GPU"], rows)


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


def decoding() -> list[str]:
    """Lists the milliseconds of a token that `generate` writes."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in load("decode_h200")["rows"]:
        if "error" not in row:
            found.setdefault((row["rule"], row["batch"]), {})[row["by"]] = row
    rows = []
    for (rule, batch), by in found.items():
        ours, eager, fla = by["deltalab"], by["deltalab without graphs"], by.get("FLA")
        times = [f"{row['ms_a_token']:.2f}" if row else "" for row in (ours, eager, fla)]
        rate = f"{ours['tokens_per_second']:,.0f}"
        over = f"{fla['ms_a_token'] / ours['ms_a_token']:.1f}" if fla else ""
        rows.append([LABELS[rule], str(batch), times[0], rate, *times[1:], over])
    header = ["rule", "sequences", "ms a token", "tokens/s", "without graphs, ms", "FLA, ms", "times as fast as FLA"]
    return table(header, rows)


TABLES = (
    decoding,
    training_step,
    training_stacks,
    gpu_busy,
    whole_models,
    whole_model_kinds,
    whole_model_goals,
    sharded_models,
    trained_winner,
)
