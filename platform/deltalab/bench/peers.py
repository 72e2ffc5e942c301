"""Published kernels to time beside those of deltalab.

The structure that a rule declares decides which kernels compute it. So a new rule of a known structure has peers, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.authoring.inputs import Inputs
from deltalab.bench.flops import attention_flops
from deltalab.bench.results import Shape
from deltalab.errors import InputError, unknown
from deltalab.ops.lowering import Lowered, by_channel
from deltalab.ops.peers.scans import imported, lacks
from deltalab.ops.peers.table import Op, hindrance, op_of
from deltalab.ops.scan import operands
from deltalab.rule import UpdateRule


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


def op_for(rule: UpdateRule, x: Inputs) -> tuple[Op, dict[str, Tensor]]:
    """Returns the published op for a rule's structure, and the arguments of the op.

    Raises:
        InputError: No op computes the rule's recurrence.
    """
    if why := hindrance(rule):
        raise InputError(f"no peer has an op for rule '{rule.name}': {why}")
    assert rule.transition is not None
    transition, terms, *_ = by_channel(Lowered(rule.transition, operands(rule, x.q, x.k, x.v, x.gates)))
    op = op_of(transition, terms)
    if isinstance(op, str):
        raise InputError(f"no peer has an op for rule '{rule.name}': {op}")
    return op, {name: value.detach() for name, value in op.arguments(terms, x.v.dtype).items()}


def _fla(rule: UpdateRule, x: Inputs, now: Inputs) -> Contestant:
    """Makes the contestant of flash-linear-attention: its op for the rule's structure."""
    op, arguments = op_for(rule, x)
    module = imported(op.path, where="--against fla")
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
    function = imported("flash_qla", where="--against flash_qla").chunk_gated_delta_rule
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


PEERS: dict[str, Peer] = {"fla": _fla, "flash_qla": _flash_qla, "sdpa": _sdpa}
"""The peers by name. `fla` calls FlashQLA if FlashQLA is installed and fits."""


def installed(name: str) -> None:
    """Checks that a peer can run here.

    Raises:
        InputError: The peer is unknown, is not installed, or needs a GPU and there is none.
    """
    if name not in PEERS:
        raise unknown("peer", name, PEERS, where="--against")
    if name != "sdpa":
        lacks(name, where=f"--against {name}")


def peer(name: str) -> Peer:
    """Returns the peer with this name.

    Raises:
        InputError: The peer is unknown, is not installed, or needs a GPU and there is none.
    """
    installed(name)
    return PEERS[name]
