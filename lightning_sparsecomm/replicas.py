"""Replicas that go apart, and the one model that is measured, saved, and left in the end."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_sparsecomm.averaging import Averaging, average_
from lightning_sparsecomm.gradients import NamedParameters
from lightning_sparsecomm.streams import Stream
from lightning_sparsecomm.sync import Sync
from lightning_sparsecomm.tracked import Tracked
from lightning_sparsecomm.wire import Wire


class Replicas:
    """The model that all ranks share, while each trains one of its own.

    Where a sync keeps shared weights (`DeltaSync`, the anchor), these are it, at no cost. Where local gradients have
    let replicas go apart, it is their average: a collective, which all ranks make together.

    Args:
        streams: The optimizers at work; shared with the caller, who adds to it.
        modules: Whose buffers are averaged, where that is asked for; shared likewise.
        wire: Where to communicate.

    Attributes:
        averaging: When to average, in the place of what the method says; None leaves it to the method.
    """

    def __init__(self, streams: Sequence[Stream], modules: Sequence[nn.Module], wire: Wire) -> None:
        self.averaging: Averaging | None = None
        self._streams = streams
        self._modules = modules
        self._wire = wire
        self._own: list[tuple[Tensor, Tensor]] | None = None
        self._untrained = Tracked(self._beside, wire)
        self._whole = Tracked(self._everything, wire)

    def after_step(self, stream: Stream) -> None:
        """Averages what belongs to an optimizer, if its step was one after which that is due."""
        averaging = self._averaging(stream)
        if averaging is None or stream.steps % averaging.every:
            return
        tensors = [parameter.detach() for _, parameter in stream.parameters()] + self._buffers(stream)
        if averaging.optimizer_state:
            for _, parameter in stream.parameters():
                state = stream.optimizer.state.get(parameter, {})
                # Without step counts, which have no dimension and are equal on all ranks.
                tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor) and state[key].dim()]
        with torch.no_grad():
            average_(tensors, self._wire)

    def in_common(self, stream: Stream, every: int) -> dict[int, Tensor]:
        """What all ranks have equal of an optimizer's parameters after its step, if a comparison is due after every so
        many: by the parameters' identities, their weights, or the shared values that a sync keeps apart from them.

        Where local gradients let replicas go apart, nothing is; but at the first average that comes when it is due.
        """
        steps, averaging = stream.steps, self._averaging(stream)
        common: dict[int, Tensor] = {}
        for sync, piece, _ in stream.pieces:
            shared, since = sync.shared_model(self._streams.index(stream), piece), 1
            if shared is None and sync.drifts:
                if averaging is None or steps % averaging.every:
                    continue
                since = averaging.every
            if steps // every > (steps - since) // every:
                values = [value for _, value in shared] if shared else [weight for _, weight in piece]
                common.update((id(weight), value) for (_, weight), value in zip(piece, values))
        return common

    def keep_untrained(self) -> None:
        """Takes what no optimizer trains as it is, equal on all ranks: floating-point buffers, and parameters such as
        those of a moving average. Buffers are copied for the shared model; parameters, which may be large and never
        change, from their first change on."""
        buffers = self._buffers_by_name()
        self._untrained.mark(buffers.__contains__)

    def average_untrained(self) -> None:
        """Averages what no optimizer trains, where some rank has changed it. A collective."""
        self._untrained.average()

    def note_end(self) -> None:
        """Notes what all ranks have now that training is over, for `reunite`."""
        self._whole.mark()

    def reunite(self) -> None:
        """Averages what has been changed since `note_end`, such as by callbacks that put averages of each rank's own
        weights in their place. A collective."""
        self._whole.average()

    def view_shared(self, collective: bool = True) -> bool:
        """Puts the shared model in the place of this rank's weights until `view_own`, for whoever measures or saves it.

        Args:
            collective: Whether all ranks call it together, so that what has no shared value can be averaged.

        Returns:
            Whether it did: not where replicas are equal, or where the shared model is there already.
        """
        if self._own is not None:
            return False
        kept = self._kept()
        averaged = self._apart() if collective else []
        if not kept and not averaged:
            return False
        with torch.no_grad():
            self._own = [(tensor, tensor.clone()) for tensor in (*averaged, *(tensor for tensor, _ in kept))]
            for tensor, shared in kept:
                tensor.copy_(shared)
            average_(averaged, self._wire)
        return True

    def view_own(self) -> None:
        """Gives this rank its own weights back, to the bit."""
        with torch.no_grad():
            for tensor, own in self._own or []:
                tensor.copy_(own)
        self._own = None

    def state_dict(self, buffers: bool) -> dict[str, Tensor]:
        """This rank's own weights where they may differ from the shared model's; without a collective.

        Args:
            buffers: Whether what no optimizer trains is each rank's own too, and not ddp's to broadcast.
        """
        own = self._own
        if own is None:
            own = [(tensor, tensor) for tensor in (*self._apart(), *(tensor for tensor, _ in self._kept()))]
        if buffers:
            viewed = {tensor.data_ptr() for tensor, _ in own}
            beside = [tensor.detach() for tensor in self._beside().values()]
            own = own + [(tensor, tensor) for tensor in beside if tensor.data_ptr() not in viewed]
        names = {tensor.data_ptr(): name for name, tensor in self._everything().items()}
        return {names[tensor.data_ptr()]: values for tensor, values in own}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Gives this rank its own weights."""
        with torch.no_grad():
            for name, tensor in self._everything().items():
                if name in state:
                    tensor.copy_(state[name])

    def settle(self) -> None:
        """Makes replicas that local gradients have let go apart their average, for good."""
        self.view_own()
        with torch.no_grad():
            average_(self._apart(), self._wire)

    def _averaging(self, stream: Stream) -> Averaging | None:
        return self.averaging or (stream.method.averaging if stream.method is not None else None)

    def _buffers_by_name(self) -> dict[str, Tensor]:
        """Floating-point buffers of which ddp keeps ranks equal."""
        return {
            f"{index}.{name}": buffer
            for index, module in enumerate(self._modules)
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() and name not in ignored_by_ddp(module)
        }

    def _parameters(self, trained: bool) -> dict[str, Tensor]:
        """Floating-point parameters that optimizers train, or the others, of which ddp keeps ranks equal."""
        members = {identity for stream in self._streams for identity in stream.members}
        return {
            f"{index}.{name}": parameter
            for index, module in enumerate(self._modules)
            for name, parameter in module.named_parameters()
            if (id(parameter) in members) is trained
            and parameter.is_floating_point()
            and name not in ignored_by_ddp(module)
        }

    def _beside(self) -> dict[str, Tensor]:
        """What no optimizer trains."""
        return self._parameters(trained=False) | self._buffers_by_name()

    def _everything(self) -> dict[str, Tensor]:
        return self._parameters(trained=True) | self._beside()

    def _buffers(self, stream: Stream) -> list[Tensor]:
        """The buffers, where they are averaged with an optimizer's parameters; they go with the first."""
        averaging = self._averaging(stream)
        wanted = averaging is not None and averaging.buffers and stream is self._streams[0]
        return list(self._buffers_by_name().values()) if wanted else []

    def _kept(self) -> list[tuple[Tensor, Tensor]]:
        """What differs from the shared values that syncs keep, with these."""
        kept = [pair for index, stream, sync, piece in self._pieces() for pair in sync.shared_model(index, piece) or []]
        return kept + self._untrained.shared()

    def _apart(self) -> list[Tensor]:
        """What differs between ranks by now, and has no shared value but the average."""
        tensors: list[Tensor] = []
        for index, stream, sync, piece in self._pieces():
            if stream.steps and sync.drifts and sync.shared_model(index, piece) is None:
                tensors += [parameter.detach() for _, parameter in piece] + self._buffers(stream)
        # Two optimizers may share parameters.
        return list({tensor.data_ptr(): tensor for tensor in tensors}.values())

    def _pieces(self) -> Iterator[tuple[int, Stream, Sync, NamedParameters]]:
        for index, stream in enumerate(self._streams):
            for sync, piece, _ in stream.pieces:
                yield index, stream, sync, piece


def ignored_by_ddp(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that DDP is told to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
