"""One exchange in the first steps of a run, and another in all later ones."""

from collections.abc import Sequence

from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.basis.schedules import Every, PartOfRun, check_every
from lightning_sparsecomm.codecs.selectors.candidates import Wanted
from lightning_sparsecomm.exchange.base import Exchange, Exchanged


class Staged(Exchange):
    """Exchanges by `first` in the first optimizer steps, then by `then`; all ranks change in the same step.

    State: that of both.

    >>> staged = Staged(DenseAllReduce(), Gather(SparseCodec(TopK(0.01))), steps=500)
    >>> [type(staged.stage(Round(Layout([]), step))).__name__ for step in (499, 500)]
    ['DenseAllReduce', 'Gather']

    Args:
        first: The exchange of the first steps.
        then: The exchange of all later steps.
        steps: How many steps are the first ones, or a schedule of that number; 15% of the run by default.

    Raises:
        ValueError: `steps` is below 1.
        TypeError: `first` or `then` is no exchange.
    """

    def __init__(self, first: Exchange, then: Exchange, steps: Every = PartOfRun(0.15)) -> None:  # noqa: B008
        for name, exchange in (("first", first), ("then", then)):
            if not isinstance(exchange, Exchange):
                raise TypeError(f"{name} must be an Exchange; got {exchange!r}. Use DenseAllReduce(), for example.")
        check_every("steps", steps)
        self.first = first
        self.then = then
        self.steps = steps
        # That of the last round.
        self._last = first

    @property
    def sums_pieces(self) -> bool:  # type: ignore[override]
        return self.first.sums_pieces or self.then.sums_pieces

    @property
    def renewable(self) -> bool:  # type: ignore[override]
        return self.first.renewable or self.then.renewable

    @property
    def overlaps(self) -> bool:
        return self.first.overlaps or self.then.overlaps

    def stage(self, context: Round) -> Exchange:
        """The exchange of this round."""
        return self.first if context.step < context.steps(self.steps) else self.then

    def objection(self, layout: Layout) -> str | None:
        return self.first.objection(layout) or self.then.objection(layout)

    def check_ranks(self, world_size: int) -> None:
        self.first.check_ranks(world_size)
        self.then.check_ranks(world_size)

    def wanted(self, context: Round) -> Sequence[Wanted]:
        return self.stage(context).wanted(context)

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        self.stage(context).prepare(x, context, wire)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        self._last = self.stage(context)
        return self._last.exchange(x, context, wire)

    def elements(self, exchanged: Exchanged) -> int:
        return self._last.elements(exchanged)

    def commit(self) -> None:
        self._last.commit()

    def abort(self) -> None:
        self.first.abort()
        self.then.abort()

    def state_dict(self) -> dict[str, Tensor]:
        stages = (("first", self.first), ("then", self.then))
        return {f"{stage}: {name}": held for stage, each in stages for name, held in each.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for stage, each in (("first", self.first), ("then", self.then)):
            prefix = f"{stage}: "
            held = {name.removeprefix(prefix): part for name, part in state.items() if name.startswith(prefix)}
            each.load_state_dict(held)

    def __repr__(self) -> str:
        return f"Staged({self.first!r}, {self.then!r}, steps={self.steps!r})"
