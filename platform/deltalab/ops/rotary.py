"""Rotary positions: q and k turned by angles that grow with their place, so that q^T k depends on the distance."""

import torch
from torch import Tensor


def angles(places: Tensor, key_dim: int, base: float) -> Tensor:
    """places [.., T] times base ** (-2 i / K) for i = 0 ... K/2 - 1: [.., T, K/2], in fp64.

    Su et al. 2021 (arXiv:2104.09864).
    """
    rates = base ** (-2 / key_dim * torch.arange(key_dim // 2, device=places.device, dtype=torch.float64))
    return places[..., None] * rates


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """x [B, T, H, K] with channels i and i + K/2 turned by angle_i, for angle [B or 1, T, K/2]. K must be even."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (part.unsqueeze(-2).to(wide) for part in (angle.cos(), angle.sin()))
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
