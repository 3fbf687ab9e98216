"""What an exchange of weight changes does in flight, and what it brings."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Wire
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.channel.saved import Saved, pop_named
from lightning_sparsecomm.sharing.anchored import Anchored
from lightning_sparsecomm.sharing.averaging import averaged
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.moments import Moments
from lightning_sparsecomm.sharing.set_weights import SetWeights

Mix = float | Literal["keep"]
"""The local weights where an exchange arrives: "keep" what was trained meanwhile, or a share of them."""


class ArrivedChanges(NamedTuple):
    """The result of an exchange that has not been applied; tensors by parameter name.

    Attributes:
        mean: The mean change over ranks.
        sent: What this rank has sent.
        set: Means of weights that the user has set.
    """

    mean: dict[str, Tensor]
    sent: dict[str, Tensor]
    set: dict[str, Tensor]

    def move(self, anchored: Anchored, weights: NamedParameters, began: Mapping[str, Tensor], mix: Mix) -> None:
        """Moves anchors by the mean changes; those of weights that the user has set become their means.

        The weights, some of the parameters, move with them; `began` is what they were when the exchange started.
        """
        anchored.move_by({name: change for name, change in self.mean.items() if name not in self.set})
        for name, value in self.set.items():
            anchored.of(name).copy_(value)
        for name, weight in weights:
            if name in self.mean:
                mix_(weight.detach(), anchored.of(name), began.get(name), mix)

    def sent_of(self, parameters: NamedParameters) -> Tensor:
        """What this rank has sent of these parameters, as one vector; zeros where nothing was."""
        return torch.cat([self.sent.get(name, torch.zeros_like(weight)).flatten() for name, weight in parameters])


def fly(
    channel: Channel,
    changes: Sequence[Tensor | None],
    weights: Mapping[str, Tensor],
    noticed: SetWeights,
    moments: Moments,
    context: Round,
    wire: Wire,
) -> dict[str, Tensor]:
    """What the stream's thread does; returns the means of weights that the user has set."""
    found = noticed.agree(list(weights), wire, next(iter(weights.values())).device)
    # One that is not finite stays in the exchange, which refuses it on all ranks.
    left_out = {name for name in found if bool(weights[name].isfinite().all())}
    try:
        channel.prepare([None if name in left_out else change for name, change in zip(weights, changes)], context, wire)
        channel.run()
    except BaseException:
        # Not only when this lands: others may wait in what an exchange has started, until that is dropped.
        channel.abort()
        raise
    moments.average(list(weights.items()), wire)
    names = [name for name in weights if name in found]
    return dict(zip(names, averaged([weights[name] for name in names], wire))) if names else {}


def mix_(weight: Tensor, anchor: Tensor, began: Tensor | None, mix: Mix) -> None:
    """Sets a weight by its new anchor; `began` is what it was when the exchange started, and is overwritten."""
    now = weight.to(anchor.dtype)
    if mix != "keep":
        weight.copy_(torch.lerp(anchor, now, mix))
    else:
        assert began is not None
        began = began.to(anchor.dtype)
        # In place: training waits meanwhile.
        weight.copy_(torch.sub(now, began, out=began).add_(anchor))


def by_name(vector: SparseVector | Tensor, layout: Layout) -> dict[str, Tensor]:
    dense = vector.dense() if isinstance(vector, SparseVector) else vector
    return dict(zip((segment.name for segment in layout.segments), layout.views(dense), strict=True))


def saved_arrived(arrived: ArrivedChanges, began: Mapping[str, Tensor]) -> Saved:
    """What has arrived, and the weights when it started, by kind and name."""
    saved: Saved = {f"in flight, {kind}": parts for kind, parts in arrived._asdict().items()}
    return saved | {"in flight, weights at its start": dict(began)}


def load_arrived(saved: Saved, parameters: NamedParameters, mix: Mix) -> tuple[ArrivedChanges, dict[str, Tensor]]:
    """Takes out of `saved` what `saved_arrived` returned for some parameters, to their devices.

    Raises:
        ValueError: `mix` is "keep", and the weights at the start were not saved, as with another `mix`.
    """
    devices = {name: weight.device for name, weight in parameters}

    def taken(kind: str) -> dict[str, Tensor]:
        held = pop_named(saved, f"in flight, {kind}", list(devices))
        return {name: each.to(devices[name], copy=True) for name, each in held.items()}

    arrived, began = ArrivedChanges(*(taken(kind) for kind in ArrivedChanges._fields)), taken("weights at its start")
    if mix == "keep" and arrived.mean.keys() - began.keys():
        raise ValueError(
            "mix must be a number to resume from a checkpoint that was saved with an exchange in flight and such a mix;"
            " got 'keep'. Resume with the mix that it had, or from a checkpoint that was saved when training ended."
        )
    return arrived, began
