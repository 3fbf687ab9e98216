"""How a law is stated, and what all of them are checked with."""

from functools import cache

import torch
from torch import Tensor

from lightning_sparsecomm.kernels import Update, kernels_for, position_kernels_for


def law(holds: bool, sentence: str) -> None:
    """Raises an AssertionError that says what was violated, unless the law holds."""
    if not holds:
        raise AssertionError(f"{sentence}.")


def check_close(ours: Tensor, theirs: Tensor, tolerance: float, sentence: str, where: str) -> None:
    """Raises an AssertionError where two tensors differ by more than a tolerance times the largest magnitude, or 1."""
    if not theirs.numel():
        return
    off = float((ours.to(torch.float64) - theirs.to(torch.float64)).abs().max())
    allowed = tolerance * max(1.0, float(theirs.abs().max()))
    law(off <= allowed, f"{sentence}; it is off by {off:.3g}, more than {allowed:.3g}, {where}")


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)


def _bits(tensor: Tensor) -> bytes:
    # As bytes first: NumPy has no bfloat16.
    return bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@cache
def load_kernels() -> None:
    """Compiles or loads the kernels, once for all ranks that are forked later: it takes seconds."""
    positions = position_kernels_for(torch.device("cpu"))
    positions.read_bitmap(positions.write_bitmap(torch.tensor([0, 3]), 4), 2)
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(2, dtype=dtype)
        kernels = kernels_for(x.device, dtype)
        kernels.update_(Update(x.clone(), x, x.clone()), 0.5, 2)
        kernels.probe(Update(x.clone(), x), 1)
        kernels.kth_largest(x, 1)
        kernels.largest(x, 1, 0)
        kernels.reaching(x, 0.5, 2)
        kernels.add_up(torch.tensor([0, 1]), x)


def check_kind(name: str, part: object, kind: type) -> None:
    """Refuses what is no part of the kind that is checked, such as its class, or what makes it.

    Raises:
        TypeError: `part` is no object of `kind`.
    """
    if not isinstance(part, kind):
        raise TypeError(f"{name} must be an object of a class derived from {kind.__name__}; got {part!r}.")


def check_factory(name: str, factory: object, kind: type, attribute: str = "") -> None:
    """Refuses a part where something that makes it is asked for: parts with state are made several times.

    Args:
        name: Of the argument.
        factory: What should make the part.
        kind: Of part.
        attribute: One that the constructor of `kind` sets; empty for none.

    Raises:
        AssertionError: The part's constructor does not call that of `kind`.
        TypeError: `factory` cannot be called, or makes no such part.
    """
    if not callable(factory):
        raise TypeError(
            f"{name} must make the part, which is needed several times; got {factory!r}. Use"
            f" lambda: {type(factory).__name__}(...)."
        )
    part = factory()
    check_kind(f"what {name} makes", part, kind)
    law(
        not attribute or hasattr(part, attribute),
        f"{type(part).__name__}.__init__ must call super().__init__(), which makes {attribute!r}",
    )
