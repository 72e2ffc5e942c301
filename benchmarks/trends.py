"""Asks of published claims whether they hold at four widths, and whether three widths foretell the fourth.

    python benchmarks/trends.py --out benchmarks/trends_h100.json --page docs/transfer.md

Reads the score of every seed from `benchmarks/order_h100.json`, which `benchmarks/order.py` wrote from the study
`transfer:gpu`. A claim compares two of its arms on a task. `ladder_trends` gives the differences, the slopes over
log10 of the compute, the verdict, and the difference at the largest width by fits to the other widths. The claims of a
task are one family: their intervals hold jointly. A seed chose its learning rate by itself, on validation, so that its
scores are pairs. No claim has Mamba2: when the study ran, its q and k had a norm that its authors' do not have.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from order import put

from deltalab.models.costs import CostCounter
from deltalab.statistics.joint_test import Difference, compare
from deltalab.statistics.pairs import Pairs
from deltalab.study.answers.ladder_trends import Prediction, predict, slopes, verdict
from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study

HERE = Path(__file__).parent
REGION = re.compile(r"(<!-- trends -->\n).*?(<!-- end of trends -->)", flags=re.DOTALL)
BASE = "base"  # Gated DeltaNet


@dataclass(frozen=True)
class Claim:
    """A claim that one arm is better than another one on a task."""

    says: str
    task: str
    arm: str
    against: str


CLAIMS = (
    Claim("Gated DeltaNet is better than DeltaNet", "real_text", BASE, "deltanet"),
    Claim("Comba is better than Gated DeltaNet", "real_text", "comba", BASE),
    Claim("KDA is better than Gated DeltaNet", "real_text", "kda", BASE),
    Claim("GLA is better than RetNet", "real_text", "gla", "retnet"),
    Claim("RetNet is better than linear attention", "real_text", "retnet", "linear_attention"),
    Claim("DeltaNet is better than linear attention", "real_text", "deltanet", "linear_attention"),
    Claim("Gated DeltaNet is better than attention without positions", "real_text", BASE, "attention"),
    Claim("Gated DeltaNet is better than DeltaNet", "mad_selective_copy", BASE, "deltanet"),
    Claim("DeltaNet is better than linear attention", "mad_selective_copy", "deltanet", "linear_attention"),
    Claim("DeltaNet is better than linear attention", "mqar", "deltanet", "linear_attention"),
)


@dataclass(frozen=True)
class Trend:
    """A claim at all sizes.

    Attributes:
        claim: The claim.
        sizes: The labels of the task at each size, the smallest first.
        differences: Arm minus the other one at each size. More is better.
        slope: The change of the difference per tenfold compute.
        verdict: The word that `ladder_trends.verdict` has for these.
        prediction: The difference at the largest size; None if the scores are no losses.
    """

    claim: Claim
    sizes: list[str]
    differences: list[Difference]
    slope: Difference
    verdict: str
    prediction: Prediction | None


def computes(study: str, profile: str) -> dict[tuple[str, str], float]:
    """The operations per token in 512 tokens of every arm at every size, by the label of the task and the arm's name.

    512 is the length of real text; on shorter tasks, attention alone takes less.
    """
    plan, counter = make_plan(load_study(study, profile=profile), profile=profile), CostCounter()
    jobs = [plan.job(arm, "confirm", 0, {}) for arm in plan.arms]
    return {(job.task, job.arm): counter.costs(job.specs[0], 512).flops_per_token for job in jobs}


def trends(
    scores: Mapping[str, Mapping[str, Sequence[float]]], compute: Mapping[tuple[str, str], float]
) -> list[Trend]:
    """Every claim at all sizes.

    Args:
        scores: The scores of the seeds, by the label of a task at a size and by arm. Higher is better. Those of text
            are losses with a minus sign.
        compute: The compute by label and arm, in any unit that is the same at all sizes of a task.
    """
    results = []
    for task in dict.fromkeys(claim.task for claim in CLAIMS):
        claims = [claim for claim in CLAIMS if claim.task == task]
        labels = sorted(
            (label for label in scores if label.partition(".")[0] == task), key=lambda at: compute[at, BASE]
        )
        apart = {
            (claim, at): np.subtract(scores[at][claim.arm], scores[at][claim.against])
            for claim in claims
            for at in labels
        }
        differences = dict(zip(apart, compare([*apart.values()]), strict=True))
        x = [compute[at, BASE] for at in labels]
        tested = compare([slopes([Pairs.plain(apart[claim, at]) for at in labels], x) for claim in claims])
        for claim, slope in zip(claims, tested, strict=True):
            at_sizes = [differences[claim, at] for at in labels]
            foretold = None
            if task == "real_text":
                both = (claim.arm, claim.against)
                by_arm = [[compute[at, arm] / x[0] for at in labels] for arm in both]
                losses = [[np.negative(scores[at][arm]) for at in labels] for arm in both]
                (foretold,) = predict(labels, by_arm, losses, 1)
            results.append(Trend(claim, labels, at_sizes, slope, verdict(at_sizes, slope), foretold))
    return results


def markdown(results: Sequence[Trend]) -> str:
    """The tables of all tasks."""
    lines = []
    for task in dict.fromkeys(trend.claim.task for trend in results):
        of_task = [trend for trend in results if trend.claim.task == task]
        widths = [label.rpartition("=")[2] for label in of_task[0].sizes]
        last = "foretold at 256" if of_task[0].prediction else None
        heads = ["claim", *(f"width {width}" for width in widths), "per tenfold compute", "verdict"]
        heads += [last] if last else []
        lines += [f"`{task}`:", "", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
        for trend in of_task:
            cells = [trend.claim.says, *map(_shown, trend.differences), _shown(trend.slope), trend.verdict]
            if trend.prediction:
                foretold = trend.prediction.predicted
                # A difference in loss; the table has its negative.
                agrees = "agrees" if trend.prediction.agrees else "missed"
                cells.append(f"{-foretold.mean:+.3f} [{-foretold.high:+.3f}, {-foretold.low:+.3f}], {agrees}")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _shown(difference: Difference) -> str:
    mark = "**" if difference.decided else ""
    return f"{mark}{difference.mean:+.3f}{mark} [{difference.low:+.3f}, {difference.high:+.3f}]"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, default=HERE / "order_h100.json", help="what order.py --out wrote")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument(
        "--page", type=Path, help="a page, whose tables between <!-- trends --> and its end are made anew"
    )
    options = parser.parse_args(arguments)
    record = json.loads(options.recorded.read_text())
    study, _, profile = record["study"].partition(":")
    results = trends(record["scores"], computes(study, profile))
    text = markdown(results)
    if options.out:
        made: list[dict[str, Any]] = [asdict(result) for result in results]
        options.out.write_text(json.dumps({"study": record["study"], "trends": made}) + "\n")
    if options.page:
        put(options.page, REGION, text)
    print(text, end="")


if __name__ == "__main__":
    main()
