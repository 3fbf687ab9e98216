"""The laws of compressors."""

from functools import partial

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout, SparseVector, Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs import Compressor, PayloadError
from lightning_sparsecomm.testing.decoding import (
    check_bytes,
    check_damaged,
    check_error,
    check_length,
    check_vector,
    decoded_by,
    inputs,
    is_extreme,
)
from lightning_sparsecomm.testing.laws import check_kind, law
from lightning_sparsecomm.testing.samples import LAYOUTS, vectors


def check_compressor(compressor: Compressor, tolerance: float = 0.0) -> None:
    """Checks the laws of a compressor.

    It is pure; a payload decodes to a vector of the given length, exactly or within a tolerance where an element is
    sent; no payload is longer than `bound_bytes`, nor than 32 bytes and 16 for each element; a payload for a vector of
    another length raises `PayloadError`, and a damaged one does too or decodes to a vector of that length.

    >>> check_compressor(SparseCodec(TopK(density=0.1)))

    Args:
        compressor: The compressor.
        tolerance: Largest error of an element that is sent, relative to the largest magnitude in the vector. 0 for a
            compressor that is exact. Values close to the largest or smallest float need only be finite.

    Raises:
        AssertionError: A law is violated.
        TypeError: `compressor` is no compressor.
    """
    check_kind("compressor", compressor, Compressor)
    for layout in LAYOUTS:
        _check_layout(compressor, layout, tolerance)


def _check_layout(compressor: Compressor, layout: Layout, tolerance: float) -> None:
    name, size = f"{type(compressor).__name__}.decode", layout.size
    contexts = [Round(layout, 5, 0.5, 7, rank, 3) for rank in range(3)]
    bounds = [compressor.bound_bytes(context) for context in contexts]
    law(len(set(bounds)) == 1, f"bound_bytes must be equal on all ranks; got {bounds} in {layout}")
    for kind, x in inputs(layout):
        where = f"for {kind}, {layout}"
        before = x.clone()
        payload = compressor.encode(Vector(x), contexts[1])
        check_bytes(payload, bounds[0], f"{type(compressor).__name__}.encode", where)
        check_length(payload, layout, "a payload", where)
        law(torch.equal(x, before), f"encode changed the vector {where}")
        again = compressor.encode(Vector(x), contexts[1])
        law(torch.equal(payload, again), f"encode is not pure: two calls differ {where}")
        decoded = decoded_by(partial(compressor.decode, payload, size), name, where)
        check_vector(decoded, size, name, where)
        if is_extreme(kind):
            continue
        if isinstance(decoded, SparseVector):
            check_error(decoded.values, x[decoded.indices], x, tolerance, name, where)
        else:
            check_error(decoded, x, x, tolerance, name, where)

    def decode(data: Tensor) -> SparseVector | Tensor:
        return compressor.decode(data, size)

    def check(decoded: SparseVector | Tensor, where: str) -> None:
        check_vector(decoded, size, name, where)

    payload = compressor.encode(Vector(vectors(size)["random numbers"]), contexts[1])
    check_damaged(payload, decode, check, name, f"in the payload for {layout}")
    for other in (size + 1, 2 * size + 3):
        try:
            compressor.decode(payload, other)
        except PayloadError:
            continue
        raise AssertionError(f"{name} must raise PayloadError for a vector of {size} elements instead of {other}.")
