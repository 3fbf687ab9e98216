"""What a replica that joins gets from another: the weights that all share, and what makes it go on as they do."""

import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.elastic.connections import Connections
from lightning_sparsecomm.elastic.local_state import LocalState
from lightning_sparsecomm.elastic.readers import Readers
from lightning_sparsecomm.elastic.units import is_own, units_of
from lightning_sparsecomm.elastic.wire import LostPeerError
from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing.gradient_share import GradientShare

# What shares keep under these kinds is a replica's own. All else, such as anchors, is equal on all replicas.
_OWN = ("set by the user", "weights as noted")

# Room for names, counts and schedules in a state.
_NAMES_BYTES = 2**24


class Joining:
    """Packs and takes over the state that replicas share.

    It holds the anchors or, before the first step and where gradients are exchanged, the weights; the outer optimizer;
    what exchanges keep from round to round; parameters and buffers that no optimizer trains; and counts of steps. Where
    gradients are exchanged, also the user's optimizers. Memories are each replica's own, but those with `in_common`.

    Args:
        engine: The run.
        progress: What the front end adds, such as epochs and schedules: tensors, numbers, strings, lists, dictionaries.
        follow: Takes over what another replica's `progress` has returned.
        samples: Which samples this replica reads.
        note: What the front end has to add once the step is over in which the state was packed: a short text.
        heed: Takes over what another replica's `note` has returned.
        own: What this replica, or one whose place it takes, has kept as its own.

    Attributes:
        waiting: Members of the quorum that wait for the state.
        samples, heed, own: As given.
    """

    def __init__(
        self,
        engine: Engine,
        progress: Callable[[], State],
        follow: Callable[[State], None],
        samples: Readers,
        note: Callable[[], str],
        heed: Callable[[str], None],
        own: LocalState,
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._follow = follow
        self.samples, self.own = samples, own
        self._note = note
        self.heed = heed
        self.waiting: Sequence[int] = ()
        # The round that led to the state that was sent last.
        self._sent: int | None = None

    def note(self, finished_rounds: int) -> str:
        """What to tell all in the next meeting: something if the state was sent after the last round, else nothing."""
        return self._note() if finished_rounds == self._sent else ""

    def pack(self, shared: State, steps: dict[int, int]) -> Tensor:
        """The state as bytes: `[n]` uint8, in memory of its own.

        Args:
            shared: What is added to it: the name of the state, and the rounds that led to it.
            steps: By optimizer's number, the steps that it has made once this step is over.
        """
        state: State = {**shared, "optimizers": [], "progress": self._progress()}
        for tracked in self._engine.registry.optimizers:
            held: Saved = {}
            for unit in units_of(tracked):
                for kind, parts in unit.state_dict().items():
                    if kind.partition(".")[2] not in _OWN and not is_own(kind, unit):
                        held.setdefault(kind, {}).update(parts)
            state["optimizers"].append(
                {
                    "steps": steps.get(tracked.number, tracked.steps),
                    "members": [name for name, _ in tracked.parameters],
                    "held": held | self._engine.state.of_optimizer(tracked, in_common=True),
                    "since": [unit.steps for unit in units_of(tracked)],
                    "unfinished": [isinstance(unit, GradientShare) and unit.unfinished for unit in units_of(tracked)],
                }
            )
        state["untrained"] = self._untrained()
        state["samples"] = self.samples.state_dict()
        leading = self._engine.registry.leading
        state["leading"] = None if leading is None else leading.number
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)

    def take(self, packed: Tensor, current: int | None) -> State:
        """Takes over a state; returns what `pack` has added to it. Memories begin with what `own` has, or empty.

        Args:
            packed: As `pack` returned it.
            current: Number of the optimizer whose step has not been counted here yet; None where all are.
        """
        state: State = torch.load(io.BytesIO(packed.numpy().data), map_location="cpu", weights_only=True)
        engine = self._engine
        with torch.no_grad():
            # Before shares take these weights for what they begin with.
            untrained = self._untrained()
            for name, tensor in state["untrained"].items():
                if name in untrained:
                    untrained[name].copy_(tensor)
        engine.restart()
        for saved, kept in zip(state["optimizers"], self.own.take(state["run"], state["exchanged"])):
            saved["held"] |= kept
        unknown = engine.state.load_shared(state["optimizers"])
        if unknown:
            warnings.warn(f"of the state of others, this replica has no place for {'; '.join(unknown)}.", stacklevel=2)
        for tracked, saved in zip(engine.registry.optimizers, state["optimizers"]):
            for unit, since, unfinished in zip(units_of(tracked), saved["since"], saved["unfinished"]):
                # Sets the weights to the anchors.
                unit.abort()
                if isinstance(unit, GradientShare):
                    unit.unfinished = unfinished
                else:
                    unit.steps = since
            tracked.steps = saved["steps"] - (tracked.number == current)
            tracked.samples.lack(max(saved["since"], default=0))
        leading, optimizers = state["leading"], engine.registry.optimizers
        engine.registry.leading = None if leading is None else optimizers[leading]
        engine.begin()
        self._follow(state["progress"])
        self.samples.take(state["samples"])
        return state

    def send(self, shared: State, steps: dict[int, int], quorum: Connections) -> int:
        """Starts to send the state to those that wait, in the background; arguments as for `pack`. Returns bytes."""
        ranks, self.waiting, self._sent = self.waiting, (), shared["round"]
        packed, sent = self.pack(shared, steps), 0
        for rank in ranks:
            # One that is gone already comes again.
            with suppress(RuntimeError):
                sent += quorum.send(packed, rank)
        return sent

    def _check_length(self, length: int) -> None:
        """Raises `ValueError` for a length that no replica with this model would send."""
        # A module's state_dict may leave some out, or have others. What is counted twice does not matter.
        tensors = (
            tensor
            for module in self._engine.registry.modules
            for tensor in (*module.parameters(), *module.buffers(), *module.state_dict().values())
        )
        # Anchors in up to 8 bytes for each element, and outer optimizers with up to three such numbers.
        most = sum(32 * tensor.numel() for tensor in tensors if isinstance(tensor, Tensor)) + _NAMES_BYTES
        if not 0 < length <= most:
            raise ValueError(
                f"a state must have at most {most:,} bytes for this model; another replica sends {length:,}."
            )

    def receive(self, quorum: Connections, rank: int, current: int | None) -> State:
        """Gets the state from a member, and takes it over; see `take`. Raises `LostPeerError` if that is gone."""
        try:
            packed = quorum.receive(rank, self._check_length)
        except (RuntimeError, ConnectionError) as error:
            raise LostPeerError("the replica that sent its state is gone") from error
        return self.take(packed, current)

    def _untrained(self) -> dict[str, Tensor]:
        """The parameters and buffers that no optimizer trains yet, or that have no anchors, of all dtypes."""
        registry = self._engine.registry
        members = {key for tracked in registry.optimizers if tracked.drifts for key in tracked.members}
        return {
            f"{index}.{name}": tensor.detach()
            for index, module in enumerate(registry.modules)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if id(tensor) not in members
        }
