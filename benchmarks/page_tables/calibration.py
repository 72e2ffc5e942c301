"""Tables of the calibration: what the statistics get wrong in simulated studies, and what they find."""

from typing import Any

from page_tables.markdown import judged, load, table

WAYS_TO_CHOOSE = (
    "its own best run; flips of differences",
    "its runs, weighed by the other seeds; flips of differences",
    "its runs, weighed by the other seeds; exchange of whole seeds",
)


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


def calibration_of_designs() -> list[str]:
    """Lists error, coverage and power of the designs of tuning."""
    rows: dict[str, list[str]] = {}
    designs = load("calibration")["designs"]
    for row in designs:
        cells = rows.setdefault(row["design"], [str(row["runs_per_arm"])])
        cells.append(f"{row['error']:.3f} / {row['coverage']:.3f} / {row['power']:.2f}")
    noises = [f"noise of {noise} sd" for noise in dict.fromkeys(row["noise"] for row in designs)]
    return table(["error / coverage / power", "runs an arm", *noises], ([name, *cells] for name, cells in rows.items()))


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


def effects(row: dict[str, Any]) -> str:
    """Returns the effects of a row as text."""
    if not row["effects"]:
        return "no effect"
    return f"{row['effects']} arm{'s' if row['effects'] > 1 else ''} off by {row['size']:g} sd"


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


def over_tasks_cell(row: dict[str, Any]) -> str:
    """What a figure on means over tasks is of."""
    return f"{row['scores']}, {row['tasks']} tasks, {row['seeds']} seeds"


def calibration_of_power_over_tasks() -> list[str]:
    """Lists how often an arm is told from the base over tasks, and on at least one task."""
    keys = ("mean", "iqm", "some_task")
    rows = [
        [row["scores"], f"{row['tasks']}, {row['seeds']}"]
        + [" / ".join(f"{row[f'{arm}_{key}']:.2f}" for key in keys) for arm in ("all", "one")]
        for row in load("calibration")["over_tasks_power"]
    ]
    return table(["mean / IQM / some task", "tasks, seeds", "better on all tasks", "worse on one task"], rows)


def calibration_of_margins() -> list[str]:
    """Lists what verdicts by a margin get wrong where arms differ by the margin, and what they find elsewhere."""
    rows = []
    for row in load("calibration")["margins"]:
        wrong = [f"{row[key]:.3f}" for key in ("equal_up", "equal_turns", "beyond")]
        found = [f"{row[key]:.2f}" for key in ("equal", "different")]
        rows.append([str(row["arms"]), str(row["seeds"]), "3" if row["tuned"] else "1", *wrong, *found])
    wrong = "by the margin, all up: some equal", "in turns: some equal", "all up: some beyond"
    return table(["arms", "seeds", "candidates", *wrong, "alike: equal", "3 sd off: beyond"], rows)


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


TABLES = (
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
)
