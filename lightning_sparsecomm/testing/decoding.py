"""What the laws of codecs and compressors have in common: what is encoded, and what must come out of decoding."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout, SparseVector
from lightning_sparsecomm.codecs import PayloadError
from lightning_sparsecomm.testing.laws import law
from lightning_sparsecomm.testing.samples import LAYOUT, damaged, vectors

# Receivers believe no payload that is longer.
_HEAD_BYTES, _ELEMENT_BYTES = 32, 16

Decoded = TypeVar("Decoded", bound=Tensor | SparseVector)


def inputs(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """What is encoded, with a name."""
    for dtype in (torch.float32, torch.float64) if layout is LAYOUT else (torch.float32,):
        for kind, x in vectors(layout.size, dtype).items():
            yield f"{kind}, {dtype}", x


def is_extreme(kind: str) -> bool:
    """Whether these are numbers that a codec may round by any amount."""
    return kind.startswith(("the largest numbers", "the smallest numbers"))


def decoded_by(decode: Callable[[], Decoded], what: str, where: str) -> Decoded:
    """What `decode` returns for what its own codec has encoded."""
    try:
        return decode()
    except PayloadError as error:
        raise AssertionError(f"{what} must decode what encode returned; it raised {error!r} {where}.") from error


def check_positions(indices: Tensor, size: int, what: str, where: str) -> None:
    """Sorted positions in a vector of `size` elements."""
    law(isinstance(indices, Tensor), f"{what} must return positions as [k] int64; got {indices!r} {where}")
    law(
        indices.dtype == torch.int64 and indices.dim() == 1,
        f"{what} must return positions as [k] int64; got {list(indices.shape)} {indices.dtype} {where}",
    )
    law(bool((indices.diff() > 0).all()), f"{what} must return strictly increasing positions {where}")
    within = not indices.numel() or (int(indices[0]) >= 0 and int(indices[-1]) < size)
    law(within, f"{what} must return positions from 0 to {size - 1} {where}")


def check_values(values: Tensor, count: int, what: str, where: str) -> None:
    """`count` finite values."""
    law(isinstance(values, Tensor), f"{what} must return [{count}] float32 or float64; got {values!r} {where}")
    law(
        values.dtype in (torch.float32, torch.float64) and values.shape == (count,),
        f"{what} must return [{count}] float32 or float64; got {list(values.shape)} {values.dtype} {where}",
    )
    law(bool(values.isfinite().all()), f"{what} must return finite values {where}")


def check_vector(vector: SparseVector | Tensor, size: int, what: str, where: str) -> None:
    """A sparse or dense vector of `size` finite elements."""
    if isinstance(vector, SparseVector):
        check_positions(vector.indices, size, what, where)
        check_values(vector.values, vector.indices.numel(), what, where)
        law(vector.size == size, f"{what} must return a vector of {size} elements; got {vector.size} {where}")
    else:
        check_values(vector, size, what, where)


def check_bytes(section: Tensor, bound: int | None, what: str, where: str) -> None:
    """Bytes, at most as many as their bound."""
    law(isinstance(section, Tensor), f"{what} must return [bytes] uint8; got {section!r} {where}")
    law(
        section.dtype == torch.uint8 and section.dim() == 1,
        f"{what} must return [bytes] uint8; got {list(section.shape)} {section.dtype} {where}",
    )
    law(
        bound is None or section.numel() <= bound,
        f"{what} returned {section.numel()} bytes, more than bound_bytes, {bound}, {where}",
    )


def check_length(payload: Tensor, layout: Layout, what: str, where: str) -> None:
    """At most as many bytes as receivers believe."""
    most = _HEAD_BYTES + _ELEMENT_BYTES * layout.size
    law(
        payload.numel() <= most,
        f"{what} must have at most {_HEAD_BYTES} bytes and {_ELEMENT_BYTES} for each element, {most}, as receivers"
        f" believe no more; got {payload.numel()} {where}",
    )


def check_error(decoded: Tensor, values: Tensor, largest: Tensor, tolerance: float, what: str, where: str) -> None:
    """Values within a tolerance, relative to the largest magnitude in `largest`."""
    if not values.numel():
        return
    # A codec that is exact for float32 may round float64.
    allowed = tolerance if values.dtype == torch.float32 else max(tolerance, 1e-6)
    error = float((decoded.to(torch.float64) - values.to(torch.float64)).abs().max())
    most = allowed * float(largest.abs().max()) * (1 + 1e-6)
    law(error <= most, f"{what} is off by {error:.3g}, more than {most:.3g} (tolerance {allowed}), {where}")


def check_damaged(
    data: Tensor, decode: Callable[[Tensor], Decoded], check: Callable[[Decoded, str], None], what: str, where: str
) -> None:
    """Altered bytes raise `PayloadError`, or decode to what passes `check`."""
    for damage, altered in damaged(data):
        try:
            decoded = decode(altered)
        except PayloadError:
            continue
        except Exception as error:
            raise AssertionError(
                f"{what} must raise PayloadError, or decode to a sound result, with {damage} {where}; it raised"
                f" {type(error).__name__}: {error}."
            ) from error
        check(decoded, f"with {damage} {where}")
