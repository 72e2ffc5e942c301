"""What others have published for the same structures, to be timed beside ours: each op as its library wants it called.

An op is found by what a rule's update is, not by its name, so that a stranger's rule has its peers too.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.authoring.inputs import Inputs
from deltalab.errors import InputError, unknown
from deltalab.ops.scan import operands
from deltalab.rule import Operands, UpdateRule

PACKAGES = {"fla": "flash-linear-attention", "flash_qla": "flash-qla", "sdpa": "torch"}
"""Peers and what is installed for them. `fla` takes FlashQLA by itself where that is installed and fits."""


@dataclass(frozen=True)
class Call:
    """A function and the tensors that it is differentiated in; its result is o, or begins with it."""

    function: Callable[..., Any]
    tensors: dict[str, Tensor]

    def forward(self) -> Tensor:
        """o, without gradients."""
        with torch.no_grad():
            return self._o(self.tensors)

    def backward(self) -> Callable[[], list[Tensor]]:
        """A call that gives the gradients of all tensors, for a gradient of o that is drawn in the first one."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.tensors.items()}
        upstream: list[Tensor] = []

        def run() -> list[Tensor]:
            o = self._o(leaves)
            if not upstream:
                upstream.append(torch.randn_like(o))
            return list(
                torch.autograd.grad(o, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)
            )

        return run

    def _o(self, tensors: dict[str, Tensor]) -> Tensor:
        found = self.function(**tensors)
        o: Tensor = found[0] if isinstance(found, tuple) else found
        return o

    def fresh(self) -> "Call":
        """The same call on copies."""
        return Call(self.function, {name: tensor.clone() for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class Contestant:
    """sequence: the call over a whole sequence. token: over one more, with a state; None where there is none.

    same: whether the function is the rule's, so that outputs may be compared.
    """

    name: str
    sequence: Call
    token: Call | None = None
    same: bool = True


def installed(name: str) -> None:
    """Raises `InputError` for a peer that is unknown, or not installed, or needs a GPU where there is none."""
    if name not in PACKAGES:
        raise unknown("peer", name, PACKAGES, where="--against")
    if name == "sdpa":
        return
    if importlib.util.find_spec(name) is None:
        raise InputError(f"--against {name}: not installed; pip install {PACKAGES[name]}")
    if not torch.cuda.is_available():
        raise InputError(f"--against {name}: needs a GPU")


def peer(name: str, rule: UpdateRule, x: Inputs, now: Inputs) -> Contestant:
    """A peer of a rule, for its inputs x and for those of one more token, `now`, with a state.

    Raises `InputError` where the peer is not `installed`, or has no op for the rule.
    """
    installed(name)
    if name == "sdpa":
        return _sdpa(x)
    return _flash_qla(rule, x) if name == "flash_qla" else _fla(rule, x, now)


def _sdpa(x: Inputs) -> Contestant:
    """Causal softmax attention over as many heads, by PyTorch."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    k, v = (z[:, : x.q.shape[1]] for z in (x.k, x.v))
    return Contestant("sdpa", Call(attend, {"q": x.q, "k": k, "v": v}), same=False)


def _flash_qla(rule: UpdateRule, x: Inputs) -> Contestant:
    op, given, scale = _linear(rule, x)
    if op != "gated_delta_rule":
        raise InputError(f"--against flash_qla: has no op for rule '{rule.name}', only the gated delta rule's")
    function = _imported("flash_qla", "flash_qla").chunk_gated_delta_rule
    return Contestant("flash_qla", Call(partial(function, scale=scale), given))


def _fla(rule: UpdateRule, x: Inputs, now: Inputs) -> Contestant:
    if rule.transition is None and "iterations" in rule.options():
        return _mesa(rule, x)
    op, given, scale = _linear(rule, x)
    module = _imported("fla", f"fla.ops.{_MODULES.get(op, op)}")
    more = {"scale": scale, **({"normalize": False} if op == "linear_attn" else {})}
    chunk = partial(getattr(module, f"chunk_{op}"), **more)
    recurrent = partial(getattr(module, f"fused_recurrent_{op}"), **more, output_final_state=True)
    _, next_given, _ = _linear(rule, now)
    if op == "gla":
        next_given["gk"] = next_given.pop("g")
    assert now.state is not None
    return Contestant("fla", Call(chunk, given), Call(recurrent, {**next_given, "initial_state": now.state[0]}))


_MODULES = {"dplr_delta_rule": "generalized_delta_rule"}


def _imported(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        said = " ".join(str(error).split())
        raise InputError(f"--against {name}: does not import: {type(error).__name__}: {said}") from error


def _linear(rule: UpdateRule, x: Inputs) -> tuple[str, dict[str, Tensor], float]:
    """FLA's name for the structure of a rule, what its op takes, and the scale."""
    t = rule.transition
    refused = InputError(f"no peer has an op for the structure of rule '{rule.name}'")
    if t is None or t.steps > 1 or rule.second_state:
        raise refused
    given = operands(rule, x.q, x.k, x.v, x.gates)
    plain = given.resolved()
    scale = float(x.k.shape[-1] ** -0.5)
    tensors = {"q": plain.r.to(x.q.dtype), "k": given.k}
    if t.low_rank == "tied":
        op, strengths = _delta(rule, given)
        found = {**tensors, "v": given.u, **strengths}
    else:
        free = t.low_rank == "free"
        names = {"none": "linear_attn", "scalar": "simple_gla", "diagonal": "dplr_delta_rule" if free else "gla"}
        op = names[t.decay]
        if free and (t.decay != "diagonal" or t.reads != "state"):
            raise refused
        found = {**tensors, "v": plain.u.to(x.v.dtype)}
        if given.g is not None:
            found["gk" if free else "g"] = given.g
        if given.a is not None and given.b is not None:
            # FLA's a reads the state, and its b writes.
            found |= {"a": given.b.to(x.k.dtype), "b": given.a.to(x.k.dtype)}
    return op, {name: value.detach().contiguous() for name, value in found.items()}, scale


def _delta(rule: UpdateRule, given: Operands) -> tuple[str, dict[str, Tensor]]:
    """Of the delta rules: the op, and its strengths and decays."""
    t = rule.transition
    assert t is not None
    assert given.e is not None
    beta = torch.ones_like(given.e) if given.beta is None else given.beta
    decays = {} if given.g is None else {"g": given.g}
    if t.decay == "scalar" and t.reads == "state":
        p = (given.e / beta)[..., None] * given.k
        return "comba", {"p": p.to(given.k.dtype), **decays, "beta": beta}
    names = {("none", "state"): "delta_rule", ("scalar", "decayed_state"): "gated_delta_rule"}
    names["diagonal", "decayed_state"] = "kda"
    op = names.get((t.decay, t.reads if t.decay != "none" else "state"))
    if op is None or not torch.equal(given.e, beta):
        raise InputError(f"no peer has an op that erases and writes as rule '{rule.name}' does")
    return op, {**decays, "beta": beta}


def _mesa(rule: UpdateRule, x: Inputs) -> Contestant:
    """MesaNet: ridge regression by conjugate gradient, with as many iterations and a lambda for each channel."""
    chunk = _imported("fla", "fla.ops.mesa_net").chunk_mesa_net
    g = x.gates.get("g", x.k.new_zeros(())).expand(x.k.shape[:3]).contiguous()
    heads, key_dim = x.k.shape[2:]
    given = {
        "q": x.q,
        "k": x.k,
        "v": x.v,
        "g": g,
        "beta": torch.ones_like(g),
        "lamb": torch.ones(heads, key_dim, device=x.k.device),
    }
    iterations = rule.knobs()["iterations"]
    return Contestant("fla", Call(partial(chunk, max_CG_iteration=iterations), given), same=False)
