"""Sequences packed one after another in one row, and batches with padding as such rows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError


@dataclass(frozen=True)
class Sequences:
    """N sequences, one after another in a row of T tokens.

    cu_seqlens: their bounds, [N + 1]. lengths: [N]. place: a token's number within its sequence, int32 [1, T].
    """

    cu_seqlens: Tensor
    lengths: Tensor
    place: Tensor

    @classmethod
    def of(cls, cu_seqlens: "Tensor | Sequences", x: Tensor) -> "Sequences":
        """The sequences of x [1, T, ..].

        Raises `InputError` for bounds of another form, and on a CPU for bounds that do not rise from 0 to T: reading
        them would stall a GPU.
        """
        if isinstance(cu_seqlens, Sequences):
            return cu_seqlens
        if not isinstance(cu_seqlens, Tensor):
            raise InputError(f"cu_seqlens must be a tensor of whole numbers [N + 1], not a {type(cu_seqlens).__name__}")
        length = x.shape[1]
        whole = cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.numel() > 1
        if not whole or x.shape[0] != 1 or cu_seqlens.device != x.device:
            raise InputError(
                f"cu_seqlens must be whole numbers [N + 1] on {x.device} beside a batch of 1, "
                f"not {cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device} beside a batch of {x.shape[0]}"
            )
        lengths = cu_seqlens.diff()
        if x.device.type == "cpu" and (cu_seqlens[0] != 0 or cu_seqlens[-1] != length or (lengths < 1).any()):
            raise InputError(f"cu_seqlens must rise from 0 to the number of tokens, {length}: {cu_seqlens.tolist()}")
        tokens = torch.arange(length, device=x.device, dtype=cu_seqlens.dtype)
        which = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
        return cls(cu_seqlens, lengths, (tokens - cu_seqlens[which]).int()[None])

    def last(self, x: Tensor, count: int) -> Tensor:
        """The last `count` tokens of each sequence of x [1, T, C], zeros before its first: [N, count, C]."""
        back = torch.arange(count, 0, -1, device=x.device)
        at = self.cu_seqlens[1:, None] - back
        there = back <= self.lengths[:, None]
        return torch.where(there.unsqueeze(-1), x[0, at.clamp_min(0)], 0)

    def reached(self, x: Tensor, back: int) -> Tensor:
        """x [.., T - back, C] of pairs of tokens `back` apart, zeros where a bound is between the two."""
        return torch.where((self.place[:, back:] >= back).unsqueeze(-1), x, 0) if back else x


@dataclass(frozen=True)
class Packing:
    """How the tokens of a batch [B, T] become one row of M tokens.

    at: where the row's tokens stand in the flat batch, [M]. cu_seqlens: the bounds of the row's sequences, [N + 1].
    shape: B and T.
    """

    at: Tensor
    cu_seqlens: Tensor
    shape: tuple[int, int]

    @classmethod
    def of_padded(cls, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> "Packing | None":
        """The packing of x [B, T, ..] without its padding, where mask [B, T] is 0; None where there is no padding.

        Raises `InputError` for cu_seqlens besides, and as `of`.
        """
        if mask is None:
            return None
        if cu_seqlens is not None:
            raise InputError("give cu_seqlens or attention_mask, not both: packed sequences have no padding")
        return cls.of(x, mask)

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None, starts: Tensor | None = None) -> "Packing | None":
        """The packing of x [B, T, ..], None where each row is one sequence without padding.

        mask [B, T]: 0 for padding, no padding where None. starts [B, T]: which tokens start a sequence besides the
        first of each row, none where None. It waits for the device.

        Raises `InputError` for a mask of another shape, or without any token.
        """
        batch, length = x.shape[:2]
        if mask is not None and not isinstance(mask, Tensor):
            raise InputError(f"attention_mask must be a tensor [B, T], not a {type(mask).__name__}")
        if mask is not None and (mask.shape != (batch, length) or mask.device != x.device):
            raise InputError(
                f"attention_mask must be [B, T] = [{batch}, {length}] on {x.device}, "
                f"not {list(mask.shape)} on {mask.device}"
            )
        mask = x.new_ones(batch, length, dtype=torch.bool) if mask is None else mask != 0
        if mask.all() and (starts is None or not starts[:, 1:].any()):
            return None
        at = mask.flatten().nonzero().squeeze(1)
        if not at.numel():
            raise InputError("attention_mask holds no token")
        begins = F.pad(at[1:] // length != at[:-1] // length, (1, 1), value=True)
        if starts is not None:
            begins[:-1] |= starts.flatten()[at]
        return cls(at, begins.nonzero().squeeze(1), (batch, length))

    def pack(self, x: Tensor) -> Tensor:
        """x [B, T, ..] as one row, [1, M, ..]."""
        return x.flatten(0, 1)[self.at][None]

    def unpack(self, y: Tensor, fill: float = 0.0) -> Tensor:
        """y [1, M, ..] as a batch [B, T, ..], with `fill` for padding."""
        rows = y.new_full((self.shape[0] * self.shape[1], *y.shape[2:]), fill)
        batch: Tensor = rows.index_copy(0, self.at, y[0]).unflatten(0, self.shape)
        return batch

    def spread(self, y: Tensor) -> Tensor:
        """`unpack`, where padding has what the token before it in its row has; 0 where there is none."""
        counts = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.long, device=y.device).index_fill(0, self.at, 1)
        there = counts.unflatten(0, self.shape).cumsum(1) > 0
        rows = y[0, (counts.cumsum(0) - 1).clamp_min(0).unflatten(0, self.shape)]
        return torch.where(there.view(*self.shape, *[1] * (y.dim() - 2)), rows, 0)
