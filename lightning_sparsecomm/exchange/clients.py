"""A mean over some of the ranks, which need not count alike: the rounds of Federated Averaging."""

import math
from collections.abc import Sequence

import torch

from lightning_sparsecomm.basis import Round, Vector, Wire
from lightning_sparsecomm.basis.arguments import is_number
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.dense import DenseAllReduce, WireDtype


class ClientMean(Exchange):
    """The weighted mean of whole vectors of some ranks, drawn anew in each round, by one all-reduce.

    Ranks that take no part have sent nothing: their vectors count as zero, and wait where there is error feedback. An
    all-reduce takes as many bytes however many ranks take part.

    What is shared is Σ w·x / Σ w over those that take part, and not the mean over all ranks of what they sent.

    Bytes handed over: as `DenseAllReduce`.

    Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data, algorithm 1:
    max(C·K, 1) clients in each round, with weights n_k / n.

    >>> ClientMean(fraction=0.5).ranks(Round(Layout([]), step=3, world_size=4))
    [0, 1]

    Args:
        fraction: C, the part of the ranks that take part in a round, in (0, 1]; at least one does.
        weights: n_k, for example how many samples each rank has, in the order of ranks; None for equal weights.
        wire_dtype: As for `DenseAllReduce`.

    Raises:
        ValueError: `fraction` is outside (0, 1], a weight is not positive, or `wire_dtype` is unknown; before the first
            step, there is not a weight for each rank.
    """

    def __init__(
        self, fraction: float = 1.0, weights: Sequence[float] | None = None, wire_dtype: WireDtype = "same"
    ) -> None:
        if not (is_number(fraction) and 0 < fraction <= 1):
            raise ValueError(
                f"fraction must be in (0, 1]: the part of the ranks that take part in a round; got {fraction!r}. Use 1"
                " for all."
            )
        listed = weights is None or (
            isinstance(weights, Sequence) and not isinstance(weights, (str, bytes)) and weights
        )
        if not listed or not all(is_number(each) and 0 < each < math.inf for each in weights or ()):
            raise ValueError(
                "weights must be a positive number for each rank, such as its number of samples; got"
                f" {weights!r}. Use None for equal weights."
            )
        self.fraction = fraction
        self.weights = None if weights is None else tuple(weights)
        self.wire_dtype = wire_dtype
        self._dense = DenseAllReduce(wire_dtype)

    def check_ranks(self, world_size: int) -> None:
        if self.weights is not None and len(self.weights) != world_size:
            raise ValueError(
                f"weights must be a positive number for each of {world_size} ranks; got {len(self.weights)}. Give"
                f" {world_size} numbers, or None for equal weights."
            )

    def ranks(self, context: Round) -> list[int]:
        """Those that take part in this round; equal on all ranks."""
        count = max(1, round(self.fraction * context.world_size))
        drawn = torch.randperm(context.world_size, generator=context.shared_generator())[:count]
        chosen: list[int] = drawn.sort().values.tolist()
        return chosen

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        values, ranks = dense_values(x, self), self.ranks(context)
        self.check_ranks(wire.world_size)
        weights = self.weights or (1.0,) * wire.world_size
        takes_part = wire.rank in ranks
        # The sum is divided by all ranks.
        factor = weights[wire.rank] * wire.world_size / sum(weights[each] for each in ranks)
        given = values if factor == 1 else values * factor
        given = given if takes_part else torch.zeros_like(values)
        exchanged = self._dense.exchange(x._replace(values=given), context, wire)
        sent = exchanged.sent
        if takes_part and factor != 1:
            assert isinstance(sent, torch.Tensor)
            # What was rounded on the wire is not sent.
            sent = values if sent is given else sent / factor
        return exchanged._replace(sent=sent)

    def abort(self) -> None:
        self._dense.abort()
