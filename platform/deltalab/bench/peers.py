"""Published kernels to time beside those of deltalab.

The structure that a rule declares decides which kernels compute it. So a new rule of a known structure has peers, too.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.authoring.inputs import Inputs
from deltalab.bench.flops import attention_flops
from deltalab.bench.results import Shape
from deltalab.errors import InputError, NotInstalled, unknown
from deltalab.ops.scan import operands
from deltalab.rule import Operands, UpdateRule


@dataclass(frozen=True)
class Call:
    """A call to time: a function and its tensors. Gradients are taken with respect to all of the tensors.

    Attributes:
        function: Returns o, or a tuple that begins with o.
        tensors: The arguments of `function` by name.
    """

    function: Callable[..., Any]
    tensors: dict[str, Tensor]

    def forward(self) -> Tensor:
        """Returns o, without gradients."""
        with torch.no_grad():
            return self._o(self.tensors)

    def backward(self) -> Callable[[], list[Tensor]]:
        """Returns a function that runs forward and backward and returns the gradients of all tensors.

        The first call of that function draws the gradient of o, which later calls use again.
        """
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
        """Calls the function on `tensors` and returns o."""
        result = self.function(**tensors)
        o: Tensor = result[0] if isinstance(result, tuple) else result
        return o

    def fresh(self) -> "Call":
        """Returns the same call on copies of the tensors."""
        return Call(self.function, {name: tensor.clone() for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class Contestant:
    """One implementation to time.

    Attributes:
        name: The name that the results show.
        sequence: Its call on a whole sequence.
        token: Its call on one more token with a state; None if it has no such call.
        same: Whether it computes the rule's function, so that outputs can be compared.
        flops: The operations of its forward call; None if they are those of the rule's chunked algorithm.
    """

    name: str
    sequence: Call
    token: Call | None = None
    same: bool = True
    flops: float | None = None


Peer: TypeAlias = Callable[[UpdateRule, Inputs, Inputs], Contestant]
"""Makes the contestant for a rule, its inputs over a sequence, and its inputs for one more token with a state."""


@dataclass(frozen=True)
class Op:
    """A function of flash-linear-attention: `chunk_NAME` over sequences and `fused_recurrent_NAME` for tokens.

    Attributes:
        name: The text that stands for NAME in these function names.
        takes: Returns the arguments of the op besides q and k, from the operands of a rule.
        module: The module of the op; empty if the module has the name of the op.
        one_strength: Whether the op writes with the same strength with which it erases.
        options: Further arguments of the op.
        for_tokens: Maps names of arguments to their names in `fused_recurrent_NAME`, where the two differ.
    """

    name: str
    takes: Callable[[Operands], dict[str, Tensor | None]]
    module: str = ""
    one_strength: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    for_tokens: Mapping[str, str] = field(default_factory=dict)


def _beta(x: Operands) -> Tensor:
    """Returns the strength of writes."""
    assert x.e is not None
    return torch.ones_like(x.e) if x.beta is None else x.beta


def _write(x: Operands) -> dict[str, Tensor | None]:
    """Returns the values that are written."""
    return {"v": x.resolved().u}


def _decay(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op with a decay."""
    return {**_write(x), "g": x.g}


def _delta(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op of the delta rule."""
    return {"v": x.u, "beta": _beta(x)}


def _gated_delta(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op of the gated delta rule."""
    return {**_delta(x), "g": x.g}


def _feedback(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op that erases with a strength of its own."""
    assert x.e is not None
    return {**_gated_delta(x), "p": (x.e / _beta(x))[..., None] * x.k}


def _free(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op with a free low rank."""
    # In the op, a reads the state and b is written. In deltalab, b reads the state and a is written.
    return {**_write(x), "gk": x.g, "a": x.b, "b": x.a}


OPS: dict[tuple[str, str, str], Op] = {
    ("none", "none", "state"): Op("linear_attn", _write, options={"normalize": False}),
    ("scalar", "none", "state"): Op("simple_gla", _decay),
    ("diagonal", "none", "state"): Op("gla", _decay, for_tokens={"g": "gk"}),
    ("none", "tied", "state"): Op("delta_rule", _delta, one_strength=True),
    ("scalar", "tied", "decayed_state"): Op("gated_delta_rule", _gated_delta, one_strength=True),
    ("diagonal", "tied", "decayed_state"): Op("kda", _gated_delta, one_strength=True),
    ("scalar", "tied", "state"): Op("comba", _feedback),
    ("diagonal", "free", "state"): Op("dplr_delta_rule", _free, module="generalized_delta_rule"),
}
"""Maps each structure to the op that computes it: the decay, the low rank, and the state that the low rank reads."""


def op_for(rule: UpdateRule, x: Inputs) -> tuple[Op, dict[str, Tensor]]:
    """Returns the published op for a rule's structure, and the arguments of the op.

    Raises:
        InputError: No op computes the rule's recurrence.
    """
    t = rule.transition
    reads = "state" if t is None or "none" in (t.decay, t.low_rank) else t.reads
    op = None if t is None or t.steps > 1 or rule.second_state else OPS.get((t.decay, t.low_rank, reads))
    if op is None:
        raise InputError(f"no peer has an op for the structure of rule '{rule.name}'")
    terms = operands(rule, x.q, x.k, x.v, x.gates)
    if op.one_strength and terms.e is not None and not torch.equal(terms.e, _beta(terms)):
        raise InputError(f"no peer has an op that erases and writes as rule '{rule.name}' does")
    arguments = {"q": terms.resolved().r, "k": terms.k, **op.takes(terms)}
    precise = ("g", "gk", "beta")  # decays and strengths keep their precision
    return op, {
        name: (value if name in precise else value.to(x.v.dtype)).detach().contiguous()
        for name, value in arguments.items()
        if value is not None
    }


def _fla(rule: UpdateRule, x: Inputs, now: Inputs) -> Contestant:
    """Makes the contestant of flash-linear-attention: its op for the rule's structure."""
    op, arguments = op_for(rule, x)
    module = imported("fla", f"fla.ops.{op.module or op.name}")
    options = {"scale": rule.scale(x.k.shape[-1]), **op.options}
    chunk = partial(getattr(module, f"chunk_{op.name}"), **options)
    recurrent = partial(getattr(module, f"fused_recurrent_{op.name}"), **options, output_final_state=True)
    token = {op.for_tokens.get(name, name): value for name, value in op_for(rule, now)[1].items()}
    assert now.state is not None
    return Contestant("fla", Call(chunk, arguments), Call(recurrent, {**token, "initial_state": now.state[0]}))


def _flash_qla(rule: UpdateRule, x: Inputs, now: Inputs) -> Contestant:
    """Makes the contestant of FlashQLA: its kernel of the gated delta rule."""
    op, arguments = op_for(rule, x)
    if op.name != "gated_delta_rule":
        raise InputError(f"--against flash_qla: has no op for rule '{rule.name}', only the gated delta rule's")
    function = imported("flash_qla", "flash_qla").chunk_gated_delta_rule
    return Contestant("flash_qla", Call(partial(function, scale=rule.scale(x.k.shape[-1])), arguments))


def _sdpa(rule: UpdateRule, x: Inputs, now: Inputs) -> Contestant:
    """Makes the contestant of PyTorch: causal softmax attention with as many heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    batch, length, heads, key_dim = x.q.shape
    k, v = (z[:, :length] for z in (x.k, x.v))
    shape = Shape(batch, length, heads, key_dim, v.shape[-1])
    return Contestant("sdpa", Call(attend, {"q": x.q, "k": k, "v": v}), same=False, flops=attention_flops(shape))


PEERS: dict[str, tuple[Peer, str]] = {
    "fla": (_fla, "flash-linear-attention"),
    "flash_qla": (_flash_qla, "flash-qla"),
    "sdpa": (_sdpa, "torch"),
}
"""The peers by name, each with the package to install. `fla` calls FlashQLA if FlashQLA is installed and fits."""


def installed(name: str) -> None:
    """Checks that a peer can run here.

    Raises:
        InputError: The peer is unknown, is not installed, or needs a GPU and there is none.
    """
    if name not in PEERS:
        raise unknown("peer", name, PEERS, where="--against")
    if name == "sdpa":
        return
    if importlib.util.find_spec(name) is None:
        raise NotInstalled("not installed", PEERS[name][1], where=f"--against {name}")
    if not torch.cuda.is_available():
        raise InputError(f"--against {name}: needs a GPU")


def peer(name: str) -> Peer:
    """Returns the peer with this name.

    Raises:
        InputError: The peer is unknown, is not installed, or needs a GPU and there is none.
    """
    installed(name)
    return PEERS[name][0]


def imported(name: str, module: str) -> Any:
    """Returns a module of the peer `name`.

    Raises:
        InputError: The module does not import; the message has the reason.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--against {name}: does not import: {type(error).__name__}: {reason}") from error
