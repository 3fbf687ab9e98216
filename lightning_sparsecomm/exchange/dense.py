"""Everything is sent: one all-reduce."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, Vector, Wire, phase
from lightning_sparsecomm.basis.arguments import check_one_of
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.status import read_counts, write_counts_

WireDtype = Literal["same", "float32", "float16", "bfloat16"]
WIRE_DTYPES: dict[str, torch.dtype | None] = {
    "same": None,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def check_wire_dtype(wire_dtype: str, known: Iterable[str] = WIRE_DTYPES) -> None:
    """Raises `ValueError` for an unknown name."""
    check_one_of("wire_dtype", wire_dtype, known, "Use 'same' to send each vector in its own dtype.")


def addend_limit(dtype: torch.dtype, addends: int) -> float:
    """The largest magnitude that each of so many addends may have for their sum to be finite in this dtype.

    It holds for any order of summation: rounding an addend, or a sum, may enlarge it by half an epsilon each time.
    """
    numbers = torch.finfo(dtype)
    return float(numbers.max / (addends * (1 + numbers.eps / 2) ** addends))


class _Started(NamedTuple):
    """An all-reduce in progress."""

    # `[n + segments]`: this rank's part of the mean, and its status; once `wait` returns, the sums.
    buffer: Tensor
    # `[n]`: what this rank sent, as received.
    sent: Tensor
    wait: Callable[[], None]


class DenseAllReduce(Exchange):
    """The mean of whole vectors, by one all-reduce. Exact except for rounding on the wire; unbiased.

    Bytes handed over: one element of the wire's dtype for each of the n elements and for each tensor. The latter count
    the ranks that have a gradient for the tensor, for which DDP needs a collective of its own.

    >>> DenseAllReduce("bfloat16")
    DenseAllReduce(wire_dtype='bfloat16')

    Args:
        wire_dtype: Dtype on the wire; "same" is the vector's own. In float16, elements beyond about ±65,000 (40,000
            with a thousand ranks) are clamped, so that no sum overflows.

    Raises:
        ValueError: Unknown `wire_dtype`.
    """

    def __init__(self, wire_dtype: WireDtype = "same") -> None:
        check_wire_dtype(wire_dtype)
        self.wire_dtype = wire_dtype
        self._started: _Started | None = None

    @property
    def overlaps(self) -> bool:
        """Not where a subclass overrides `exchange`: it could no longer change what has been started."""
        return type(self).exchange is DenseAllReduce.exchange

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        if self.overlaps:
            self._started = self._start(x, context, wire)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        buffer, sent, wait = self._started or self._start(x, context, wire)
        self._started = None
        n = x.values.numel()
        wait()
        present = read_counts(buffer[n:], x, context, wire)
        return Exchanged(buffer[:n].to(x.values.dtype), sent, present)

    def abort(self) -> None:
        self._started = None

    def _start(self, x: Vector, context: Round, wire: Wire) -> _Started:
        values = dense_values(x, self)
        n = values.numel()
        with phase("encode"):
            buffer = values.new_empty(n + len(context.layout.segments), dtype=WIRE_DTYPES[self.wire_dtype])
            # Divided before the sum, so that float16 does not overflow where the mean would not.
            torch.div(values, wire.world_size, out=buffer[:n])
            if buffer.dtype == torch.float16:
                limit = addend_limit(buffer.dtype, wire.world_size)
                buffer[:n].clamp_(-limit, limit)
                wire.ledger.clamp(int((buffer[:n].abs() == limit).sum()), limit)
            write_counts_(buffer[n:], x)
            sent = values if buffer.dtype == values.dtype else buffer[:n].to(values.dtype) * wire.world_size
        return _Started(buffer, sent, wire.all_reduce_later_(buffer))
