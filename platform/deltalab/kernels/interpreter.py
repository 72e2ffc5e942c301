"""Mends Triton's interpreter, which computes with the bit patterns of bf16 numbers as if they were whole numbers.

Seen with Triton 3.4 to 3.7: it keeps bf16 as uint16, and converts it on a cast from or to another float and in a
reduction alone. So it returns garbage for a product of matrices, a sum of two bf16 tensors, or a mask cast to bf16.

It also spends most of its time on work that changes no result, which is left out here; see `_quicken`.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

COMPUTE = ("unary_op", "binary_op", "ternary_op", "create_dot")
"""The methods by which the interpreter computes."""


def mend() -> None:
    """Has the interpreter, where it is on, compute with bf16 in fp32 and round the result, in this process."""
    if not knobs.runtime.interpret:
        return
    for name in COMPUTE:
        method = getattr(InterpreterBuilder, name)
        if not hasattr(method, "of_triton"):
            setattr(InterpreterBuilder, name, _in_fp32(method))
    if not hasattr(InterpreterBuilder.cast_impl, "of_triton"):
        InterpreterBuilder.cast_impl = _by_fp32(InterpreterBuilder.cast_impl)
    _quicken()


def _quicken() -> None:
    """Leaves out work of the interpreter that changes no result. It then takes half the time."""
    if hasattr(interpreter._patch_lang, "of_triton"):
        return
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _of_numpy(interpreter._get_np_dtype)
    # Without `debug`, no overflow that it looks for is reported.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _once_a_launch(patch: Any) -> Any:
    """Patches a language module once in a launch: Triton does so on each call of a function in a kernel."""
    patched: set[str] = set()

    def patch_lang(fn: Any) -> Any:
        missing = _languages(fn) - patched
        if not missing:
            return None
        launched = not patched
        scope = patch(fn)
        patched.update(missing)
        if launched:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    patch_lang.of_triton = patch  # type: ignore[attr-defined]
    return patch_lang


@cache
def _languages(fn: Any) -> frozenset[str]:
    return frozenset(lang.__name__ for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values()))


def _patch_builtin(of: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(of):
        if tl.core.is_builtin(member := getattr(of, name)):
            interpreter._patch_attr(of, name, member, builder, scope)


def _of_numpy(look_up: Any) -> Any:
    """Keeps what was looked up for a number's type: Triton makes its table of types again for each look-up."""
    kept = cache(look_up)
    return lambda kind: kept(kind) if type(kind) is tl.dtype else look_up(kind)


@cache
def _builtins(of: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(of) if tl.core.is_builtin(member)]


def _in_fp32(method: Any) -> Any:
    def computed(self: Any, *given: Any) -> Any:
        wide = [_widened(x) for x in given]
        found = method(self, *wide)
        narrow = any(a is not b for a, b in zip(given, wide, strict=True)) and method.__name__ != "create_dot"
        return _narrowed(found) if narrow and found.data.dtype == np.float32 else found

    computed.of_triton = method  # type: ignore[attr-defined]
    return computed


def _by_fp32(cast: Any) -> Any:
    def converted(self: Any, x: Any, kind: Any) -> Any:
        if kind.scalar == tl.bfloat16 and x.dtype.scalar != tl.bfloat16:
            return _narrowed(cast(self, x, tl.float32) if x.dtype.scalar != tl.float32 else x)
        return cast(self, _widened(x), kind) if kind.scalar not in (tl.bfloat16, tl.float32) else cast(self, x, kind)

    converted.of_triton = cast  # type: ignore[attr-defined]
    return converted


def _narrowed(x: Any) -> Any:
    bits = torch.from_numpy(np.ascontiguousarray(x.data, dtype=np.float32)).bfloat16().view(torch.uint16)
    return TensorHandle(bits.numpy(), tl.bfloat16)


def _widened(x: Any) -> Any:
    if not isinstance(x, TensorHandle) or x.dtype.scalar != tl.bfloat16:
        return x
    bits = torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.bfloat16)
    return TensorHandle(bits.float().numpy(), tl.float32)
