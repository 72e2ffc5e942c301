"""The arguments of one call of `scan`, and of calls on parts of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from deltalab.ops.recurrence import Backend
from deltalab.rule import State, UpdateRule


@dataclass(slots=True)
class Call:
    """The arguments of a call of `scan`, which explains them. `ops.arguments` checks them.

    Attributes:
        rule: The rule.
        q: [B, T, H, K].
        k: [B, n T, H, K], for n steps per token.
        v: [B, n T, H, V].
        gates: The value of each gate.
        given_scale: The factor of the output, or None for that of the rule.
        state: What an earlier call returned, or None for an empty state.
        backend: The form to take.
        chunk_size: Tokens of a chunk of the parallel form.
        cu_seqlens: The bounds [N + 1] of packed sequences, or None.
    """

    rule: UpdateRule
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor]
    given_scale: float | None = None
    state: State | None = None
    backend: Backend = "auto"
    chunk_size: int = 64
    cu_seqlens: Tensor | None = None

    @property
    def scale(self) -> float:
        """The factor of the output."""
        if self.given_scale is not None:
            return self.given_scale
        return self.rule.scale(self.k.shape[-1])

    @property
    def sequences(self) -> int:
        """Number of sequences, and so of states."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def recurrence_state(self) -> State | None:
        """The state without the rule's carry."""
        return None if self.state is None else self.state[: self.rule.states]

    @property
    def carry(self) -> tuple[Tensor, ...] | None:
        """The rule's carry, or None for an empty one."""
        return None if self.state is None else self.state[self.rule.states :]

    def part(self, rows: slice, tokens: slice, state: State | None) -> "Call":
        """Returns the call on some rows and some tokens, which starts from `state` and has no packed sequences."""
        n, declared = self.rule.steps, self.rule.gates
        steps = slice(*(None if end is None else end * n for end in (tokens.start, tokens.stop)))
        gates = {}
        for name, value in self.gates.items():
            if value.dim() > 2:  # Other gates have neither rows nor tokens.
                value = value[rows, steps if declared[name].per == "step" else tokens]
            gates[name] = value
        q, k, v = self.q[rows, tokens], self.k[rows, steps], self.v[rows, steps]
        return Call(self.rule, q, k, v, gates, self.given_scale, state, self.backend, self.chunk_size)
