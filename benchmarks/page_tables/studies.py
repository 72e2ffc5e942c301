"""Tables of studies of trainings: which kills they outlast, and their time beside the trainings."""

from page_tables.markdown import load, table


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


TABLES = (
    engine_kills,
    study_overhead,
)
