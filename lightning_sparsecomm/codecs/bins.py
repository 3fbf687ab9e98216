"""Bins of fixed length, each with its own threshold: adaptive residual compression."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_booleans, check_whole_number
from lightning_sparsecomm.basis.layout import Segment, SparseVector, Vector
from lightning_sparsecomm.basis.phases import phase
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs.auto import Auto
from lightning_sparsecomm.codecs.compressor import EnteringCompressor
from lightning_sparsecomm.codecs.signed_means import SignedMeans
from lightning_sparsecomm.codecs.sparse import decode_sparse, encode_sparse

_LARGEST = torch.finfo(torch.float32).max
_FEWEST_DIMENSIONS = 3


@dataclass(frozen=True)
class AdaptiveBins(EnteringCompressor):
    """Sends those elements of each bin that the next step could make its largest, as ± one magnitude for the tensor.

    A bin is so many consecutive elements of a tensor; the last one may have fewer. Let x be the vector, residual
    included, and g what this round has added to it. An element is sent where |x + g| is at least the largest |x| of its
    bin. It is sent as sign(x) times the mean of all bins' largest |x| in the tensor. So how much is sent follows from
    how much is left and how fast it grows, and no density is given. Without a residual, g is x. Zeros are never sent.

    The shared magnitude may be far above an element: in a bin whose elements are all small, sending one adds more to
    the residual than it takes away. With `all_bins=False`, elements below half of that magnitude wait; what is sent is
    then never farther from the vector than zero is.

    A payload has 16 bytes, positions in the shortest code, 5 to 9 bytes for each tensor, and a bit for each element.

    Source: Chen et al. 2018, AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training,
    algorithm 2.

    >>> compressor, context = AdaptiveBins(bin_size=2), Round(Layout([("weight", (4,))]))
    >>> x = Vector(torch.tensor([3.0, 1.0, -2.0, -1.5]), entering=torch.tensor([0.5, 0.5, 0.0, -1.0]))
    >>> compressor.decode(compressor.encode(x, context), size=4).dense()
    tensor([ 2.5000,  0.0000, -2.5000, -2.5000])

    Args:
        bin_size: Elements in a bin.
        convolution_bin_size: The same in tensors of three or more dimensions.
        all_bins: Whether elements below half of the magnitude are sent too, as in the paper.

    Raises:
        ValueError: A size is not a whole number of at least 1.
        TypeError: `all_bins` is neither True nor False.
    """

    bin_size: int = 500
    convolution_bin_size: int = 50
    all_bins: bool = True

    _values: ClassVar[SignedMeans] = SignedMeans(1)
    _indices: ClassVar[Auto] = Auto()

    def __post_init__(self) -> None:
        for name in ("bin_size", "convolution_bin_size"):
            meaning, remedy = "elements in a bin", "Use 500, and 50 for convolutions, as in the paper."
            check_whole_number(name, getattr(self, name), 1, meaning, remedy)
        check_booleans(all_bins=self.all_bins)

    def encode(self, x: Vector, context: Round) -> Tensor:
        return encode_sparse(self.select(x, context), context.layout, self._values, self._indices)

    def select(self, x: Vector, context: Round) -> SparseVector:
        """The elements that `encode` sends, as they are decoded."""
        entering = x.values if x.entering is None else x.entering
        layout = context.layout
        with phase("select"):
            indices = [torch.empty(0, dtype=torch.int64, device=x.values.device)]
            values = [x.values[:0]]
            for segment, part, added in zip(layout.segments, layout.flats(x.values), layout.flats(entering)):
                if segment.size:
                    at, magnitude = self._chosen(segment, part, added)
                    indices.append(at + segment.offset)
                    values.append(torch.where(part[at] < 0, -magnitude, magnitude).to(part.dtype))
        return SparseVector(torch.cat(indices), torch.cat(values), layout.size)

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        return decode_sparse(payload, size)

    def _chosen(self, segment: Segment, values: Tensor, entering: Tensor) -> tuple[Tensor, Tensor]:
        """Positions in a tensor's elements; and the magnitude that they share, float64."""
        convolution = len(segment.shape) >= _FEWEST_DIMENSIONS
        length = min(self.convolution_bin_size if convolution else self.bin_size, segment.size)
        bins = math.ceil(segment.size / length)
        magnitudes = values.abs()
        padded = torch.nn.functional.pad(magnitudes, (0, bins * length - segment.size))
        largest = padded.view(bins, length).amax(1)
        magnitude = largest.to(torch.float64).clamp(max=_LARGEST).mean()
        thresholds = largest[:, None].expand(bins, length).reshape(-1)[: segment.size]
        chosen = ((values + entering).abs() >= thresholds) & (magnitudes > 0)
        if not self.all_bins:
            chosen &= magnitudes >= magnitude / 2
        return chosen.nonzero().view(-1), magnitude
