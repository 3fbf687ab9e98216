"""Numba compilation, the array types that the CPU kernels share, and the processor's prefetch instruction."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

P = ParamSpec("P")
T = TypeVar("T")

Floats = NDArray[np.float32] | NDArray[np.float64]
Bits = NDArray[np.uint32] | NDArray[np.uint64]
Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.uint8]
Positions = NDArray[np.int64]
Scalar = np.float32 | np.float64


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compiles `function` on its first call; the kernel runs in one thread, without the GIL, and is safe after a fork.

    Where a cache directory is writable, later processes load the kernel from disk. Numba renews that cache when the
    function's own file changes, but not when a callee in another file does. So keep callees in their caller's file, or
    delete `__pycache__` after an edit.
    """
    try:
        kernel: Callable[P, T] = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # Numba raises it at decoration when no cache directory is writable.
        kernel = numba.njit(nogil=True)(function)
    return kernel


def _typed(typing: Any, row: Any, index: Any) -> Any:
    """The signature of `prefetch`, and the function that generates its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], function)
        # For reading and writing; into all cache levels; data rather than code.
        builder.call(instruction, [pointer, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(row, index), generate


# Loads row[index] into the cache. The index may lie beyond the row's end, because nothing is read.
prefetch = cast("Callable[[Floats, np.uint64], None]", intrinsic(_typed))
