"""Reformer: softmax attention among the tokens that random hashes put into one bucket, with one vector as q and k."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import nothing_seen, remembered

MOST_BUCKETS = 4096
"""The most buckets. The numbers of R are drawn one by one, a second for each million."""

ITSELF = 1e5
"""What a token's logit of itself is lowered by: it has no weight beside that of any other token."""


@lru_cache(maxsize=64)
def rotations(width: int, rounds: int, buckets: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the R of each round, normal random numbers [rounds, K, buckets / 2] that are the same everywhere.

    They are kept, since a CUDA graph takes no numbers from the host. Python's generator gives the same numbers on every
    machine, and under `torch.func.vmap`.
    """
    draw = random.Random(0)
    numbers = [[[draw.gauss(0, 1) for _ in range(buckets // 2)] for _ in range(width)] for _ in range(rounds)]
    return torch.tensor(numbers, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class Reformer(UpdateRule):
    """o_t = sum_i softmax_i(scale q_t^T k_i) v_i over the i < t with h_r(k_i) = h_r(k_t) in a round r;  v_t if none is
    k_i = q_i / |q_i|   h_r(x) = argmax([x R_r; -x R_r]),   R_r of K x buckets / 2 fixed normal numbers

    Kitaev et al. 2020 (arXiv:2001.04451, Section 2 and Appendix A). q is the key, too: k is not read. scale is 1, as in
    their code. Their sum over rounds, each a softmax over one bucket whose logits are less the logarithm of the number
    of rounds that have the pair in a bucket, is the softmax over all these tokens; `step` computes it round by round.
    R is the same for all heads, seeds and steps, where theirs is drawn anew for each call. The hash passes no gradient.
    A token on the border of two buckets may be in the other one in another form or batch. With the default sizes of a
    rule, the inputs of `rule check` lie 100 roundings in fp32 off any border.

    A bucket is whole. Theirs is cut where the sorted tokens are cut into chunks, an approximation that saves time. The
    state is all keys and values, [B, H, n, K] and [B, H, n, V]. No kernel computes it: all logits are computed and then
    masked, so that it shows what the hash costs in quality, and saves no time.
    """

    name: ClassVar[str] = "reformer"
    paper: ClassVar[str] = "arXiv:2001.04451"

    rounds: int = knob(4, 1)
    buckets: int = knob(8, 2)

    def __post_init__(self) -> None:
        if self.buckets % 2:
            raise InputError(f"{self.name}.buckets must be even, a half for each sign, not {self.buckets}")
        if self.buckets > MOST_BUCKETS:
            raise InputError(f"{self.name}.buckets must be at most {MOST_BUCKETS:,}, not {self.buckets:,}")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def scale(self, key_dim: int) -> float:
        return 1.0

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return nothing_seen(k, v)[:2]

    def bucket(self, keys: Tensor) -> Tensor:
        """Returns the bucket of each key [B, H, N, K] in each round, [B, H, rounds, N]."""
        r = rotations(keys.shape[-1], self.rounds, self.buckets, keys.dtype, keys.device)
        turned = keys.detach()[:, :, None] @ r
        return torch.cat([turned, -turned], dim=-1).argmax(-1)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        q = q.to(state[0].dtype)
        keys, values = remembered(state, F.normalize(q, dim=-1), v)
        places = torch.arange(keys.shape[2], device=q.device)
        now = places[-q.shape[1] :, None]
        seen = torch.zeros_like(places < now)
        # A query is in the bucket of its key, whatever rounding its norm brings. Rounds one by one need less memory.
        for bucket in self.bucket(keys).unbind(2):
            seen = seen | (bucket[:, :, -q.shape[1] :, None] == bucket[:, :, None])
        seen = seen & (places < now)
        seen = seen | (~seen.any(-1, keepdim=True) & (places == now))
        logits = scale * q.transpose(1, 2) @ keys.mT
        o = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ values
        return o.transpose(1, 2), (keys, values)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State) -> tuple[Tensor, State]:
        new = F.normalize(q, dim=-1), v
        keys, values = (torch.cat([past, x[:, :, None]], dim=2) for past, x in zip(state, new, strict=True))
        bucket = self.bucket(keys)
        shares = bucket == bucket[..., -1:]
        m = shares.sum(2).to(q).log()
        m[..., -1] = ITSELF
        logits = (scale * torch.einsum("bhk,bhnk->bhn", q, keys) - m)[:, :, None].masked_fill(~shares, -torch.inf)
        z = logits.logsumexp(-1)
        o = torch.einsum("bhr,bhrv->bhv", z.softmax(-1), logits.softmax(-1) @ values)
        return o, (keys, values)
