"""Replicas that drift, and the one model that is validated, saved, and kept after training."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis.overlaps import apart_from
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.registry import Registry, ignored_by_ddp
from lightning_sparsecomm.run.shared_tensors import SharedTensors
from lightning_sparsecomm.sharing.averaging import Averaging, average_
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.moments import state_on_all_ranks
from lightning_sparsecomm.sharing.sync import Sync

Place = tuple[int, torch.Size, tuple[int, ...]]
"""Address, shape and strides: a buffer may be a view of a part of a weight that begins where that does."""


class Viewed(NamedTuple):
    """What a tensor held before the shared value was written into it for a while.

    Attributes:
        own: This rank's own value.
        shared: The value that was written, perhaps in a wider dtype.
        tensor: Where it was written.
    """

    own: Tensor
    shared: Tensor
    tensor: Tensor

    def kept(self, now: Tensor) -> Tensor:
        """What the tensor, of which `now` is the value, is to hold afterwards.

        This rank's own elements, but those that the user has set meanwhile.
        """
        if now.shape != self.own.shape:
            return now
        return self.own.to(now).where(now == self.shared.to(now), now)


class Replicas:
    """The model that all ranks share, while each trains its own replica.

    If a share keeps shared weights (the anchors of `DeltaShare`), they are the model, and reading them costs nothing.
    If local gradients let replicas drift, the model is their average, which takes a collective.

    Attributes:
        averaging: Replaces the method's averaging; None leaves it.
        untrained: The tensors that no optimizer trains: floating-point buffers and, for example, the parameters of a
            moving average.
        bystanders: Of these, the parameters. Ranks that drift may change them, such as a moving average, by themselves.
        whole: All floating-point tensors that ddp would keep equal.
    """

    def __init__(self, registry: Registry, wire: Wire) -> None:
        self.averaging: Averaging | None = None
        self._registry = registry
        self._wire = wire
        self._viewed: dict[str, Viewed] | None = None
        self.untrained = SharedTensors(self._untrained_by_name, wire)
        self.bystanders = SharedTensors(lambda: self._parameters_by_name(trained=False), wire)
        self.whole = SharedTensors(self._all_by_name, wire)

    def after_step(self, tracked: TrackedOptimizer) -> None:
        """Averages an optimizer's parameters if it is due after this step; not those that have anchors."""
        averaging = self._averaging(tracked)
        if averaging is None:
            return
        first = self.averaging is not None and tracked.steps == 1
        free = _without_anchors(tracked, warn=first and self._wire.rank == 0)
        if tracked.steps % averaging.every:
            return
        tensors = free + self._buffers(tracked)
        if averaging.optimizer_state:
            tensors += state_on_all_ranks(tracked.optimizer, tracked.parameters, self._wire)
        with torch.no_grad():
            average_(tensors, self._wire)

    def in_common(self, tracked: TrackedOptimizer, every: int) -> dict[int, Tensor]:
        """By parameter's identity, the weights to compare after a step, or the shared values that a share keeps.

        They are compared every `every` steps; replicas that drift, at their first average after that.
        """
        steps, averaging = tracked.steps, self._averaging(tracked)
        common: dict[int, Tensor] = {}
        in_nodes = self._registry.nodes is not None
        for sync, piece in tracked.parts:
            shared, since = _shared_weights(tracked, sync), 1
            if shared is None and sync.drifts:
                if averaging is None or steps % averaging.every:
                    continue
                since = averaging.every
            if steps // every > (steps - since) // every:
                values = {_place(weight): value for weight, value in shared or ()}
                for _, weight in piece:
                    value = values.get(_place(weight), weight)
                    # One rank of a node has it in full precision.
                    common[id(weight)] = value.to(weight.dtype) if in_nodes else value
        return common

    def in_node(self, tracked: TrackedOptimizer, every: int) -> dict[int, Tensor]:
        """By parameter's identity, the weights to compare inside a node after a step, as replicas of nodes drift."""
        if not tracked.in_node or tracked.steps % every:
            return {}
        return {id(weight): weight for sync, piece in tracked.parts if sync.drifts for _, weight in piece}

    def keep_untrained(self) -> None:
        """Marks the tensors that no optimizer trains, equal on all ranks now.

        Buffers are copied now, for the shared model. Parameters may be large and may never change, so they are copied
        after their first change.
        """
        self.untrained.mark(self._buffers_by_name().__contains__)

    def view_shared(self, collective: bool = True, averages: bool = True) -> bool:
        """Writes the shared model into the module until `view_own`.

        If all ranks call it together, `collective`, it may average what is shared in no other way. Returns whether it
        did. It does not if replicas are equal, if the module holds the shared model already, or if it would have to
        average and `averages` is False.
        """
        if self._viewed is not None:
            return False
        for share in [share for each in self._registry.optimizers for share in each.shares.values() if collective]:
            share.before_view()
        kept = self._kept()
        averaged = self._drifted() if collective else []
        if not (kept or averaged) or (averaged and not averages):
            return False
        names = self._names()
        with torch.no_grad():
            # Through `.data`, here and in `view_own`: a save between a forward and its backward pass changes no bit in
            # the end, and autograd must not take it for a change.
            own = [tensor.clone() for tensor in averaged]
            average_([tensor.data for tensor in averaged], self._wire)
            self._viewed = {
                names[_place(tensor)]: Viewed(mine, tensor.clone(), tensor) for tensor, mine in zip(averaged, own)
            }
            for tensor, shared in kept:
                if (name := names[_place(tensor)]) not in self._viewed:
                    self._viewed[name] = Viewed(tensor.clone(), shared, tensor)
                    tensor.data.copy_(shared)
        return True

    def view_own(self) -> None:
        """Restores this rank's own values, to the bit; but not elements that the user has set since `view_shared`."""
        # By name: `.data`, or a buffer, may have been replaced by another tensor.
        current = self._all_by_name() if self._viewed else {}
        with torch.no_grad():
            for name, viewed in (self._viewed or {}).items():
                # Pruning renames parameters.
                tensor = current.get(name, viewed.tensor)
                tensor.data.copy_(viewed.kept(tensor))
        self._viewed = None

    def state_dict(self, buffers: bool) -> dict[str, Tensor]:
        """This rank's own weights where they may differ from the shared model's; no collective.

        With `buffers`, also the tensors that no optimizer trains: they differ if ddp does not broadcast them. Without,
        those of these parameters that this rank has changed.
        """
        untrained = self._untrained_by_name() if buffers else self.bystanders.changed()
        own = {name: tensor.detach() for name, tensor in untrained.items()}
        if self._viewed is None:
            names = self._names()
            drifted = *self._drifted(), *(tensor for tensor, _ in self._kept())
            return own | {names[_place(tensor)]: tensor for tensor in drifted}
        current = self._all_by_name()
        now = {name: current.get(name, viewed.tensor).detach() for name, viewed in self._viewed.items()}
        return own | {name: viewed.kept(now[name]) for name, viewed in self._viewed.items()}

    def load_state_dict(self, state: dict[str, Tensor], shared: Collection[str] = ()) -> None:
        """Loads what differs of this rank's own weights (a write counts as a change), but for these parameters."""
        names = {id(parameter): name for name, parameter in self._registry.known.values()}
        with torch.no_grad():
            for name, tensor in self._all_by_name().items():
                own = state.get(name) if names.get(id(tensor)) not in shared else None
                if own is not None and not torch.equal(tensor, own.to(tensor)):
                    tensor.copy_(own)

    def settle(self) -> None:
        """Replaces replicas that have drifted by their average. A collective."""
        self.view_own()
        with torch.no_grad():
            average_(self._drifted(), self._wire)

    def _averaging(self, tracked: TrackedOptimizer) -> Averaging | None:
        return self.averaging or (tracked.method.averaging if tracked.method is not None else None)

    def _kept_equal(self, named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]) -> dict[str, Tensor]:
        """The floating-point parameters or buffers that ddp would keep equal."""
        return {
            f"{index}.{name}": tensor
            for index, module in enumerate(self._registry.modules)
            for name, tensor in named(module)
            if tensor.is_floating_point() and name not in ignored_by_ddp(module)
        }

    def _buffers_by_name(self) -> dict[str, Tensor]:
        """Buffers, but those that are a part of a trained weight, which they move with."""
        buffers = self._kept_equal(lambda module: module.named_buffers())
        return apart_from(buffers, self._parameters_by_name(trained=True).values())

    def _parameters_by_name(self, trained: bool) -> dict[str, Tensor]:
        members = {identity for tracked in self._registry.optimizers for identity in tracked.members}
        parameters = self._kept_equal(lambda module: module.named_parameters())
        return {name: each for name, each in parameters.items() if (id(each) in members) is trained}

    def _untrained_by_name(self) -> dict[str, Tensor]:
        return self._parameters_by_name(trained=False) | self._buffers_by_name()

    def _all_by_name(self) -> dict[str, Tensor]:
        return self._parameters_by_name(trained=True) | self._untrained_by_name()

    def _names(self) -> dict[Place, str]:
        """Names by the tensors' places."""
        return {_place(tensor): name for name, tensor in self._all_by_name().items()}

    def _buffers(self, tracked: TrackedOptimizer) -> list[Tensor]:
        """The buffers to average with an optimizer's parameters; all of them belong to the first optimizer."""
        averaging = self._averaging(tracked)
        wanted = averaging is not None and averaging.buffers and tracked.number == 0
        return list(self._buffers_by_name().values()) if wanted else []

    def _kept(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors that differ from a kept shared value, with that value."""
        kept = [pair for tracked, sync, _ in self._parts() for pair in _shared_weights(tracked, sync) or []]
        return kept + self.untrained.shared()

    def _drifted(self) -> list[Tensor]:
        """The tensors that differ between ranks and whose only shared value is their average."""
        tensors: list[Tensor] = []
        for tracked, sync, piece in self._parts():
            if tracked.steps and sync.drifts and _shared_weights(tracked, sync) is None:
                tensors += [parameter.detach() for _, parameter in piece] + self._buffers(tracked)
        # Two optimizers may hold the same parameters.
        return list({_place(tensor): tensor for tensor in tensors}.values())

    def _parts(self) -> Iterator[tuple[TrackedOptimizer, Sync, NamedParameters]]:
        return ((tracked, sync, piece) for tracked in self._registry.optimizers for sync, piece in tracked.parts)


def _without_anchors(tracked: TrackedOptimizer, warn: bool) -> list[Tensor]:
    """An optimizer's parameters but those whose weights each exchange sets on all ranks; may warn of these."""
    anchored = {id(weight) for sync, piece in tracked.parts if sync.anchored for _, weight in piece}
    if anchored and warn:
        warnings.warn(
            f"ParameterAveraging leaves {len(anchored)} of {len(tracked.parameters)} parameters alone:"
            f" {tracked.method!r} gives all ranks the same weights in each exchange, and takes what changes them in"
            " between for training. Leave the callback out, or use a method that exchanges in every step.",
            stacklevel=2,
        )
    return [weight.detach() for _, weight in tracked.parameters if id(weight) not in anchored]


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _shared_weights(tracked: TrackedOptimizer, sync: Sync) -> list[tuple[Tensor, Tensor]] | None:
    return tracked.shares[sync].shared_weights() if sync in tracked.shares else None
