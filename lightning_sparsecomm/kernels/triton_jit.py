"""Triton compilation, and the small functions that the CUDA kernels share."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl


def compiled(function: Callable[..., None]) -> Any:
    """Compiles `function` once for each combination of dtypes, constants and alignments.

    The integers named here do not become part of the kernel, so a new seed or capacity does not compile it again.
    """
    return triton.jit(function, do_not_specialize=["size", "seed", "stride", "columns", "capacity"])


# Makes a function callable from compiled kernels.
inlined: Callable[[Callable[..., Any]], Any] = triton.jit


@inlined
def own_places(size: tl.int64, block: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The `block` places that this program works on, and which of them are below `size`."""
    # 64 bits, because a vector may have 2³¹ elements or more. Kernels annotate their sizes with tl.int64 for the same
    # reason: with int, Triton would make them 32 bits wide.
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    return places, places < size


@inlined
def rounded(scalar: tl.float64, like: tl.tensor) -> tl.tensor:
    """`scalar`, rounded once to the dtype of `like`."""
    # Triton treats Python floats as float32 unless told otherwise.
    return tl.full((), scalar, tl.float64).to(like.dtype)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: object, **constants: int) -> None:
    """Runs a compiled kernel on `device`, as programs in a `grid`; an empty grid runs none."""
    # Triton's interpreter also accepts devices that are not CUDA.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if all(grid):
            # No fusion: products are rounded before they are added, as in all kernels.
            kernel[grid](*arguments, enable_fp_fusion=False, **constants)
