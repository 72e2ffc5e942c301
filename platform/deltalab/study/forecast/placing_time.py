"""Forecasts what `deltalab place` takes with a study: its supernet, the scores of placements, and their trainings."""

from dataclasses import dataclass

from deltalab.errors import InputError
from deltalab.store.studies.driver_status import duration
from deltalab.study.forecast.step_time import Training, evaluated
from deltalab.study.placing.hybrid import hybrid_of
from deltalab.study.placing.placements import BEST, SPREAD, most_scored
from deltalab.study.planning.plan import Plan


@dataclass(frozen=True)
class PlacingTime:
    """What `deltalab place` takes if it is given no options.

    Attributes:
        scored: How many placements the supernet scores at most.
        trained: How many of them train from scratch at most, beside the arms of the study.
        supernet: The seconds in which the supernet trains.
        scoring: The seconds in which it scores placements.
        seconds: The time of all, the study's own arms among them. Each figure of time is None if no time is known.
    """

    scored: int
    trained: int
    supernet: float | None
    scoring: float | None
    seconds: float | None

    def __str__(self) -> str:
        masks = f"scores {self.scored} placements"
        trained = f"of which {self.trained} train beside these arms"
        if self.supernet is None or self.scoring is None or self.seconds is None:
            return f"deltalab place: one supernet {masks}, {trained}, for a time that is unknown."
        return (
            f"deltalab place: one supernet trains for about {duration(self.supernet)} and {masks} in "
            f"{duration(self.scoring)}, {trained}: about {duration(self.seconds)} in all."
        )


def placing_time(
    plan: Plan, training: Training, step: float | None, *, runs: float | None, study: float | None, workers: int
) -> PlacingTime | None:
    """Forecasts what `deltalab place` takes with a study; None if the study has no attention to place.

    A placement's training takes as long as the base's, which has as many layers of attention. So does a step of the
    supernet, in which one mixer of each layer computes, and a batch of an evaluation counts as in a training.

    Args:
        plan: The study.
        training: The training of the base.
        step: The seconds of the base's step; None if they are not known.
        runs: The seconds of all runs of the base, one after another; None if they are not known.
        study: The seconds of the study without further arms; None if they are not known.
        workers: How many stacks run at a time.
    """
    try:
        model, train = hybrid_of(plan)
    except InputError:
        return None
    scored = most_scored(model.depth, sum(map(model.is_attention, range(model.depth))))
    trained = min(BEST + SPREAD, scored - 1)
    if step is None or runs is None or study is None:
        return PlacingTime(scored, trained, None, None, None)
    supernet, scoring = step * train.steps, scored * step * evaluated(training, "validation")
    return PlacingTime(scored, trained, supernet, scoring, study + trained * runs / workers + supernet + scoring)
