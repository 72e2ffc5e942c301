"""Mends Triton's interpreter, which computes with the bit patterns of bf16 numbers as if they were whole numbers.

Triton 3.4 to 3.7 keep bf16 as uint16 in the interpreter, and convert it only in a cast from or to another float and in
a reduction. So the interpreter returns garbage for a product of matrices, a sum of two bf16 tensors, or a mask cast to
bf16. The interpreter also spends most of its time on work that changes no result; `_quicken` leaves that work out.
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
    """Makes this process's interpreter, if it is on, compute with bf16 in fp32 and round the results to bf16."""
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
    """Leaves out work of the interpreter that changes no result, so that the interpreter takes half the time."""
    if hasattr(interpreter._patch_lang, "of_triton"):
        return
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _of_numpy(interpreter._get_np_dtype)
    # Without `debug`, the interpreter reports none of the overflows that it looks for.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _once_a_launch(patch: Any) -> Any:
    """Returns a function that patches a language module once in a launch.

    Triton patches it on each call of a function in a kernel.
    """
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
    """The language modules that a function's globals hold."""
    return frozenset(lang.__name__ for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values()))


def _patch_builtin(module: Any, builder: Any, scope: Any) -> None:
    """Patches the builtins of a module, as Triton's function of this name does."""
    for name in _builtins(module):
        if tl.core.is_builtin(member := getattr(module, name)):
            interpreter._patch_attr(module, name, member, builder, scope)


def _of_numpy(look_up: Any) -> Any:
    """Returns a look-up that remembers the NumPy type of each Triton type.

    Triton makes its table of types again at each look-up.
    """
    remembered = cache(look_up)
    return lambda dtype: remembered(dtype) if type(dtype) is tl.dtype else look_up(dtype)


@cache
def _builtins(module: Any) -> list[str]:
    """The names of a module's builtins."""
    return [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]


def _in_fp32(method: Any) -> Any:
    """Returns the method with bf16 arguments converted to fp32.

    Its result is rounded to bf16 if an argument was bf16, except for a product of matrices.
    """

    def computed(self: Any, *arguments: Any) -> Any:
        widened = [_widened(x) for x in arguments]
        result = method(self, *widened)
        narrow = any(a is not b for a, b in zip(arguments, widened, strict=True)) and method.__name__ != "create_dot"
        return _narrowed(result) if narrow and result.data.dtype == np.float32 else result

    computed.of_triton = method  # type: ignore[attr-defined]
    return computed


def _by_fp32(cast: Any) -> Any:
    """Returns a cast that converts to fp32 on the way from bf16 or to bf16."""

    def converted(self: Any, x: Any, dtype: Any) -> Any:
        if dtype.scalar == tl.bfloat16 and x.dtype.scalar != tl.bfloat16:
            return _narrowed(cast(self, x, tl.float32) if x.dtype.scalar != tl.float32 else x)
        return cast(self, x if dtype.scalar in (tl.bfloat16, tl.float32) else _widened(x), dtype)

    converted.of_triton = cast  # type: ignore[attr-defined]
    return converted


def _narrowed(x: Any) -> Any:
    """Rounds a tensor in fp32 to bf16."""
    bits = torch.from_numpy(np.ascontiguousarray(x.data, dtype=np.float32)).bfloat16().view(torch.uint16)
    return TensorHandle(bits.numpy(), tl.bfloat16)


def _widened(x: Any) -> Any:
    """Converts a tensor in bf16 to fp32, and returns anything else as it is."""
    if not isinstance(x, TensorHandle) or x.dtype.scalar != tl.bfloat16:
        return x
    bits = torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.bfloat16)
    return TensorHandle(bits.float().numpy(), tl.float32)
