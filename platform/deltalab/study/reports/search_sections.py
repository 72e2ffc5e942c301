"""Writes what a search found as tables and lines, which the terminal, Markdown and the dashboard's page share."""

import math
from dataclasses import dataclass, replace

from deltalab.study.answers.answer import format_interval, format_values
from deltalab.study.answers.importance import FEWEST, NOTHING, Importance
from deltalab.study.answers.search_results import Discovery, Point
from deltalab.study.reports.candidate_names import titles


@dataclass(frozen=True)
class Section:
    """A table with a title and notes; without headers, notes alone."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    notes: list[str]


def sections(found: Discovery, most: int | None = None) -> list[Section]:
    """What a search found. most: rows of a table; None shows all."""
    parts = [_finalists(found), _front(found, most), _importances(found, most), _control(found), _left_out(found, most)]
    return [part for part in parts if part.rows or part.notes]


def label(found: Discovery, objective: str) -> str:
    """An objective's name, without its task where there is but one."""
    tasks = {name.partition("@")[2] for name in found.objectives} - {""}
    return objective.partition("@")[0] if len(tasks) < 2 else objective


def figure(value: float) -> str:
    """A score or a cost as text; "" where it is not known.

    >>> figure(0.51234), figure(34560.0), figure(76.0), figure(math.nan)
    ('0.512', '34,560', '76', '')
    """
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or (abs(value) > 1 and value.is_integer()) else f"{value:.3f}"


def about(point: Point) -> str:
    """What a candidate is: the values that differ from the base's."""
    return format_values(point.values) or "as the base"


def _finalists(found: Discovery) -> Section:
    lines = []
    for point in found.candidates:
        if point.is_arm and point.number is not None:
            # Each task has its own training, which the table of the arms shows.
            model = {path: value for path, value in point.values.items() if not path.startswith("train.")}
            lines.append(f"{point.name}: {about(replace(point, values=model) if model else point)}")
    return Section("What was found, where it differs from the base", [], [], lines)


def _front(found: Discovery, most: int | None) -> Section:
    best = [point for point in found.candidates if point.on_front or point.is_arm]
    points = best[: most and max(most, sum(point.is_arm for point in best))]
    what = titles([(point.name, point.values) for point in best])
    rows = [
        [
            point.name,
            "" if point.number is None else what[point.name],
            point.drawn_by,
            *(figure(point.scores[name]) for name in found.objectives),
            "yes" if point.on_front else "no",
        ]
        for point in points
    ]
    headers = ["candidate", "what it is", "by", *(label(found, name) for name in found.objectives), "front"]
    notes = ["Scores are on validation, from the seeds of the search: optimistic. The answer is the table of the arms."]
    if any(point.number is None and point.is_arm for point in best):
        notes.append(
            "The base has the training that is best on each task, and the seeds of the arms; a candidate has the one "
            "that it was drawn with."
        )
    if found.left_off:
        are = "candidate is" if found.left_off == 1 else "candidates are"
        notes.append(f"{found.left_off} {are} better than chance on none of the tasks: left off, however cheap.")
    if hidden := len(best) - len(points):
        notes.append(f"{hidden} more candidates are on the front: see --json or the dashboard.")
    drawn = ", ".join(f"{count} {name}" for name, count in sorted(found.drawn.items()))
    count = sum(found.drawn.values())
    return Section(f"The front of {count} candidate{'s' * (count > 1)} ({drawn})", headers, rows, notes)


def _importances(found: Discovery, most: int | None) -> Section:
    by_metric = {metric: {each.path: each for each in told} for metric, told in found.importances.items() if told}
    rank: dict[str, float] = {}
    for told in by_metric.values():
        for path, each in told.items():
            rank[path] = max(rank.get(path, 0.0), each.share)
    paths = sorted(rank, key=lambda path: (path == NOTHING, -rank[path]))
    shown = paths if most is None or len(paths) <= most else [*paths[: most - 1], paths[-1]]
    everyone = max((each.among for told in by_metric.values() for each in told.values()), default=0)
    rows = []
    for path in shown:
        own = [told.get(path) for told in by_metric.values()]
        among = next(each.among for each in own if each)
        name = path if among == everyone else f"{path} (of {among})"
        rows.append([name, *(_share(each) for each in own)])
    notes = []
    if rows:
        notes += [f"Of the scores with {_settings(found)}, which all candidates have."] if found.fidelity else []
        notes += [
            "Share of the variance of a score over the space that a setting explains alone (fANOVA), with the middle "
            f"95% of the trees of its forest, each of a resample of the candidates. {NOTHING} is a setting drawn at "
            "random and never used. Of a setting that only some candidates have, it is the share among these."
        ]
        count = sum(found.drawn.values())
        notes += [
            f"{label(found, metric)}: {learned} of {count} candidates are past half way from chance to the best of "
            "them; its shares say little beyond what sets these apart."
            for metric, learned in found.learned.items()
            if metric in by_metric and learned < count / 4
        ]
    if found.importances and sum(found.drawn.values()) < FEWEST:
        notes.append(f"Fewer than {FEWEST} candidates have trained: too few to say.")
    elif found.unknown and found.importances:
        notes.append(
            f"Fewer than {FEWEST} candidates have {', '.join(found.unknown)}: too few to say what it explains."
        )
    return Section("What mattered", ["setting", *(label(found, name) for name in by_metric)], rows, notes)


def _share(each: Importance | None) -> str:
    return "" if each is None else f"{each.share:.2f} [{each.low:.2f}, {each.high:.2f}]"


def _control(found: Discovery) -> Section:
    title, control = "Beside random search", found.control
    if control is None:
        return Section(title, [], [], [])
    where = f", trained with {_settings(found)}" if found.fidelity else ""
    notes = [
        f"Hypervolume of {control.n} candidate{'s' * (control.n > 1)}{where}: search {control.searched:.3f}, "
        f"random search {control.random:.3f}, difference {format_interval(control.difference, '+')}.",
        f"All {control.of} candidates but those of random search have {control.all_searched:.3f}.",
    ]
    return Section(title, [], [], notes)


def _settings(found: Discovery) -> str:
    return ", ".join(f"{path} {value}" for path, value in found.fidelity.items())


def _left_out(found: Discovery, most: int | None) -> Section:
    lines = [*found.dropped]
    for reason in found.infeasible[:most]:
        what = (
            "1 candidate is infeasible" if reason.count == 1 else f"{reason.count} candidates are infeasible, such as"
        )
        lines.append(f"{what}: {reason.reason}")
    if hidden := len(found.infeasible) - len(found.infeasible[:most]):
        lines.append(f"{hidden} more reasons: see --json or the dashboard.")
    return Section("Left out", [], [], lines)
