"""Turns at two levels: whole gradients inside a node, a method between nodes."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from lightning_sparsecomm.basis.ledger import SETUP
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel.inspection import norm_of
from lightning_sparsecomm.run.clipping import clips_by_norm
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.gathered import gather_numbers
from lightning_sparsecomm.run.inside import NodeGradients, hand_out
from lightning_sparsecomm.run.nodes import Groups, Nodes
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.run.replicas import Replicas
from lightning_sparsecomm.run.turn import Turns, take_turn
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.share import Share, Turn
from lightning_sparsecomm.sharing.sync import Sync


class NodeTurns(Turns):
    """Exchanges between nodes. All ranks of a node commit a turn, or none does.

    Ranks of a node have the same gradients in each step, and so the same weights, also where nodes drift.

    Args:
        registry, replicas: As for `Turns`.
        nodes: Who is on a node with this rank.
    """

    def __init__(self, registry: Registry, replicas: Replicas, nodes: Nodes) -> None:
        super().__init__(registry, replicas)
        self._nodes = nodes
        self._gradients: NodeGradients | None = None

    def skipping(self, tracked: TrackedOptimizer, wire: Wire) -> Wire | None:
        return wire if tracked.exchanges_gradients else self._nodes.inside

    def norm_to_clip(self, tracked: TrackedOptimizer) -> float:
        """That of the node's mean gradient. A collective inside the node, from which its turn follows."""
        self._nodes.look()
        self._gradients = NodeGradients(tracked.parameters, self._nodes) if tracked.parameters else None
        if self._gradients is None or not clips_by_norm(tracked):
            return math.nan
        square = torch.tensor(norm_of(self._gradients.own) ** 2, dtype=torch.float64)
        return math.sqrt(self._nodes.inside.all_reduce_(square.to(device_of(tracked))))

    def take_gradients(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            return
        if tracked.exchanges_gradients:
            with gradients:
                self._take(tracked, due, turn)
        with _torn_on_error(due):
            gradients.hand_out()

    def take(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        self._nodes.look()
        if turn.kind == "end" and tracked.parameters:
            # First what is in flight: if the last exchange fails, ranks of a node go back to the same weights.
            landing = replace(turn, kind="land")
            self._take_weights(tracked, [share for share in tracked.shares.values() if share.due(landing)], landing)
            # A rank may have nothing that waits, where others of its node have.
            self._take_weights(tracked, due, turn, [piece for sync, piece in tracked.parts if sync.shares_gradients])
        elif due:
            self._take_weights(tracked, due, turn)

    def _take_weights(
        self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn, whole: Sequence[NamedParameters] = ()
    ) -> None:
        """A turn after which ranks of a node have the weights that it has moved, and those given `whole`."""
        if not due and not whole:
            return
        self._take(tracked, due, turn)
        with _torn_on_error(due):
            held = [(weight, weight.detach()) for piece in whole for _, weight in piece]
            hand_out(held + [pair for share in due for pair in share.to_hand_out()], self._nodes)
            for share in due:
                share.handed_out()

    def _take(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        agreed = False

        def agree(error: BaseException | None) -> None:
            nonlocal agreed
            self._nodes.agree(error, device_of(tracked))
            agreed = error is None

        try:
            take_turn(due, turn, agree)
        except BaseException:
            # Others of the node have committed.
            for share in due:
                share.torn = share.torn or agreed
            raise


@contextmanager
def _torn_on_error(due: Sequence[Share]) -> Iterator[None]:
    """Notes an error between the commit and the step: memories have forgotten what was sent."""
    try:
        yield
    except BaseException:
        for share in due:
            share.torn = True
        raise


def device_of(tracked: TrackedOptimizer) -> torch.device:
    return tracked.parameters[0][1].device


def check_nodes(nodes: object) -> None:
    """Raises `TypeError` unless it is None, "auto", or a list of lists of whole numbers; none of them empty."""
    if nodes is None or nodes == "auto":
        return
    groups = nodes if nodes and isinstance(nodes, Sequence) and not isinstance(nodes, str) else [None]
    if not all(isinstance(group, Sequence) and group and all(type(rank) is int for rank in group) for group in groups):
        raise TypeError(
            f'nodes must be "auto", or the ranks of each node, such as [[0, 1], [2, 3]]; got {nodes!r}. Leave it out to'
            " treat all ranks alike."
        )


def groups_of(
    nodes: Literal["auto"] | Groups | None, wire: Wire, node_rank: int, device: torch.device
) -> list[list[int]]:
    """The ranks of each node, by "auto" those with the same `node_rank`; empty for None. With "auto", a collective."""
    if nodes != "auto":
        return sorted(sorted(group) for group in nodes or ())
    numbers = [row[0] for row in gather_numbers([node_rank], wire, device, SETUP)]
    return [[rank for rank, each in enumerate(numbers) if each == number] for number in dict.fromkeys(numbers)]


def is_divided(groups: Groups) -> bool:
    """Whether a node has several ranks, so that there are two levels."""
    return any(len(group) > 1 for group in groups)


def divide(engine: Engine, nodes: Literal["auto"] | Groups, node_rank: int) -> None:
    """Lets the method of a run work between nodes, from now on. A collective, before the first parameter is exchanged.

    Args:
        engine: The run.
        nodes: The ranks of each node, equal on all ranks; "auto" for those with the same `node_rank`.
        node_rank: The number of this rank's machine.

    Where each node has one rank, it changes nothing.

    Raises:
        ValueError: A rank is in no node or in several, nodes have unequal numbers of ranks, or the method cannot
            work between nodes.
    """
    wire = engine.wire
    for method in engine.registry.methods:
        _refuse(method)
    device = next((each.device for _, each in engine.registry.named), torch.device("cpu"))
    nodes = groups_of(nodes, wire, node_rank, device)
    sizes = sorted({len(group) for group in nodes})
    if sorted(rank for group in nodes for rank in group) != list(range(wire.world_size)):
        raise ValueError(
            f"nodes must have each of the ranks 0 to {wire.world_size - 1} once; got {nodes!r}."
            ' Use "auto" for the ranks of each machine.'
        )
    if len(sizes) > 1:
        raise ValueError(
            f"nodes must have equally many ranks; got {' and '.join(map(str, sizes))} of them. Start as many processes"
            " on each machine, or name groups of equal size: nodes=[[0, 1], [2, 3]]."
        )
    if not is_divided(nodes):
        return
    if len(nodes) == 1 and wire.rank == 0:
        warnings.warn(
            "all ranks are on one node: nothing crosses a network between nodes, so the method saves nothing, and still"
            " selects what it would send. Use num_nodes=2 or more, leave nodes out, or use strategy='ddp'.",
            stacklevel=2,
        )
    levels = Nodes(nodes, wire)
    engine.registry.work_between(levels)
    engine.turns = NodeTurns(engine.registry, engine.replicas, levels)


def advice(registry: Registry, hosts: int, per_host: int) -> list[str]:
    """A line for the start of a run on several machines with several ranks each; none where it has no use for one."""
    if hosts < 2 or per_host < 2 or registry.nodes is not None or not all(map(_works, registry.methods)):
        return []
    return [
        f"sparsecomm: {per_host} ranks on each machine share a cable; with SparseCommStrategy(nodes='auto') a machine"
        " sends one rank's bytes"
    ]


def _works(method: Method) -> bool:
    """Whether it can work between nodes."""
    return all(_shares_changes(sync) or _shares_means(sync) for sync in method.syncs)


def _shares_changes(sync: Sync) -> bool:
    # A node's ranks would have to have a residual in common.
    return isinstance(sync, DeltaSync) and not sync.residual_in_weights


def _shares_means(sync: Sync) -> bool:
    return sync.shares_gradients and not sync.drifts and not isinstance(sync, BucketSync)


def _refuse(method: Method) -> None:
    if not _works(method):
        raise ValueError(
            "nodes must be left out unless the method exchanges changes of weights, or shares gradients in an exchange"
            " of its own and leaves every rank the same step: without DDP's buckets, local gradients, residuals in"
            f" weights, delay=1 and local steps for gradients; got {method!r}. Use methods.default() or dgc(), for"
            " example."
        )
