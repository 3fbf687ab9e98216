"""Ranks send −1, 0 or 1 for each element, and add these up: a piece of the vector each."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, Vector, Wire, phase
from lightning_sparsecomm.basis.arguments import is_number
from lightning_sparsecomm.codecs import Digits, Envelope, PayloadError, open_envelope, seal
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.status import masked, read_envelopes, sealed_status

_LARGEST = torch.finfo(torch.float32).max


class MajorityVote(Exchange):
    """The sign that most ranks have, for each element: −1 or 1, or 0 where as many are for as against. Biased.

    A rank sends the signs of its pieces of the vector to their owners, which add them up and send the signs of the sums
    to all. Zeros count for neither side, and so does what a rank has no gradient for. What is shared is not the mean of
    what ranks sent, so no residual can make up for what it loses.

    Bytes on the link: 2 (W − 1) / W times 1.6 bits for each element, whatever W is, and 16 for each of 2 (W − 1)
    messages. A gather of signs takes W − 1 times 1.6 bits, and sums in whole bytes 2 (W − 1) / W times 8.

    Source: Bernstein et al. 2018, signSGD: Compressed Optimisation for Non-Convex Problems, section 3.3.

    >>> MajorityVote()
    MajorityVote()
    """

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        signs = dense_values(x, self).sign()
        votes, present = _summed(signs, x, context, wire, Digits(1), torch.sign)
        shared, sent = (masked(each.to(x.values), present, context.layout) for each in (votes, signs))
        return Exchanged(shared, sent, present)

    def __repr__(self) -> str:
        return "MajorityVote()"


class TernarySum(Exchange):
    """The mean of vectors of −s, 0 and s, to which ranks round at random: s is the largest magnitude in a tensor.

    First, each rank limits elements to `clip` times their root mean square in their tensor; ranks then agree on the
    largest magnitude s of all of them. An element x becomes sign(x) · s with probability |x| / s, else 0. Unbiased but
    for the clipping. As s is that of all ranks, their sum is a whole number, which owners of pieces send to all.

    Draws are new in each round and on each rank, and have 24 bits.

    Bytes on the link: (W − 1) / W times 1.6 bits for each element and as many for its sum, 2.7 with two ranks, 3.2 with
    three or four, 5.3 with 8 to 19; 4 for each tensor from each other rank; 16 for each of 3 (W − 1) messages.

    Source: Wen et al. 2017, TernGrad, algorithm 1, with layer-wise scales that ranks share and gradient clipping. The
    paper's σ is about the mean, which is taken to be zero; so it is here.

    >>> TernarySum()
    TernarySum(clip=2.5)

    Args:
        clip: c, in root mean squares; None clips nothing.

    Raises:
        ValueError: `clip` is not positive.
    """

    def __init__(self, clip: float | None = 2.5) -> None:
        if clip is not None and not (is_number(clip) and clip > 0):
            raise ValueError(
                f"clip must be positive: times a tensor's root mean square; got {clip!r}. Use 2.5 or None."
            )
        self.clip = clip

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values, layout = dense_values(x, self), context.layout
        with phase("encode"):
            bounds = [self._bound(part) for part in layout.flats(values)]
        scales = _largest_of(bounds, x, context, wire)
        with phase("encode"):
            source = context.rank_generator(values.device)
            rounded = torch.rand(values.shape, generator=source, dtype=torch.float32, device=values.device)
            for draws, part, bound, scale in zip(layout.flats(rounded), layout.flats(values), bounds, scales):
                # Where all ranks' tensors are zero, so is the scale.
                chances = part.abs().clamp_(max=bound).div_(scale or math.inf)
                draws.copy_(chances.gt(draws)).mul_(part.sign())
        sums, present = _summed(rounded, x, context, wire, Digits(wire.world_size))
        with phase("decode"):
            shared, sent = sums.to(values), rounded.to(values.dtype)
            for vector, ranks in ((shared, wire.world_size), (sent, 1)):
                for part, scale in zip(layout.flats(vector), scales):
                    part.mul_(scale / ranks)
        return Exchanged(masked(shared, present, layout), masked(sent, present, layout), present)

    def _bound(self, part: Tensor) -> float:
        """The largest magnitude in `[n]` after clipping, rounded to float32."""
        largest = float(part.abs().max()) if part.numel() else 0.0
        if self.clip is not None and largest > 0 and math.isfinite(largest):
            # Relative to the largest, so that no square is too large or too small.
            norm = float(torch.linalg.vector_norm(part / largest, dtype=torch.float64))
            largest *= min(1.0, self.clip * norm / math.sqrt(part.numel()))
        return float(torch.tensor(min(largest, _LARGEST), dtype=torch.float32))

    def __repr__(self) -> str:
        return f"TernarySum(clip={self.clip})"


def _largest_of(bounds: Sequence[float], x: Vector, context: Round, wire: Wire) -> list[float]:
    """The largest of all ranks' bounds, one for each tensor; float32.

    Raises:
        NonFiniteGradientError: Some rank has a gradient that is not finite; raised on all of them.
        PayloadError: What a rank has sent is no such bounds.
    """
    body = torch.tensor(bounds, dtype=torch.float32).view(torch.uint8).to(x.values.device)
    gathered = wire.all_gather(sealed_status(body, x, context)).cpu()
    # Open all before using any: all ranks agree on which error comes first.
    envelopes = [open_envelope(message, context.layout, rank) for rank, message in enumerate(gathered)]
    read_envelopes(envelopes, context)
    largest = torch.zeros(len(bounds))
    for rank, envelope in enumerate(envelopes):
        if envelope.body.numel() != 4 * len(bounds):
            expected = f"{4 * len(bounds)} for {len(bounds)} tensors"
            raise PayloadError(
                f"rank {rank}'s payload: scales: has {envelope.body.numel()} bytes, expected {expected}."
            )
        # The copy is aligned, wherever the bytes lie in what was received.
        theirs = envelope.body.clone().view(torch.float32)
        if bool((theirs.signbit() | ~theirs.isfinite()).any()):
            raise PayloadError(f"rank {rank}'s payload: scales: one is not a finite number, or negative.")
        largest = torch.maximum(largest, theirs)
    return largest.tolist()


def _summed(
    numbers: Tensor,
    x: Vector,
    context: Round,
    wire: Wire,
    digits: Digits,
    of_sums: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[bool]]:
    """The sum over ranks of `numbers`, each −1, 0 or 1, or a function of it; and which segments are present on any.

    Each rank adds up one of W equal pieces. Two collectives.

    Args:
        numbers: `[n]`, on this rank; anything where a gradient is not finite.
        x: What this rank brings: its status.
        context: As for `Exchange.exchange`.
        wire: The same.
        digits: How results are written.
        of_sums: Of the sums, `[n / W]` int16; the numbers to share. None shares the sums.

    Returns:
        `[n]` int16 on the CPU, equal on all ranks.
    """
    n, ranks, layout = numbers.numel(), wire.world_size, context.layout
    length, signs = -(-n // ranks), Digits(1)
    with phase("encode"):
        if x.nonfinite_segment is not None:
            numbers = torch.zeros_like(numbers)
        pieces = torch.nn.functional.pad(numbers, (0, ranks * length - n)).view(ranks, length)
        messages = torch.stack([sealed_status(signs.encode(piece), x, context) for piece in pieces])
    received = wire.all_to_all(messages).cpu()
    with phase("decode"):
        envelopes = [open_envelope(message, layout, rank) for rank, message in enumerate(received)]
        present = read_envelopes(envelopes, context)
        sums = torch.zeros(length, dtype=torch.int16)
        for rank, envelope in enumerate(envelopes):
            sums.add_(_read(signs, envelope, length, rank))
    with phase("encode"):
        result = digits.encode(sums if of_sums is None else of_sums(sums))
        message = seal(Envelope(result.to(numbers.device)), layout)
    gathered = wire.all_gather(message).cpu()
    with phase("decode"):
        opened = [open_envelope(each, layout, rank) for rank, each in enumerate(gathered)]
        found = torch.cat([_read(digits, envelope, length, rank) for rank, envelope in enumerate(opened)])
    return found[:n], present


def _read(digits: Digits, envelope: Envelope, count: int, rank: int) -> Tensor:
    try:
        return digits.decode(envelope.body, count)
    except PayloadError as error:
        raise PayloadError(f"rank {rank}'s payload: {error}") from error
