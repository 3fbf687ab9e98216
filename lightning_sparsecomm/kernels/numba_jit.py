"""Numba compilation, the array types that the CPU kernels share, and a few instructions of the processor."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import event, types
from numba.core.caching import IndexDataCacheFile
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
Unsigned = np.uint32 | np.uint64


_names: set[str] = set()


class CacheFile(IndexDataCacheFile):
    """A kernel's cache on disk, safe for processes that compile at the same time, as the ranks of a first run do.

    Numba numbers the compiled files. Two processes that compile for different dtypes at the same time can give both the
    same number, and later ones would load the kernel of the other dtype: wrong results, without an error. Here the name
    follows from the dtypes, so the worst that can happen is that a kernel is compiled once more.
    """

    def save(self, key: Any, data: Any) -> None:
        """Writes the kernel, and then its entry in the index."""
        name = self._data_name(int(hashlib.sha256(repr(key).encode()).hexdigest()[:15], 16))  # type: ignore[no-untyped-call]
        self._save_data(name, data)  # type: ignore[no-untyped-call]
        self._save_index({**self._load_index(), key: name})  # type: ignore[no-untyped-call]


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compiles `function` on its first call; the kernel runs in one thread, without the GIL, and is safe after a fork.

    Where a cache directory is writable, later processes load the kernel from disk. Numba renews that cache when the
    function's own file changes, but not when a callee in another file does. So keep callees in their caller's file, or
    delete `__pycache__` after an edit.
    """
    return _compiled(function, "python")


def compiled_to_divide(function: Callable[P, T]) -> Callable[P, T]:
    """As `compiled`, but a division by zero gives infinity or NaN instead of an error: so loops with one vectorize."""
    return _compiled(function, "numpy")


def _compiled(function: Callable[P, T], errors: Literal["python", "numpy"]) -> Callable[P, T]:
    name = f"{function.__module__}.{function.__qualname__}"
    if name in _names:
        raise ValueError(
            f"the __qualname__ of a kernel must be its own in its module; {name} is compiled already. Give functions"
            " that are made by one definition different names: numba gives kernels of one name and one signature that"
            " two processes have compiled the same symbol, and who loads both runs one of them for the other."
        )
    _names.add(name)
    try:
        kernel: Callable[P, T] = numba.njit(nogil=True, cache=True, error_model=errors)(function)
    except RuntimeError:  # Numba raises it at decoration when no cache directory is writable.
        return cast(Callable[P, T], numba.njit(nogil=True, error_model=errors)(function))
    kernel._cache._cache_file.__class__ = CacheFile  # type: ignore[attr-defined]
    return kernel


class _Listener(event.Listener):
    """Counts the kernels of ours that numba compiles."""

    def __init__(self, say: Callable[[], None]) -> None:
        self.count = 0
        self._say = say

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.split(".")[0] == __name__.split(".")[0]:
            if not self.count:
                self._say()
            self.count += 1

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def announcing(say: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Calls `say` before the first kernel that is compiled in its context, instead of loaded; yields their count."""
    listener = _Listener(say)
    with event.install_listener("numba:compile", listener):
        yield lambda: listener.count


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


def _zeros_after(typing: Any, word: Any) -> Any:
    """The signature of `zeros_after`, and the function that generates its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


def _zeros_before(typing: Any, word: Any) -> Any:
    """The signature of `zeros_before`, and the function that generates its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


# How many bits below the lowest 1, or above the highest 1, of a 64-bit word are 0; 64 for a word that is 0.
zeros_after = cast("Callable[[np.uint64], int]", intrinsic(_zeros_after))
zeros_before = cast("Callable[[np.uint64], int]", intrinsic(_zeros_before))
