"""Attention to all patches of an image, a module that a study names by its path."""

from typing import ClassVar

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
        o = attend(q, k, v, scale=q.shape[-1] ** -0.5, causal=False)
        y: Tensor = self.out(o.transpose(1, 2).flatten(2))
        return y

    def state_size(self, length: int) -> int:
        """Returns the number of elements of the keys and values of an image of `length` patches."""
        return 2 * length * self.out.in_features
