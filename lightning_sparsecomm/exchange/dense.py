"""Everything is sent: one all-reduce."""

from collections.abc import Callable
from typing import Literal

import torch

from lightning_sparsecomm.exchange.base import Exchange, Exchanged, NonFiniteGradientError, Outgoing
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import Wire

WireDtype = Literal["same", "float32", "float16", "bfloat16"]
WIRE_DTYPES: dict[str, torch.dtype | None] = {
    "same": None,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def check_wire_dtype(wire_dtype: str) -> None:
    """Refuses an unknown name.

    Raises:
        ValueError: `wire_dtype` is none of the known ones.
    """
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(
            f"wire_dtype must be one of {', '.join(WIRE_DTYPES)}; got {wire_dtype!r}."
            " 'same' sends each gradient in its own dtype."
        )


def addend_limit(dtype: torch.dtype, addends: int) -> float:
    """What each of so many addends may reach for their sum to be finite in this dtype, in whatever order they are
    added: rounding, of each addend and after each addition, may make it larger by half an epsilon every time."""
    numbers = torch.finfo(dtype)
    return float(numbers.max / (addends * (1 + numbers.eps / 2) ** addends))


class DenseAllReduce(Exchange):
    """The mean of whole vectors, by one all-reduce. Exact but for the wire's rounding; unbiased.

    Bytes handed over: one element of the wire's dtype for each of the n elements, and one for each tensor (how many
    ranks have a gradient for it, which DDP finds out with a collective of its own).

    Args:
        wire_dtype: Dtype on the wire; "same" is the dtype that the vector has. In float16 elements beyond
            some ±65,000 (40,000 with a thousand ranks) are sent as that much, so that no sum overflows.

    Raises:
        ValueError: Unknown `wire_dtype`.
    """

    def __init__(self, wire_dtype: WireDtype = "same") -> None:
        check_wire_dtype(wire_dtype)
        self.wire_dtype = wire_dtype

    @property
    def overlaps(self) -> bool:
        """Not where a subclass does otherwise: what `begin` has sent it could not change any more."""
        return type(self).run is DenseAllReduce.run

    def begin(self, outgoing: Outgoing, round: Round, wire: Wire) -> Outgoing:
        return outgoing._replace(begun=self._begun(outgoing, round, wire)) if self.overlaps else outgoing

    def run(self, outgoing: Outgoing, round: Round, wire: Wire) -> Exchanged:
        end = outgoing.begun or self._begun(outgoing, round, wire)
        return end()

    def _begun(self, outgoing: Outgoing, round: Round, wire: Wire) -> Callable[[], Exchanged]:
        x, present, nonfinite_segment = self.dense(outgoing), outgoing.present, outgoing.nonfinite_segment
        n = x.numel()
        buffer = x.new_empty(n + len(present), dtype=WIRE_DTYPES[self.wire_dtype])
        # Divided before the sum, so that float16 does not overflow where the mean would not.
        torch.div(x, wire.world_size, out=buffer[:n])
        if buffer.dtype == torch.float16:
            limit = addend_limit(buffer.dtype, wire.world_size)
            buffer[:n].clamp_(-limit, limit)
        buffer[n:] = torch.tensor(present, dtype=buffer.dtype)
        if nonfinite_segment is not None:
            # Spreads to all ranks by the sum.
            buffer[n + nonfinite_segment] = float("nan")
        sent = x if buffer.dtype == x.dtype else buffer[:n].to(x.dtype) * wire.world_size
        wait = wire.all_reduce_later_(buffer)

        def end() -> Exchanged:
            wait()
            if bool(buffer[n:].isnan().any()):
                raise NonFiniteGradientError.found_on_any(nonfinite_segment, round, wire, x.device)
            return Exchanged(buffer[:n].to(x.dtype), sent, (buffer[n:] > 0).tolist())

        return end

    def __repr__(self) -> str:
        return f"DenseAllReduce(wire_dtype={self.wire_dtype!r})"
