"""Tables of kernels: their times and memory beside peers, by shape and by length, and the host's time of a call."""

from typing import Any

from kernels import TARGETS
from page_tables.markdown import judged, load, ms, table

MAIN_SHAPE = "8,4096,16,128,128"
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


def rules_alone() -> list[str]:
    """Lists each rule of the algebra beside its recurrence alone, the dearest first."""
    by_rule: dict[str, dict[str, Any]] = {}
    for f in load("alone_h200")["alone"]["figures"]:
        by_rule.setdefault(f["rule"], {})[f["by"]] = f
    rows = []
    for rule, by in by_rule.items():
        whole, alone = by["triton"], by["recurrence"]
        ratios = [whole[passes] / alone[passes] for passes in ("forward", "both")]
        times = [ms(f[passes]) for passes in ("forward", "both") for f in (whole, alone)]
        rows.append((max(ratios), [rule, *times[:2], f"{ratios[0]:.2f}", *times[2:], f"{ratios[1]:.2f}"]))
    header = ["rule", "forward, ms", "recurrence, ms", "ratio", "with backward, ms", "recurrence, ms", "ratio"]
    return table(header, (row for _, row in sorted(rows, key=lambda pair: -pair[0])))


TABLES = (
    kernels_against_peers,
    kernels_by_rule,
    other_shapes,
    against_length,
    host_times,
    parallel_form,
    rules_alone,
)
