"""Attentions to all patches of an image, modules that a study names by their path."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.errors import InputError
from deltalab.softmax import attend


class PatchAttention(nn.Module):
    """Softmax attention in which each patch of an image sees all patches, the mixer of ViT and DeiT.

        o_t = sum_i softmax_i(K^(-1/2) q_t^T k_i) v_i    over all i

    Matrices start as in DeiT's code, normal with a standard deviation of 0.02, and biases at 0.

    Args:
        dim: The width d of x.
        heads: The number H of heads, each of width K = d / H.
        qkv_bias: Whether q, k and v have a bias. The output always has one.

    Raises:
        InputError: The heads do not divide the width.

    References:
        Touvron et al. 2021 (DeiT), arXiv:2012.12877, Section 3; `Attention` of timm's vision_transformer.py, which
        DeiT's code takes.
    """

    causal: ClassVar[bool] = False

    def __init__(self, dim: int, heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise InputError(f"heads {heads} must divide the width {dim}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.out = nn.Linear(dim, dim)
        for part in (self.qkv, self.out):
            nn.init.trunc_normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Computes y [B, T, d] for the patches x [B, T, d] of images."""
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, dim=-1))
        y: Tensor = self.out(self.attended(q, k, v).transpose(1, 2).flatten(2))
        return y

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes o [B, H, T, K] from q, k and v of the same shape."""
        return attend(q, k, v, scale=q.shape[-1] ** -0.5, causal=False)

    def state_size(self, length: int) -> int:
        """Returns the number of elements of the keys and values of an image of `length` patches."""
        return 2 * length * self.out.in_features


class Linformer(PatchAttention):
    """Softmax attention to `rows` sums of keys and of values, with weights of the places.

        o_t = sum_j softmax_j(K^(-1/2) q_t^T k'_j) v'_j,   k'_j = sum_i E_ji k_i,   v'_j = sum_i F_ji v_i

    All heads share E and F, which start as PyTorch starts linear layers.

    Args:
        dim: As in `PatchAttention`.
        heads: As in `PatchAttention`.
        patches: The number T of patches of an image.
        rows: The number of rows of E and F.
        shared: Whether F is E.

    Raises:
        InputError: The heads do not divide the width, or an image has another number of patches.

    References:
        Wang et al. 2020, arXiv:2006.04768, Equation 7 and "Additional efficiency techniques".
    """

    def __init__(self, dim: int, heads: int, patches: int, rows: int = 16, shared: bool = False) -> None:
        super().__init__(dim, heads, qkv_bias=True)
        self.patches, self.rows = patches, rows
        self.of_keys = nn.Linear(patches, rows, bias=False)
        self.of_values = self.of_keys if shared else nn.Linear(patches, rows, bias=False)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _expect(self, q, self.patches)
        k, v = self.of_keys(k.mT).mT, self.of_values(v.mT).mT
        return attend(q, k, v, scale=q.shape[-1] ** -0.5, causal=False)

    def state_size(self, length: int) -> int:
        """Returns the number of elements of the summed keys and values."""
        return 2 * self.rows * self.out.in_features


class AgentAttention(PatchAttention):
    """Softmax attention through a few agents, the means of the queries in the cells of a grid over the image.

        o = softmax(K^(-1/2) Q A^T + B') softmax(K^(-1/2) A K^T + B) V + DWC(V),   A = pool(Q)

    B and B' are sums of a table of 7 x 7 for each head and agent, stretched over the image, and of numbers for its rows
    and columns. DWC is a depthwise convolution of 3 x 3 patches. There is no class token here, whose biases theirs has.

    Args:
        dim: As in `PatchAttention`.
        heads: As in `PatchAttention`.
        side: The patches of a row; an image has side x side of them.
        agents: The number of agents, a square.
        qkv_bias: As in `PatchAttention`.

    Raises:
        InputError: The heads do not divide the width, `agents` is no square, or an image has another number of patches.

    References:
        Han et al. 2023, arXiv:2312.08874, Section 4; agent_deit.py of LeapLabTHU/Agent-Attention.
    """

    def __init__(self, dim: int, heads: int, side: int, agents: int = 49, qkv_bias: bool = True) -> None:
        super().__init__(dim, heads, qkv_bias)
        if agents < 1 or math.isqrt(agents) ** 2 != agents:
            raise InputError(f"agents must be a square, such as 9 or 49, not {agents}")
        self.side, self.agents = side, agents
        self.near = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        shapes = {"table": (heads, agents, 7, 7), "row": (heads, agents, side, 1), "column": (heads, agents, 1, side)}
        for of in ("agents", "patches"):
            for name, shape in shapes.items():
                bias = nn.Parameter(torch.zeros(shape))
                nn.init.trunc_normal_(bias, std=0.02)
                self.register_parameter(f"{of}_{name}", bias)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _expect(self, q, self.side**2)
        grid = (self.side, self.side)
        agents = F.adaptive_avg_pool2d(q.mT.flatten(1, 2).unflatten(-1, grid), math.isqrt(self.agents))
        agents = agents.flatten(2).unflatten(1, (self.heads, -1)).mT
        scale = q.shape[-1] ** -0.5
        seen = (scale * agents @ k.mT + self._bias("agents")).softmax(-1) @ v
        o: Tensor = (scale * q @ agents.mT + self._bias("patches").mT).softmax(-1) @ seen
        near: Tensor = self.near(v.mT.flatten(1, 2).unflatten(-1, grid))
        y: Tensor = o + near.flatten(2).unflatten(1, (self.heads, -1)).mT
        return y

    def _bias(self, of: str) -> Tensor:
        """The bias of each agent and patch, [H, agents, T]."""
        table, row, column = (getattr(self, f"{of}_{name}") for name in ("table", "row", "column"))
        bias: Tensor = F.interpolate(table, size=(self.side, self.side), mode="bilinear") + row + column
        return bias.flatten(2)

    def state_size(self, length: int) -> int:
        """Returns the number of elements of the agents, of what they see, and of the values near each patch."""
        return (2 * self.agents + length) * self.out.in_features


def _expect(module: nn.Module, q: Tensor, patches: int) -> None:
    if q.shape[-2] != patches:
        raise InputError(f"{type(module).__name__} is for images of {patches} patches, not {q.shape[-2]}")
