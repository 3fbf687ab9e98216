"""The k largest elements, by definition and with a plain sort."""

import numpy as np


def k_of(density: float, size: int) -> int:
    """How many of `size` elements a density asks for."""
    return min(size, max(1, round(density * size)))


def top_k(x: np.ndarray, k: int, seed: int) -> list[int]:
    """The positions, in order, of the min(k, non-zeros) elements of largest magnitude. A zero is never among them.

    Where T elements tie for the last m places, it takes those numbered (seed + floor(j T / m)) mod T, for j below m, in
    order of position.
    """
    magnitudes = [abs(float(value)) for value in x]
    nonzero = [i for i, magnitude in enumerate(magnitudes) if magnitude != 0]
    k = min(k, len(nonzero))
    if k == 0:
        return []
    threshold = sorted((magnitudes[i] for i in nonzero), reverse=True)[k - 1]
    above = [i for i in nonzero if magnitudes[i] > threshold]
    tied = [i for i in nonzero if magnitudes[i] == threshold]
    places, ties = k - len(above), len(tied)
    return sorted(above + [tied[(seed + j * ties // places) % ties] for j in range(places)])
