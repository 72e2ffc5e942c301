"""Looks up rows of an embedding. The time of its gradient does not depend on how often a token occurs.

PyTorch's own gradient sums a token's rows in parts of 10, one after another. In a batch of associative recall, three of
four tokens are 0, and all else waits for these.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.compilations import launch
from deltalab.kernels.register import ByName, register

TILE = 1024
"""Numbers that a warp holds at a time, in whole rows."""

CHUNK = 128
"""Rows, sorted by token, that one program sums first."""


@triton.jit
@no_type_check
def rows_of(x, row, mask, D: tl.constexpr, BD: tl.constexpr):
    """Pointers to these rows [BR] of x [.., D], and the mask of elements that exist."""
    column = tl.arange(0, BD)[None, :]
    return x + row.to(tl.int64)[:, None] * D + column, mask[:, None] & (column < D)


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def lookup_kernel(weight, tokens, out, rows, stride, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Looks up BR tokens of a run."""
    run = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    token = tl.load(tokens + run * rows + i, mask=i < rows, other=0)
    at, mask = rows_of(weight + run * stride, token, i < rows, D, BD)
    vectors = tl.load(at, mask=mask, other=0.0)
    at, mask = rows_of(out + run * rows * D, i, i < rows, D, BD)
    tl.store(at, vectors, mask=mask)


@triton.jit(do_not_specialize=["total"])
@no_type_check
def ends_kernel(
    d_out, key, order, heads, tails, total, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, CHUNK: tl.constexpr
):
    """Sums, for one chunk, the rows of its first token, and those of its last token."""
    chunk = tl.program_id(0)
    begin = chunk * CHUNK
    first_token, last_token = tl.load(key + begin), tl.load(key + tl.minimum(begin + CHUNK, total) - 1)
    head = tl.zeros([BR, BD], heads.dtype.element_ty)
    tail = head
    for i in range(0, CHUNK, BR):
        at = begin + i + tl.arange(0, BR)
        token = tl.load(key + at, mask=at < total, other=-1)
        is_end = (token == first_token) | (token == last_token)
        rows, mask = rows_of(d_out, tl.load(order + at, mask=is_end, other=0), is_end, D, BD)
        x = tl.load(rows, mask=mask, other=0.0).to(head.dtype)
        head += tl.where((token == first_token)[:, None], x, 0.0)
        tail += tl.where((token == last_token)[:, None], x, 0.0)
    column = tl.arange(0, BD)
    tl.store(heads + chunk.to(tl.int64) * D + column, tl.sum(head, 0), mask=column < D)
    tl.store(tails + chunk.to(tl.int64) * D + column, tl.sum(tail, 0), mask=column < D)


@triton.jit
@no_type_check
def sum_kernel(
    d_out, order, bounds, heads, tails, d_weight,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums, for one token, its rows if they are all in one chunk, else the sums that `ends_kernel` made."""
    token, i, column = tl.program_id(0), tl.arange(0, BR), tl.arange(0, BD)
    begin, end = tl.load(bounds + token), tl.load(bounds + token + 1)
    from_chunk, to_chunk = begin // CHUNK, (end - 1) // CHUNK
    sums = tl.zeros([BR, BD], heads.dtype.element_ty)
    if from_chunk < to_chunk:
        tail = tl.load(tails + from_chunk.to(tl.int64) * D + column, mask=column < D, other=0.0)
        sums += tl.where((i == 0)[:, None], tail[None, :], 0.0)
        for chunk in range(from_chunk + 1, to_chunk + 1, BR):
            at, mask = rows_of(heads, chunk + i, chunk + i <= to_chunk, D, BD)
            sums += tl.load(at, mask=mask, other=0.0)
    else:
        for row in range(begin, end, BR):
            source = tl.load(order + row + i, mask=row + i < end, other=0)
            at, mask = rows_of(d_out, source, row + i < end, D, BD)
            sums += tl.load(at, mask=mask, other=0.0).to(sums.dtype)
    total = tl.sum(sums, 0).to(d_weight.dtype.element_ty)
    tl.store(d_weight + token.to(tl.int64) * D + column, total, mask=column < D)


def _sizes(width: int, warps: int) -> tuple[dict[str, int], int]:
    """Sizes for rows of `width`, and a number of warps, which is more than `warps` if rows are long."""
    padded = triton.next_power_of_2(width)
    warps = max(warps, min(8, padded // TILE))
    return {"D": width, "BD": padded, "BR": min(CHUNK, max(1, warps * TILE // padded))}, warps


@torch.library.custom_op("deltalab::embed", mutates_args=())
def embed(weight: Tensor, tokens: Tensor) -> Tensor:
    """Looks up rows [n, N, d] of weights [n, V, d] for tokens [n, N] in [0, V)."""
    out = _outputs(weight=weight, tokens=tokens)
    if weight.stride()[1:] != (weight.shape[2], 1):
        weight = weight.contiguous()
    sizes, warps = _sizes(weight.shape[2], 4)
    operands = {"weight": weight, "tokens": tokens.contiguous(), "out": out}
    sizes |= {"rows": tokens.shape[1], "stride": weight.stride(0)}
    launch(lookup_kernel, (triton.cdiv(tokens.shape[1], sizes["BR"]), len(tokens)), operands, sizes, num_warps=warps)
    return out


def _outputs(*, weight: Tensor, tokens: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[2])


@torch.library.custom_op("deltalab::embed_backward", mutates_args=())
def _backward(d_out: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """d_weight [n, V, d]. Each row is a sum in at least fp32, in an order that is always the same."""
    runs, _, width = d_out.shape
    d_weight = _gradient(d_out=d_out, vocabulary=vocabulary)
    begin = torch.arange(runs * vocabulary + 1, device=tokens.device, dtype=torch.int32)
    key, order = (tokens.to(torch.int32) + begin[:-1:vocabulary, None]).flatten().sort(stable=True)
    bounds = torch.searchsorted(key, begin, out_int32=True)
    chunks = triton.cdiv(len(key), CHUNK)
    dtype = torch.promote_types(d_out.dtype, torch.float32)
    heads, tails = d_out.new_empty(2, chunks, width, dtype=dtype).unbind()
    d_out = d_out.contiguous()
    operands = {"d_out": d_out, "order": order, "heads": heads, "tails": tails}
    sizes, warps = _sizes(width, 4)
    sizes |= {"total": len(key), "CHUNK": CHUNK}
    launch(ends_kernel, (chunks,), {**operands, "key": key}, sizes, num_warps=warps)
    sizes, warps = _sizes(width, 1)
    sizes |= {"CHUNK": CHUNK}
    operands |= {"bounds": bounds, "d_weight": d_weight}
    launch(sum_kernel, (runs * vocabulary,), operands, sizes, num_warps=warps)
    return d_weight


def _gradient(*, d_out: Tensor, vocabulary: int, **_: Any) -> Tensor:
    return d_out.new_empty(d_out.shape[0], vocabulary, d_out.shape[2])


def _saved(arguments: ByName) -> ByName:
    return {"vocabulary": arguments["weight"].shape[1]}


def _folded(info: Any, in_dims: tuple[int | None, int | None], *args: Tensor) -> tuple[Tensor, int]:
    # Unlike `fold_into_batch`, this copies no weights: those of a stack are columns of its rows, and stay there.
    weight, tokens = (
        (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(args, in_dims, strict=True)
    )
    return embed(weight, tokens).unflatten(0, (info.batch_size, -1)), 0


register(_backward, shapes=_gradient, fold=False)
register(embed, shapes=_outputs, backward=_backward, outputs=["out"], saved=_saved, fold=False)
embed.register_vmap(_folded)
