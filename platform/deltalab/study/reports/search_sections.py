"""Writes the findings of a search as tables and lines, for the terminal, Markdown and the dashboard's page."""

import math
from dataclasses import dataclass

from deltalab.study.answers.importance import FEWEST, NOTHING, Importance
from deltalab.study.answers.search_results import Discovery
from deltalab.study.answers.wording import format_interval
from deltalab.study.searching.candidate_names import title, titles
from deltalab.study.specs.setting_paths import model_part
from deltalab.study.specs.setting_text import setting_text, settings_text


@dataclass(frozen=True)
class Section:
    """A table with a title and notes; notes alone if it has no headers."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    notes: list[str]


def sections(discovery: Discovery, most: int | None = None) -> list[Section]:
    """Returns the findings of a search in sections. An empty section is left out.

    Args:
        discovery: The findings of the search.
        most: How many rows a table shows at most; None shows all.
    """
    parts = [
        _finalists(discovery),
        _front(discovery, most),
        _rules(discovery),
        _importances(discovery, most),
        _control(discovery),
        _left_out(discovery, most),
    ]
    return [part for part in parts if part.rows or part.notes]


def _label(discovery: Discovery, objective: str) -> str:
    """The name of an objective, without its task if there is only one task."""
    tasks = {name.partition("@")[2] for name in discovery.objectives} - {""}
    return objective.partition("@")[0] if len(tasks) < 2 else objective


def _figure(value: float) -> str:
    """A score or a cost as text; "" if it is not known.

    Examples:
        >>> _figure(0.51234), _figure(34560.0), _figure(76.0), _figure(math.nan)
        ('0.512', '34,560', '76', '')
    """
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or (abs(value) > 1 and value.is_integer()) else f"{value:.3f}"


def _finalists(discovery: Discovery) -> Section:
    """A line for each finalist with the settings that make it."""
    lines = []
    for point in discovery.candidates:
        if point.is_arm and point.number is not None:
            # Each task has its own training, which the table of the arms shows.
            values = model_part(point.values) or point.values
            lines.append(f"{point.name}: {settings_text(values, 3) or 'as the base'}")
    return Section("What was found, where it differs from the base", [], [], lines)


def _front(discovery: Discovery, most: int | None) -> Section:
    """The base, the finalists and the front, with their scores; `most` never cuts off a finalist."""
    best = [point for point in discovery.candidates if point.on_front or point.is_arm]
    points = best[: most and max(most, sum(point.is_arm for point in best))]
    names = titles([(point.name, point.values) for point in best])
    rows = [
        [
            point.name,
            "" if point.number is None else names[point.name],
            point.drawn_by,
            *(_figure(point.scores[objective]) for objective in discovery.objectives),
            "yes" if point.on_front else "no",
        ]
        for point in points
    ]
    labels = [_label(discovery, objective) for objective in discovery.objectives]
    headers = ["candidate", "what it is", "by", *labels, "front"]
    notes = ["Scores are on validation, from the seeds of the search: optimistic. The answer is the table of the arms."]
    if any(point.number is None and point.is_arm for point in best):
        notes.append(
            "The base is tuned: it has the best of several trainings on each task, on the seeds of the arms. A "
            "candidate is a single draw of its training: that it is worse than the base says little."
        )
    if discovery.left_off:
        candidates = "candidate is" if discovery.left_off == 1 else "candidates are"
        notes.append(
            f"{discovery.left_off} {candidates} better than chance on none of the tasks: left off, however cheap."
        )
    if hidden := len(best) - len(points):
        notes.append(f"{hidden} more candidates are on the front: see --json or the dashboard.")
    counts = ", ".join(f"{count} {drawn_by}" for drawn_by, count in sorted(discovery.drawn.items()))
    total = sum(discovery.drawn.values())
    return Section(f"The front of {total} candidate{'s' * (total > 1)} ({counts})", headers, rows, notes)


def _rules(discovery: Discovery) -> Section:
    """What was tried of each rule; an empty section if the search has one rule."""
    rows = [
        [
            title({"rule": tried.rule}),
            str(tried.candidates),
            str(tried.random),
            *map(_figure, tried.best.values()),
            "; ".join(f"{path} {', '.join(map(setting_text, values))}" for path, values in tried.never.items()),
        ]
        for tried in discovery.rules
    ]
    if not rows:
        return Section("The rules tried", [], [], [])
    best = [f"best {_label(discovery, metric)}" for metric in discovery.rules[0].best]
    headers = ["rule", "candidates", "of these at random", *best, "never tried with"]
    fidelity = f" with {_settings(discovery)}" if discovery.fidelity else ""
    notes = [
        f"Scores are on validation{fidelity}. Each candidate is a single draw of its training, and none is tuned: a "
        "rule with few candidates, or without a setting that it needs, has not lost."
    ]
    return Section("The rules tried", headers, rows, notes)


def _importances(discovery: Discovery, most: int | None) -> Section:
    """The share of each metric's variance that each setting explains, the largest first and `NOTHING` last."""
    by_metric = {
        metric: {setting.path: setting for setting in importances}
        for metric, importances in discovery.importances.items()
        if importances
    }
    largest: dict[str, float] = {}
    for by_path in by_metric.values():
        for path, setting in by_path.items():
            largest[path] = max(largest.get(path, 0.0), setting.share)
    paths = sorted(largest, key=lambda path: (path == NOTHING, -largest[path]))
    shown = paths if most is None or len(paths) <= most else [*paths[: most - 1], paths[-1]]
    everyone = max((setting.among for by_path in by_metric.values() for setting in by_path.values()), default=0)
    rows = []
    for path in shown:
        settings = [by_path.get(path) for by_path in by_metric.values()]
        among = next(setting.among for setting in settings if setting)
        name = path if among == everyone else f"{path} (of {among})"
        rows.append([name, *map(_share, settings)])
    return Section(
        "What mattered",
        ["setting", *(_label(discovery, metric) for metric in by_metric)],
        rows,
        _importance_notes(discovery, list(by_metric)),
    )


def _importance_notes(discovery: Discovery, metrics: list[str]) -> list[str]:
    """Notes on how to read importances, on settings without one, and on metrics whose shares say little."""
    notes = []
    count = sum(discovery.drawn.values())
    if metrics:
        if discovery.fidelity:
            notes.append(f"Of the scores with {_settings(discovery)}, which all candidates have.")
        notes.append(
            "Share of the variance of a score over the space that a setting explains alone (fANOVA), with the middle "
            f"95% of the trees of its forest, each of a resample of the candidates. {NOTHING} is a setting drawn at "
            "random and never used. Of a setting that only some candidates have, it is the share among these."
        )
        notes += [
            f"{_label(discovery, metric)}: {learned} of {count} candidates are past half way from chance to the best "
            "of them; its shares say little beyond what sets these apart."
            for metric, learned in discovery.learned.items()
            if metric in metrics and learned < count / 4
        ]
    if discovery.importances and count < FEWEST:
        notes.append(f"Fewer than {FEWEST} candidates have trained: too few to say.")
    elif discovery.unknown and discovery.importances:
        notes.append(
            f"Fewer than {FEWEST} candidates have {', '.join(discovery.unknown)}: too few to say what it explains."
        )
    return notes


def _share(setting: Importance | None) -> str:
    """A share with its interval; "" if it is not known."""
    return "" if setting is None else f"{setting.share:.2f} [{setting.low:.2f}, {setting.high:.2f}]"


def _control(discovery: Discovery) -> Section:
    """The hypervolume of the search beside that of random search; an empty section if there is no control."""
    title, control = "Beside random search", discovery.control
    if control is None:
        return Section(title, [], [], [])
    fidelity = f", trained with {_settings(discovery)}" if discovery.fidelity else ""
    notes = [
        f"Hypervolume of {control.n} candidate{'s' * (control.n > 1)}{fidelity}: search {control.searched:.3f}, "
        f"random search {control.random:.3f}, difference {format_interval(control.difference, '+')}.",
        f"All {control.of} candidates but those of random search have {control.all_searched:.3f}.",
    ]
    return Section(title, [], [], notes)


def _settings(discovery: Discovery) -> str:
    """The settings of the lowest fidelity, as text."""
    return ", ".join(f"{path} {value}" for path, value in discovery.fidelity.items())


def _left_out(discovery: Discovery, most: int | None) -> Section:
    """Lists the candidates that successive halving dropped, and the reasons why infeasible candidates make no model."""
    lines = [*discovery.dropped]
    for reason in discovery.infeasible[:most]:
        candidates = (
            "1 candidate is infeasible" if reason.count == 1 else f"{reason.count} candidates are infeasible, such as"
        )
        lines.append(f"{candidates}: {reason.reason}")
    if hidden := len(discovery.infeasible) - len(discovery.infeasible[:most]):
        lines.append(f"{hidden} more reasons: see --json or the dashboard.")
    return Section("Left out", [], [], lines)
