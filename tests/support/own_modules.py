"""Modules of strangers: some that a study may take, and some that each break one thing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Taps(nn.Module):
    """A causal convolution with a gate."""

    def __init__(self, dim: int, taps: int = 4, gate: bool = True) -> None:
        super().__init__()
        self.taps = taps
        self.into = nn.Linear(dim, dim)
        self.conv = nn.Conv1d(dim, dim, taps, groups=dim)
        self.gate = nn.Linear(dim, dim) if gate else None
        self.size = nn.Parameter(torch.tensor(1.0))  # a parameter without a dimension

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        z = self.conv(F.pad(self.into(x).transpose(1, 2), (self.taps - 1, 0))).transpose(1, 2)
        return (z if self.gate is None else z * self.gate(x).sigmoid()) * self.size, None

    def state_size(self) -> int:
        return (self.taps - 1) * self.conv.in_channels


class Attends(nn.Module):
    """Attention that takes packed sequences, with the width and the heads of the model."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        tokens = torch.arange(x.shape[1])
        seen = tokens[:, None] >= tokens
        if cu_seqlens is not None:
            document = torch.bucketize(tokens, cu_seqlens[1:], right=True)
            seen = seen & (document[:, None] == document)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        y: Tensor = self.drop((weights @ v).transpose(1, 2).flatten(2))
        return y


class Writes(nn.Module):
    """Attention with one head, which writes keys and values into a cache of transformers."""

    def __init__(self, dim: int, layer_idx: int | None = None) -> None:
        super().__init__()
        self.qkv, self.layer_idx = nn.Linear(dim, 3 * dim, bias=False), layer_idx

    def forward(self, x: Tensor, past_key_values: Any = None, use_cache: bool = False) -> tuple[Tensor, None]:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        tokens = torch.arange(k.shape[2])
        seen = tokens[-x.shape[1] :, None] >= tokens
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v)[:, 0], None


class RunsAlone(nn.Module):
    """vmap takes no LSTM of torch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y


def make(dim: int, depth: int = 2) -> nn.Module:
    """A function that makes a module."""
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(depth)))


class Remembers(nn.Module):
    """Sums its inputs, and takes the sum of the tokens before."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.linear(x).tanh().cumsum(1)
        y = y if state is None else y + state
        return y, y[:, -1:]


class _Linear(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("mean", torch.zeros(dim))


class Peeks(_Linear):
    """Reads one token that follows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.pad(x[:, 1:], (0, 0, 0, 1))


class Halves(_Linear):
    """Does otherwise for sequences of at least 64 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 if x.shape[1] < 64 else 0.5)


class Mixes(_Linear):
    """Reads the other rows of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(0))


class Keeps(_Linear):
    """Keeps a mean over all calls."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += 0.1 * x.mean((0, 1))
        return self.linear(x - self.mean)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Slopes(_Linear):
    """Has a wrong backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_Wrong.apply(x))


class Rounds(_Linear):
    """Loses all digits in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return ((z + 1000).to(z.dtype) - 1000).float() if z.dtype == torch.bfloat16 else z


class Forgets(Remembers):
    """Returns a cache of the last call alone."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, _ = super().forward(x, state)
        return y, super().forward(x)[1]


class Leaks(Attends):
    """Takes cu_seqlens and ignores it."""

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Norms(nn.Module):
    """Norms over all rows and tokens of a batch, while it trains."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.mT).mT
        return y


class Drops(nn.Module):
    """Draws random numbers while it trains, without a module that says so."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training)


class Draws(nn.Module):
    """Starts from a generator of its own."""

    generator = torch.Generator().manual_seed(0)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim, generator=self.generator))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Wide(nn.Module):
    """Returns twice the width."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Divides(_Linear):
    """Divides by 0 at the first token."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / torch.arange(x.shape[1])[:, None]


class Needs(nn.Module):
    """Asks for a GPU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("Found no NVIDIA driver on your system")


class Sees(_Linear):
    """Adds the mean of all patches of an image."""

    causal = False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x.mean(1, keepdim=True)


class SeesSixteen(_Linear):
    """Mixes the patches of images of 16 patches by a matrix, and takes no others."""

    causal = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.over_patches = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.over_patches(x.mT).mT)


class SeesNothing(_Linear):
    """Says that it is not causal, and is."""

    causal = False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class SeesRows(Sees):
    """Adds the mean of all images, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(0)


class SeesBefore(Sees):
    """Adds a mean over all calls."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += 0.1 * x.mean((0, 1))
        return super().forward(x) + self.mean


class SeesWrongly(Sees):
    """Has a wrong backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Wrong.apply(x))


class Frozen(_Linear):
    """Has a parameter that does not train."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.linear.weight.requires_grad_(False)


def text(dim: int) -> str:
    """Makes no module."""
    return "x" * dim
