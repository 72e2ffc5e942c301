"""What a model of images has in place of tokens: embedded patches, their positions, and scans of the grid."""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from deltalab.errors import InputError, unknown
from deltalab.models.start import Normal, Started, linear
from deltalab.own_module import OwnModule
from deltalab.rule import UpdateRule

if TYPE_CHECKING:
    from deltalab.models.spec import ModelSpec

POSITIONS = ("learned", "sincos")
POOLS = ("mean", "last")
AXES = (1, 2)
OF_IMAGES = ("positions", "pool", "bidirectional", "axes")
"""The settings of a model that need patches."""

T = TypeVar("T")


def grid(patches: object) -> tuple[int, int, int] | None:
    """Returns `ModelSpec.patches` as a tuple.

    Raises:
        InputError: It is neither None nor three whole numbers of at least 1.
    """
    if patches is None:
        return None
    if (
        not isinstance(patches, list | tuple)
        or len(patches) != 3
        or not all(type(size) is int and size >= 1 for size in patches)
    ):
        raise InputError(
            f"model.patches must be [rows, columns, numbers of a patch], not {patches!r}", key="model.patches"
        )
    rows, columns, numbers = patches
    return rows, columns, numbers


def check_images(spec: "ModelSpec") -> None:
    """Checks the settings of `OF_IMAGES` of a model, and that a mixer which is not causal reads images.

    Raises:
        InputError: A value or the mixer needs patches that the task does not have, is not allowed, or needs a larger
            grid.
    """
    if spec.positions not in POSITIONS:
        raise unknown("positions", spec.positions, POSITIONS, where="model.positions")
    if spec.pool not in POOLS:
        raise unknown("pool", spec.pool, POOLS, where="model.pool")
    if not isinstance(spec.bidirectional, bool):
        raise InputError(f"model.bidirectional must be true or false, not {spec.bidirectional!r}")
    if isinstance(spec.axes, bool) or spec.axes not in AXES:
        raise InputError(f"model.axes must be 1 or 2, not {spec.axes!r}", key="model.axes")
    if spec.patches is None:
        for name, plain in zip(OF_IMAGES, ("learned", "mean", False, 1), strict=True):
            if getattr(spec, name) != plain:
                raise InputError(f"model.{name} needs a task of images: this one has tokens", key=f"model.{name}")
        if sees_all(rule := spec.make_rule()):
            said = f"module '{rule.name}' is not causal, and needs a task of images: this one has tokens"
            raise InputError(said, key="model.mixer")
        return
    rows, columns, _ = spec.patches
    if spec.axes == 2 and min(rows, columns) == 1:
        raise InputError(f"model.axes 2 needs rows and columns, and the task has {rows} x {columns} patches")
    if spec.positions == "sincos" and spec.d_model % 4:
        raise InputError(f"model.positions sincos needs a d_model that is a multiple of 4, not {spec.d_model}")


def sees_all(rule: UpdateRule) -> bool:
    """Returns whether a mixer is a module that is not causal, and sees all patches of an image at once."""
    return isinstance(rule, OwnModule) and not rule.causal


def sincos(rows: int, columns: int, width: int) -> Tensor:
    """Returns fixed positions [rows columns, width]: sines and cosines of the row, then of the column.

    Each half has sin(p w_i) and then cos(p w_i), with w_i = 10000^(-i / n) for i = 0 ... n - 1, n = width / 4.
    """
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 4) / (width // 4))
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [place.flatten()[:, None] * rates for place in (row, column)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)


class PatchEmbedding(Started):
    """An embedding of patches, W x + b + p_t, [B, T, D] to [B, T, d].

    W starts so that patches of unit scale have embeddings of unit scale. Learned positions start at a fifth of that.

    Args:
        patches: The rows R and columns C of the grid, with T = R C, and the numbers D of a patch.
        d_model: d.
        positions: `learned` for a learned p, `sincos` for `sincos`.
    """

    starts = MappingProxyType({"positions": Normal(0.2)})

    def __init__(self, patches: tuple[int, int, int], d_model: int, positions: str) -> None:
        super().__init__()
        rows, columns, numbers = patches
        self.form = rows * columns, numbers
        self.project = linear(numbers, d_model, bias=True, widens=False)
        if positions == "learned":
            self.positions: Tensor = self.drawn("positions", Normal(0.2), rows * columns, d_model)
        else:
            self.register_buffer("positions", sincos(rows, columns, d_model), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The matrix of the projection, [d, D]."""
        return self.project.weight

    def forward(self, images: Tensor) -> Tensor:
        """Embeds images [B, T, D].

        Raises:
            InputError: They have another form.
        """
        right = isinstance(images, Tensor) and images.is_floating_point() and images.dim() == 3
        if not right or tuple(images.shape[1:]) != self.form or not len(images):
            length, numbers = self.form
            found = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise InputError(f"images must be patches [B, {length}, {numbers}] of floats, not {found}")
        embedded: Tensor = self.project(images)
        return embedded + self.positions


class Scans(nn.Module):
    """Scans of an image by one mixer in several orders, whose outputs are averaged.

    The orders are row by row, with `axes` 2 column by column, and, if `bidirectional`, each of them from its end. All
    scans have the same weights, so that models with more scans have as many parameters, and take more time.

    Args:
        patches: As in `PatchEmbedding`.
        bidirectional: Whether each order is scanned from its end, too.
        axes: 1 for rows alone, 2 for rows and columns.

    Attributes:
        order: The tokens in the order of each scan, [S, T].
        place: The place of each token in each scan, [S, T].

    References:
        Zhu et al. 2024 (Vision Mamba), arXiv:2401.09417, for both directions; Liu et al. 2024 (VMamba),
        arXiv:2401.10166, for four orders. Both have some weights for each order.
    """

    order: Tensor
    place: Tensor

    def __init__(self, patches: tuple[int, int, int], *, bidirectional: bool, axes: int) -> None:
        super().__init__()
        by_row = torch.arange(patches[0] * patches[1])
        orders = [by_row, by_row.view(*patches[:2]).T.flatten()][:axes]
        if bidirectional:
            orders += [order.flip(0) for order in orders]
        self.count = len(orders)
        self.register_buffer("order", torch.stack(orders), persistent=False)
        self.register_buffer("place", torch.stack([order.argsort() for order in orders]), persistent=False)

    def forward(self, x: Tensor, mixer: Callable[[Tensor], tuple[Tensor, T]]) -> tuple[Tensor, T]:
        """Computes the mean of a mixer's outputs [B, T, d], and whatever else it returns of its [B S, T, d] inputs."""
        scans = x.index_select(1, self.order.flatten()).unflatten(1, self.order.shape)
        mixed, rest = mixer(scans.flatten(0, 1))
        parts = mixed.unflatten(0, (len(x), self.count)).unbind(1)
        back = [part.index_select(1, place) for part, place in zip(parts, self.place, strict=True)]
        return torch.stack(back).mean(0), rest


def scans_of(spec: "ModelSpec") -> Scans | None:
    """Makes the scans of a block; None for one scan, row by row, and for mixers that see all patches at once."""
    if spec.patches is None or (spec.axes == 1 and not spec.bidirectional):
        return None
    second = spec.second()
    if sees_all(spec.make_rule()) and (second is None or sees_all(second.make_rule())):
        return None
    return Scans(spec.patches, bidirectional=spec.bidirectional, axes=spec.axes)
