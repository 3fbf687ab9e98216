"""S2 Reducer in plain NumPy, all ranks in one process: the paper's algorithm 1, for DDP's gradients.

Ge et al. 2022, sections 2.2 (blocks) and 3.1 (bitmap and sketch). We divide by the number of ranks, as DDP does. Blocks
that wait keep their exact values, and a sketch's error is not fed back. The caller supplies the count sketch.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.reference.selection import k_of

Vector = NDArray[np.float32] | NDArray[np.float64]
Table = NDArray[np.float32] | NDArray[np.float64]
Insert = Callable[[Vector], Table]
Query = Callable[[Table, int], Vector]


class S2Reducer:
    """Each rank's gradient is one vector: its tensors, of `shapes`, in order. Those of one dimension are sent whole.

    After `pack`, `taken[rank]` lists the blocks that the rank sends, and `union` those that any rank sends.
    """

    def __init__(self, ranks: int, shapes: list[tuple[int, ...]], block_density: float, block_size: int) -> None:
        self.ranks, self.block_density = ranks, block_density
        self.blocks: list[slice] = []
        self.tensors: list[list[int]] = []
        self.whole: list[slice] = []
        start = 0
        for shape in shapes:
            size = math.prod(shape)
            if len(shape) < 2:
                self.whole.append(slice(start, start + size))
            else:
                blocks = blocks_of(shape, block_size)
                first = len(self.blocks)
                self.blocks += [slice(start + block.start, start + block.stop) for block in blocks]
                self.tensors.append(list(range(first, first + len(blocks))))
            start += size
        self.residuals = [np.zeros(start) for _ in range(ranks)]
        self.taken: list[list[int]] = []
        self.union: list[int] = []

    def step(self, gradients: list[Vector], insert: Insert | None = None, query: Query | None = None) -> Vector:
        """One round: the mean over ranks of what they sent, exact without a sketch. `query` takes the table and n."""
        packed = self.pack(gradients)
        if insert is None or query is None:
            total = sum(packed[1:]) + packed[0]
        else:
            table = sum(insert(each) for each in packed[1:]) + insert(packed[0])
            total = query(table, len(packed[0]))
        shared = np.zeros_like(gradients[0])
        for part in self.whole:
            shared[part] = np.mean([gradient[part] for gradient in gradients], axis=0)
        at = 0
        for b in self.union:
            block = self.blocks[b]
            size = block.stop - block.start
            shared[block] = total[at : at + size] / self.ranks
            at += size
        return shared

    def pack(self, gradients: list[Vector]) -> list[Vector]:
        """Each rank's blocks of the union, in order, zero where it sends none. Updates the residuals."""
        self.taken, given = [], []
        for residual, gradient in zip(self.residuals, gradients):
            v = residual + gradient
            taken = sorted(b for tensor in self.tensors for b in self.chosen(v, tensor))
            sent = np.zeros_like(v)
            for b in taken:
                sent[self.blocks[b]] = v[self.blocks[b]]
            residual[:] = v - sent
            for part in self.whole:
                residual[part] = 0
            self.taken.append(taken)
            given.append(sent)
        bitmaps = [[b in taken for b in range(len(self.blocks))] for taken in self.taken]
        self.union = [b for b in range(len(self.blocks)) if any(bitmap[b] for bitmap in bitmaps)]
        return [np.concatenate([np.zeros(0), *(sent[self.blocks[b]] for b in self.union)]) for sent in given]

    def chosen(self, v: Vector, tensor: list[int]) -> list[int]:
        """A tensor's blocks to send: all non-zero ones if they are fewer than half, else the K of largest norm."""
        norms = {b: float(np.sqrt(np.sum(v[self.blocks[b]].astype(np.float64) ** 2))) for b in tensor}
        nonzero = [b for b in tensor if norms[b] > 0]
        if 2 * len(nonzero) < len(tensor):
            return nonzero
        # No two norms are equal here, so ties need no rule.
        return sorted(nonzero, key=lambda b: norms[b], reverse=True)[: k_of(self.block_density, len(tensor))]


def blocks_of(shape: tuple[int, ...], block_size: int) -> list[slice]:
    """Splits every row (equal first index) into blocks of at most `block_size` elements."""
    row = math.prod(shape[1:])
    return [
        slice(i * row + start, i * row + min(row, start + block_size))
        for i in range(shape[0])
        for start in range(0, row, block_size)
    ]
