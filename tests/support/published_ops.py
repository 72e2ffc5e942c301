"""Libraries with the names of flash-linear-attention and FlashQLA, which compute by our recurrence and need no GPU."""

import importlib.util
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from deltalab.ops.peers import scans
from deltalab.ops.reference import recurrent
from deltalab.rule import Operands
from deltalab.structure import ADDITIVE, DECAY, DIAGONAL, HOUSEHOLDER, IPLR, Transition

OPS: dict[str, tuple[Transition, Callable[..., Operands]]] = {
    "linear_attn": (ADDITIVE, lambda q, k, v: Operands(q, k, v)),
    "simple_gla": (DECAY, lambda q, k, v, g: Operands(q, k, v, g=g)),
    "gla": (DIAGONAL, lambda q, k, v, g: Operands(q, k, v, g=g)),
    "delta_rule": (HOUSEHOLDER, lambda q, k, v, beta: Operands(q, k, v, e=beta, beta=beta)),
    "gated_delta_rule": (IPLR, lambda q, k, v, g, beta: Operands(q, k, v, g=g, e=beta, beta=beta)),
    "comba": (
        Transition(name="comba", decay="scalar", low_rank="free"),
        lambda q, k, v, p, g, beta: Operands(q, k, v, g=g, a=-beta[..., None] * k, b=p, beta=beta),
    ),
    "kda": (
        Transition(name="kda", decay="diagonal", low_rank="tied", reads="decayed_state"),
        lambda q, k, v, g, beta: Operands(q, k, v, g=g, e=beta, beta=beta),
    ),
    "dplr_delta_rule": (
        Transition(name="dplr", decay="diagonal", low_rank="free"),
        lambda q, k, v, a, b, gk: Operands(q, k, v, g=gk, a=b, b=a),
    ),
}
"""The function that each op of FLA computes, according to its naive version; Comba's according to its kernel."""


def _op(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def run(
        *,
        scale: float,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        normalize: bool = False,
        **given: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        assert not normalize, "the op would divide by a sum of keys, which no rule of the algebra does"
        if "gk" in given and name == "gla":
            given["g"] = given.pop("gk")
        transition, operands = OPS[name]
        bounds = [0, given["q"].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        outputs, states = [], []
        for i, (start, stop) in enumerate(pairwise(bounds)):
            rows = slice(None) if cu_seqlens is None else slice(i, i + 1)
            before = None if initial_state is None else (initial_state[rows],)
            part = {key: value[:, start:stop] for key, value in given.items()}
            o, (last,) = recurrent(transition, operands(**part), scale=scale, state=before)
            outputs.append(o.to(given["q"].dtype))
            states.append(last)
        return torch.cat(outputs, dim=1), torch.cat(states) if output_final_state else None

    return run


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the libraries in place, and lets their back ends run on a CPU."""
    for name in OPS:
        module: Any = ModuleType(name)
        setattr(module, f"chunk_{name}", _op(name))
        setattr(module, f"fused_recurrent_{name}", _op(name))
        file = "generalized_delta_rule" if name == "dplr_delta_rule" else name
        monkeypatch.setitem(sys.modules, f"fla.ops.{file}", module)
    flash: Any = ModuleType("flash_qla")
    flash.chunk_gated_delta_rule = _op("gated_delta_rule")
    for name, package in (("fla", ModuleType("fla")), ("fla.ops", ModuleType("fla.ops")), ("flash_qla", flash)):
        package.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(scans, "lacks", lambda name, *, where: None)
    monkeypatch.setattr(scans, "DEVICE", "cpu")
