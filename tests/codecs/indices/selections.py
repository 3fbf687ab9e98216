"""Positions to encode: none, some and all, in small vectors and in the largest."""

from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import MAX_SIZE


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[int], int]:
    """Sorted positions and the size: none, some, all; small sizes and the largest."""
    size = draw(st.integers(0, 70) | st.sampled_from([2**16, 2**31, 2**31 + 1, MAX_SIZE]))
    if size <= 70 and draw(st.booleans()):
        return list(range(size)), size
    ends = st.integers(0, min(size, 300) - 1) | st.integers(max(0, size - 300), size - 1)
    return sorted(draw(st.sets(ends, max_size=40)) if size else set()), size
