"""Replicas that go apart, and the one model that is measured, saved, and left in the end: their average."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_sparsecomm.averaging import Averaging, average_
from lightning_sparsecomm.streams import Stream
from lightning_sparsecomm.wire import Wire


class Replicas:
    """Averages of what the ranks train. Every call that averages is a collective: all ranks make it together.

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

    @property
    def apart(self) -> bool:
        """Whether replicas may differ by now."""
        return any(stream.steps and any(sync.drifts for sync, _, _ in stream.pieces) for stream in self._streams)

    def after_step(self, stream: Stream) -> None:
        """Averages what belongs to an optimizer, if its step was one after which that is due."""
        averaging = self._averaging(stream)
        if averaging is None or stream.steps % averaging.every:
            return
        tensors = self._model(stream)
        if averaging.optimizer_state:
            for _, parameter in stream.parameters():
                state = stream.optimizer.state.get(parameter, {})
                # Without step counts, which have no dimension and are equal on all ranks.
                tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor) and state[key].dim()]
        with torch.no_grad():
            average_(tensors, self._wire)

    def view_average(self) -> bool:
        """Puts the average in the place of this rank's weights until `view_own`, for whoever measures or saves them.

        Returns:
            Whether it did: not where replicas are equal, or where the average is there already.
        """
        if self._own is not None or not self.apart:
            return False
        tensors = self._all()
        with torch.no_grad():
            self._own = [(tensor, tensor.clone()) for tensor in tensors]
            average_(tensors, self._wire)
        return True

    def view_own(self) -> None:
        """Gives this rank its own weights back, to the bit."""
        with torch.no_grad():
            for tensor, own in self._own or []:
                tensor.copy_(own)
        self._own = None

    def settle(self) -> None:
        """Makes all replicas the average, for good."""
        self.view_own()
        if self.apart:
            with torch.no_grad():
                average_(self._all(), self._wire)

    def _averaging(self, stream: Stream) -> Averaging | None:
        return self.averaging or (stream.method.averaging if stream.method is not None else None)

    def _model(self, stream: Stream) -> list[Tensor]:
        """What is averaged of the model with an optimizer, the same on all ranks; buffers go with the first."""
        tensors: list[Tensor] = [parameter.detach() for _, parameter in stream.parameters()]
        averaging = self._averaging(stream)
        if averaging is not None and averaging.buffers and stream is self._streams[0]:
            tensors += [buffer for module in self._modules for buffer in module.buffers()]
        return tensors

    def _all(self) -> list[Tensor]:
        # Two optimizers may share parameters.
        unique = {tensor.data_ptr(): tensor for stream in self._streams for tensor in self._model(stream)}
        return list(unique.values())
