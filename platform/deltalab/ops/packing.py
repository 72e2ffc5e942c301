"""Sequences that are packed one after another in one row, and batches with padding that are turned into such rows."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError


@dataclass(frozen=True)
class Sequences:
    """N sequences, one after another in a row of T tokens.

    Attributes:
        cu_seqlens: The bounds of the sequences, [N + 1].
        lengths: The tokens of each sequence, [N].
        place: The number of each token within its sequence, int32 [1, T].
        rest: The sequences but the first, if the first alone goes on from a cache; else None.
    """

    cu_seqlens: Tensor
    lengths: Tensor
    place: Tensor
    rest: "Sequences | None" = None

    @classmethod
    def of(cls, cu_seqlens: "Tensor | Sequences", x: Tensor) -> "Sequences":
        """The sequences of x [1, T, ..].

        Raises:
            InputError: The bounds have another form. On a CPU also if they do not rise from 0 to T; reading the bounds
                would stall a GPU.
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
        sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
        return cls(cu_seqlens, lengths, (tokens - cu_seqlens[sequence]).int()[None])

    def going_on(self, stop: int) -> "Sequences":
        """Returns the sequences, of which the first, of `stop` tokens, goes on from a cache. The others begin here."""
        return replace(self, rest=Sequences(self.cu_seqlens[1:] - stop, self.lengths[1:], self.place[:, stop:]))

    def last(self, x: Tensor, count: int) -> Tensor:
        """The last `count` tokens of each sequence of x [1, T, C], zeros before its first: [N, count, C]."""
        back = torch.arange(count, 0, -1, device=x.device)
        places = self.cu_seqlens[1:, None] - back
        mask = back <= self.lengths[:, None]
        return torch.where(mask.unsqueeze(-1), x[0, places.clamp_min(0)], 0)

    def reached(self, x: Tensor, back: int) -> Tensor:
        """Returns x with zeros for pairs of tokens that belong to two sequences.

        Args:
            x: A value for each token t from `back` on and the token t - back, [.., T - back, C].
            back: The distance of the two tokens.
        """
        return torch.where((self.place[:, back:] >= back).unsqueeze(-1), x, 0) if back else x


@dataclass(frozen=True)
class Packing:
    """How the tokens of a batch [B, T] become one row of M tokens.

    Attributes:
        at: Where the row's tokens stand in the flat batch, [M].
        cu_seqlens: The bounds of the row's sequences, [N + 1].
        shape: B and T.
    """

    at: Tensor
    cu_seqlens: Tensor
    shape: tuple[int, int]

    @classmethod
    def of_padded(cls, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> "Packing | None":
        """The packing of x [B, T, ..] without its padding, where mask [B, T] is 0; None if there is no mask or padding.

        Raises:
            InputError: There are both a mask and cu_seqlens, or `of` raises.
        """
        if mask is None:
            return None
        if cu_seqlens is not None:
            raise InputError("give cu_seqlens or attention_mask, not both: packed sequences have no padding")
        return cls.of(x, mask)

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None, starts: Tensor | None = None) -> "Packing | None":
        """The packing of x [B, T, ..], or None if each row is one sequence without padding. It waits for the device.

        Args:
            x: The batch.
            mask: 0 for padding, [B, T]; None if there is no padding.
            starts: Which tokens start a sequence besides the first token of each row, [B, T]; None if no other token
                does.

        Raises:
            InputError: The mask has another shape, or no token.
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
        """The batch x [B, T, ..] as one row, [1, M, ..]."""
        return x.flatten(0, 1)[self.at][None]

    def unpack(self, y: Tensor, fill: float = 0.0) -> Tensor:
        """The row y [1, M, ..] as a batch [B, T, ..], with `fill` for padding."""
        rows = y.new_full((self.shape[0] * self.shape[1], *y.shape[2:]), fill)
        batch: Tensor = rows.index_copy(0, self.at, y[0]).unflatten(0, self.shape)
        return batch

    def spread(self, y: Tensor) -> Tensor:
        """The row y as a batch, where padding has the value of the token before it in its row, or 0."""
        counts = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.long, device=y.device).index_fill(0, self.at, 1)
        mask = counts.unflatten(0, self.shape).cumsum(1) > 0
        rows = y[0, (counts.cumsum(0) - 1).clamp_min(0).unflatten(0, self.shape)]
        return torch.where(mask.view(*self.shape, *[1] * (y.dim() - 2)), rows, 0)
