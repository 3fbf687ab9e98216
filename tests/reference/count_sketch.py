"""Count sketches as docs/formats.md defines them, element by element, in Python integers."""

import numpy as np


def mix64(x: int) -> int:
    """SplitMix64's finalizer."""
    x %= 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def place(position: int, row: int, columns: int, seed: int) -> tuple[int, bool]:
    """An element's column, and whether it is negated there."""
    golden = 0x9E3779B97F4A7C15
    width = 64
    while width > columns:
        width //= 2
    block, i = divmod(position, width)
    key = mix64(seed + (row + 1) * golden)
    high = mix64(key + (2 * block + 1) * golden) >> 32
    signs = mix64(key + (2 * block + 2) * golden)
    return ((high * columns >> 32) + i) % columns, bool(signs >> i & 1)


def insert(table: np.ndarray, positions: list[int], values: np.ndarray, seed: int) -> None:
    """Adds values to every row of the table, in the order given and in the table's precision."""
    for row in range(table.shape[0]):
        for position, value in zip(positions, values):
            column, negated = place(position, row, table.shape[1], seed)
            table[row, column] += -value if negated else value


def query(table: np.ndarray, positions: list[int], seed: int) -> np.ndarray:
    """Medians over the rows. Of an even number of rows, half the sum of the middle two."""
    rows, columns = table.shape
    estimates = []
    for position in positions:
        read = []
        for row in range(rows):
            column, negated = place(position, row, columns, seed)
            read.append(-table[row, column] if negated else table[row, column])
        read.sort()
        middle = read[rows // 2] if rows % 2 else (read[rows // 2 - 1] + read[rows // 2]) * table.dtype.type(0.5)
        estimates.append(middle + table.dtype.type(0))
    return np.array(estimates, table.dtype)
