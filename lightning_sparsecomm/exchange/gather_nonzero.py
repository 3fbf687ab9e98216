"""What is not zero, gathered: how frameworks share the gradients of embeddings."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, SparseVector, Vector
from lightning_sparsecomm.codecs import Compressor, Float32, Float64, IndexCoding, Runs, ValueCodec
from lightning_sparsecomm.codecs.sparse import decode_sparse, encode_sparse
from lightning_sparsecomm.exchange.base import SparseExchange
from lightning_sparsecomm.exchange.gather import Gather
from lightning_sparsecomm.kernels import kernels_for


class NonZero(Compressor):
    """Sends the elements that are not zero, or those that a sparse gradient holds. Exact by default.

    A payload has 16 bytes, the positions in a code, and 4 for each element (8 in float64), or what `values` says.

    >>> context = Round(Layout([("table", (4, 2))]))
    >>> payload = NonZero().encode(Vector(torch.tensor([0.0, 0, 1, 2, 0, 0, 0, 0])), context)
    >>> payload.numel(), NonZero().decode(payload, size=8).indices
    (32, tensor([2, 3]))

    Args:
        indices: Encodes positions; the default has 8 bytes for each run of elements, such as a row.
        values: Encodes values; None keeps them exact.
    """

    def __init__(self, indices: IndexCoding = Runs(), values: ValueCodec | None = None) -> None:  # noqa: B008
        self.indices, self.values = indices, values

    def encode(self, x: Vector, context: Round) -> Tensor:
        indices, values = x.indices, x.values
        if indices is None:
            indices = values.nonzero().view(-1)
            values = values[indices]
        codec = self.values or (Float64() if context.dtype == torch.float64 else Float32())
        return encode_sparse(SparseVector(indices, values, context.layout.size), context.layout, codec, self.indices)

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        return decode_sparse(payload, size)


class GatherNonZero(Gather, SparseExchange):
    """The mean of vectors that are mostly zero: each rank sends all ranks what is not. Exact, unless `values` rounds.

    Bytes handed over: 24 and the headers, 8 for each run of elements, and 4 for each element, or what `values` says.
    They go to all others, so that the link has W − 1 times as many.

    Source: how torch's DDP shares sparse gradients, and Parallax (Kim et al. 2019) without its parameter servers.

    >>> GatherNonZero()
    GatherNonZero()

    Args:
        values: Encodes values, such as `BFloat16()`; None keeps them exact. What is rounded off is lost.
        may_reduce: Whether an all-reduce of everything takes its place where that costs less. Not for sparse gradients.
    """

    takes_sparse: ClassVar[bool] = True

    def __init__(self, values: ValueCodec | None = None, may_reduce: bool = False) -> None:
        super().__init__(NonZero(values=values))
        self.values, self.may_reduce = values, may_reduce

    def combined(
        self, vectors: Iterator[SparseVector | Tensor], own: int, dtype: torch.dtype
    ) -> tuple[SparseVector, SparseVector | Tensor]:
        sent = list(vectors)
        held = [each for each in sent if isinstance(each, SparseVector)]
        values = torch.cat([each.values.to(dtype) for each in held])
        indices, sums = kernels_for(values.device, dtype).add_up(torch.cat([each.indices for each in held]), values)
        return SparseVector(indices, sums.div_(len(sent)), held[0].size), sent[own]

    def __repr__(self) -> str:
        options = [] if self.values is None else [repr(self.values)]
        return f"GatherNonZero({', '.join(options + ['may_reduce=True'] * self.may_reduce)})"
