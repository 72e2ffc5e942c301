"""The hybrid whose attention is placed: a study's base, if its layers leave a choice."""

import re

from deltalab.errors import InputError
from deltalab.models.settings.layer_list import ATTENTION
from deltalab.models.spec import ModelSpec
from deltalab.study.planning.plan import Plan
from deltalab.training.spec import TrainSpec


def hybrid_of(plan: Plan) -> tuple[ModelSpec, TrainSpec]:
    """Returns the base's model and training.

    Raises:
        InputError: There is no placement to choose, or the study has what a supernet cannot train.
    """
    where, spec = plan.study_file, plan.spec
    for key, why in (
        ("search", "the supernet searches"),
        ("scales", "placements are confirmed at one size"),
        ("engine", "deltalab's own training trains the supernet"),
    ):
        if getattr(spec, key) is not None:
            raise InputError(f"{where}: {key}: {why}: leave it out", key=key)
    if len(plan.tasks) > 1:
        raise InputError(
            f"{where}: task: attention is placed for one task, not {len(plan.tasks)}: keep one", key="task"
        )
    for arm in spec.arms:
        if re.fullmatch(r"rank_\d+", arm):
            raise InputError(f"{where}: arms.{arm}: placements have such names: take another one", key=arm)
    model, train = plan.job(plan.arms[0], "confirm", 0, {}).specs
    for path in ("model.layers", "model.attention", "model.block"):
        if spec.tune is not None and path in spec.tune.searched:
            raise InputError(f"{where}: tune: {path} changes what a placement is: leave it out", key=path)
    if not isinstance(model.layers, int):
        raise InputError(
            f"{where}: base: model.layers lists its layers: give their number, and the attention layers in "
            "model.attention, such as [3, 7]",
            key="model.layers",
        )
    if model.make_rule().name == ATTENTION:
        raise InputError(f"{where}: base: rule: all layers are attention: take another rule", key="rule")
    if model.depth < 2:
        raise InputError(
            f"{where}: base: model.layers: one layer leaves no choice: give at least 2", key="model.layers"
        )
    count = sum(map(model.is_attention, range(model.depth)))
    if not 0 < count < model.depth:
        raise InputError(
            f"{where}: base: model.attention names {count} of {model.depth} layers: name those that shall be "
            f"attention, from 1 to {model.depth - 1} of them",
            key="model.attention",
        )
    if model.beside is not None:
        raise InputError(f"{where}: base: model.beside: a layer has one mixer: leave it out", key="model.beside")
    if train.seconds is not None:
        raise InputError(
            f"{where}: base: train.seconds: a supernet trains for steps: leave it out", key="train.seconds"
        )
    return model, train
