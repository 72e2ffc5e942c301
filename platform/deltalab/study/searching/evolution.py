"""Proposes candidates by mutation and crossover of those on the front: the proposer that comes with deltalab.

A genome is the list of a candidate's knobs: in a study that searches the algebra of update rules, those of its
equation. It is asked as any other proposer is, and shows what a proposer of one's own may look like.

References:
    Thomas et al. 2024 (STAR, arXiv:2411.17800): evolution of genomes of layers.
"""

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from deltalab.study.searching.mixed_draws import SECOND, another_value
from deltalab.study.specs.sections.budget import Searching
from deltalab.study.specs.sections.search_space import Search

CROSSED = 0.5
"""The share of the children that have two parents."""
TRIES = 20
"""How often a child that was tried before is bred anew."""


def propose(request: Mapping[str, Any]) -> dict[str, Any]:
    """Breeds points of the space from those on the front.

    Args:
        request: What `proposers` asks with: `space`, `front`, `tried`, `wanted` and `seed` are used.

    Returns:
        The proposals; none without a front.
    """
    space = Searching.model_validate({**request["space"], "trials": 2, "finalists": 1})
    genomes = [space.drawn(candidate["values"]) for candidate in request["front"]]
    parents = [genome for genome in genomes if genome is not None]
    seen, draw = {*map(_text, request["tried"])}, Random(request["seed"])
    children: list[dict[str, Any]] = []
    for _ in range(request["wanted"] if parents else 0):
        for _ in range(TRIES):
            child = _child(space, parents, draw)
            if _text(child) not in seen:
                break
        seen.add(_text(child))
        children.append({"values": child})
    return {"proposals": children}


def _child(space: Searching, parents: list[dict[str, Any]], draw: Random) -> dict[str, Any]:
    """A child that has each knob of one of two parents, or of one parent, and differs from both in a knob or two."""
    mother = draw.choice(parents)
    father = draw.choice(parents) if draw.random() < CROSSED else mother
    count = 1 + (draw.random() < SECOND) if father is mother else draw.randint(0, 1)
    mutated = draw.sample([*mother], min(count, len(mother)))

    def ask(name: str, knob: Search) -> Any:
        first, second = (mother, father) if draw.random() < 0.5 else (father, mother)
        inherited = first.get(name, second.get(name))
        known = (name in mother or name in father) and knob.holds(inherited)
        return inherited if known and name not in mutated else another_value(knob, inherited if known else None, draw)

    return space.draw(ask)


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)
