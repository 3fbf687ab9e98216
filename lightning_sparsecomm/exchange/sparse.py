"""The mean of what ranks have selected, by whichever way costs least."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Collective, Layout, Round, Vector, Wire, link_bytes
from lightning_sparsecomm.basis.arguments import check_one_of
from lightning_sparsecomm.basis.far import call_seconds
from lightning_sparsecomm.basis.layout import SparseVector
from lightning_sparsecomm.codecs import SparseCodec
from lightning_sparsecomm.codecs.payload import sealed_bytes
from lightning_sparsecomm.codecs.sparse import SPARSE_BYTES
from lightning_sparsecomm.exchange.base import Exchange, Exchanged
from lightning_sparsecomm.exchange.gather import Gather
from lightning_sparsecomm.exchange.region_sum import RegionSum, usual_spread

Way = Literal["gather", "regions"]
_ALL: tuple[Way, ...] = get_args(Way)


class Sparse(Exchange):
    """The mean of what ranks have selected, by the way that costs least in this round.

    "gather" sends each rank's selection to all, or sums the whole vector where that takes fewer bytes; see `Gather`.
    "regions" lets each rank add up a part, so that a position crosses the network once however many ranks have
    selected it; see `RegionSum`. With two ranks the first is mostly cheaper, with many ranks the second. Both share the
    same bits, but for a sum of the whole vector, which adds up in another order.

    The choice follows from numbers that all ranks know: how many ranks there are, how far apart they are, and how many
    positions the ranks selected altogether in the last round. Values that are rounded together, such as `TwoBit`, are
    gathered always.

    State, equal on all ranks: `positions`, how many times as many positions all ranks selected as one did, float64;
    and that of "regions".

    >>> Sparse(SparseCodec(TopK(0.001))).ways
    ('gather', 'regions')

    Args:
        codec: Selects each rank's elements, and turns them into bytes.
        ways: Among which to choose.

    Raises:
        ValueError: No way, or an unknown one.
        TypeError: `codec` is no `SparseCodec`.
    """

    renewable = True

    def __init__(self, codec: SparseCodec, ways: Sequence[Way] = _ALL) -> None:
        if not ways or isinstance(ways, str):
            raise ValueError(f'ways must have one way or more; got {ways!r}. Use ways=("gather", "regions").')
        for way in ways:
            check_one_of("ways", way, _ALL, "'gather' has the fewest collectives; 'regions' suits many ranks.")
        self.codec = codec
        self.ways = tuple(ways)
        self._ways: dict[Way, Exchange] = {"gather": Gather(codec), "regions": RegionSum(codec)}
        if not all(each.elementwise for each in codec.values.codecs()):
            if "gather" not in self.ways:
                raise ValueError(
                    f"ways must have 'gather' for values that are rounded together, such as {codec.values!r}: what"
                    f" they are depends on the way; got {self.ways!r}. Use Float32() or BFloat16() for regions."
                )
            self.ways = ("gather",)
        self._last: Exchange = self._ways[self.ways[0]]
        self._spread: float | None = None
        self._next: float | None = None

    def way(self, context: Round, world_size: int, far: float = 0.0) -> Way:
        """The way that costs least.

        Args:
            context: The round.
            world_size: Number of ranks.
            far: Seconds of a round trip, as `Wire.far`.
        """
        return min(self.ways, key=lambda way: self._seconds(way, context, world_size, far))

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        self._last = self._ways[self.way(context, wire.world_size, wire.far)]
        exchanged = self._last.exchange(x, context, wire)
        selected = self.codec.selector.count(context)
        # In a rehearsal, all ranks select the same elements.
        if selected and not wire.mirrors:
            self._next = _held(exchanged.shared) / selected
        return exchanged

    def elements(self, exchanged: Exchanged) -> int:
        return self._last.elements(exchanged)

    def commit(self) -> None:
        self._spread = self._next
        self._last.commit()

    def abort(self) -> None:
        self._last.abort()

    def state_dict(self) -> dict[str, Tensor]:
        state = {} if self._spread is None else {"positions": torch.tensor(self._spread, dtype=torch.float64)}
        return state | self._ways["regions"].state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if "positions" in state:
            self._spread = self._next = float(state["positions"])
        self._ways["regions"].load_state_dict({name: held for name, held in state.items() if name != "positions"})

    def __repr__(self) -> str:
        return f"Sparse({self.codec!r})" if self.ways == _ALL else f"Sparse({self.codec!r}, ways={self.ways!r})"

    def _seconds(self, way: Way, context: Round, world_size: int, far: float) -> float:
        layout, count = context.layout, self.codec.selector.count(context)
        body = self._bytes(count, layout, self.codec.value_codec(context).bound_bytes(count, layout) or 0)
        width = 8 if context.dtype == torch.float64 else 4
        told = call_seconds("all_gather", 8, world_size, far)
        if way == "gather":
            lengths = told if self.codec.bound_bytes(context) is None else 0
            calls: list[tuple[Collective, int]] = [("all_gather", body), ("all_reduce", width * layout.size)]
            # As `Gather` chooses.
            kind, size = min(calls, key=lambda each: link_bytes(each[0], each[1], world_size))
            return lengths + call_seconds(kind, size, world_size, far)
        spread = min(usual_spread(world_size) if self._spread is None else self._spread, world_size)
        union = min(math.ceil(spread * count), layout.size)
        summed = min(self._bytes(union, layout, width * union), layout.size // 8 + width * union)
        others = (world_size - 1) / world_size
        return (
            3 * told
            + call_seconds("send", body * others, world_size, far)
            + call_seconds("all_gather", summed / world_size, world_size, far)
        )

    def _bytes(self, count: int, layout: Layout, value_bytes: int) -> int:
        """About what `count` elements take."""
        if count == layout.size:
            return sealed_bytes(SPARSE_BYTES + value_bytes, layout)
        positions = self.codec.indices.bound_bytes(count, layout.size)
        if positions is None:
            # As in Golomb's code.
            positions = math.ceil(count * (math.log2(layout.size / max(1, count)) + 1.5) / 8)
        return sealed_bytes(SPARSE_BYTES + positions + value_bytes, layout)


def _held(vector: SparseVector | Tensor) -> int:
    """How many elements a vector holds that are not zero, or all that a sparse one holds."""
    return vector.indices.numel() if isinstance(vector, SparseVector) else int(vector.count_nonzero())
