"""Rotary positions: q and k are turned by angles that grow with their place, so that q^T k depends on the distance."""

import torch
from torch import Tensor


def angles(places: Tensor, key_dim: int, base: float) -> Tensor:
    """Computes places [.., T] times base ** (-2 i / K) for i = 0 ... K/2 - 1, [.., T, K/2] in fp64.

    References:
        Su et al. 2021 (arXiv:2104.09864).
    """
    rates = base ** (-2 / key_dim * torch.arange(key_dim // 2, device=places.device, dtype=torch.float64))
    return places[..., None] * rates


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turns channels i and i + R/2 of the last R channels of x [B, T, H, K] by angle_i, for angle [B or 1, T, R/2]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (part.unsqueeze(-2).to(dtype) for part in (angle.cos(), angle.sin()))
    half = angle.shape[-1]
    rest, a, b = x.to(dtype).split([x.shape[-1] - 2 * half, half, half], dim=-1)
    return torch.cat([rest, a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
