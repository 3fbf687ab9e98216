"""One optimizer's gradients on their way: whose they are, by which syncs they go, whether they are shared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_sparsecomm.gradients import NamedParameters
from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.memory import ClipLocalNorm, Momentum
from lightning_sparsecomm.method import Method, parts_in
from lightning_sparsecomm.sync import Sync
from lightning_sparsecomm.takeover import MomentumTakeover, momentum_rules


@dataclass
class Stream:
    """One optimizer's gradients on their way.

    Attributes:
        optimizer: Whose gradients.
        steps: Optimizer steps finished.
        shared: Whether they are shared for the coming step.
        members: Identities of the parameters that have required a gradient.
        pieces: The same parameters, by the sync that they belong to.
        written: Version counters of the gradients when the last backward pass ended.
        method: Whose syncs take them; None until the parameters are known.
        takeover: What is done in the place of the optimizer's own momentum; None where nothing is.
        max_norm: The threshold by which its gradients were clipped before they were shared; None for none.
        norm: Norm of this rank's own gradient, before it was clipped and shared; nan where nothing asked for it, and
            infinite where the step is skipped.
        skips: Whether the coming step is skipped, since the loss scaler has found a gradient that is not finite.
        clipping: The memories that clip its gradients.
    """

    optimizer: Optimizer
    steps: int = 0
    shared: bool = False
    members: set[int] = field(default_factory=set)
    pieces: list[tuple[Sync, NamedParameters, Layout]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    method: Method | None = None
    takeover: MomentumTakeover | None = None
    max_norm: float | None = None
    norm: float = math.nan
    skips: bool = False
    clipping: list[ClipLocalNorm] = field(default_factory=list)

    def parameters(self) -> NamedParameters:
        """All that take part, in the syncs' order."""
        return [named for _, piece, _ in self.pieces for named in piece]

    @property
    def shares_gradients(self) -> bool:
        """Whether what stands in `.grad` once it is shared is no longer this rank's own gradient."""
        return any(sync.shares_gradients for sync, _, _ in self.pieces)

    def gradients(self) -> list[tuple[Tensor | None, int]]:
        """The gradients with their version counters: equal lists mean that nothing has written to them."""
        return [(p.grad, -1 if p.grad is None else p.grad._version) for _, p in self.parameters()]

    def choose(self, index: int, methods: Sequence[Method], parameters: NamedParameters) -> None:
        """Finds the first method that is defined for the optimizer, and takes over from it what the method needs.

        Args:
            index: Which stream this is.
            methods: In order of preference.
            parameters: The optimizer's.

        Raises:
            TypeError: None of them is.
            ValueError: The optimizer's momentum is one that the method cannot take over, or not for all parameters.
        """
        objection = None
        for method in methods:
            parts = method.parts(parameters)
            objections = (sync.objection(self.optimizer) for sync, _ in parts)
            objection = next((each for each in objections if each), None)
            if objection is None:
                self.method = method
                break
        else:
            raise TypeError(f"the method is not defined for {type(self.optimizer).__name__}: {objection}")
        correcting = [sync.corrects_momentum for sync, _ in parts]
        clip = next(parts_in([sync for sync, _ in parts], ClipLocalNorm), None)
        # What is taken over from an optimizer is taken over for all its parameters.
        for sync, piece in parts:
            momentum = Momentum() if any(correcting) and not sync.corrects_momentum else None
            if momentum is None and (clip is None or sync.clips):
                continue
            problem = sync.accompany(index, None if sync.clips else clip, momentum)
            if problem is not None:
                raise ValueError(
                    f"the method takes over {'the momentum' if momentum else 'clipping'} of"
                    f" {type(self.optimizer).__name__}, which also holds {piece[0][0]!r}: {problem}"
                )
        if isinstance(self.optimizer, SGD) and any(correcting):
            self.takeover = MomentumTakeover(self.optimizer, self.members)
            momentum_rules(self.optimizer, [])


def same(before: list[tuple[Tensor | None, int]], after: list[tuple[Tensor | None, int]]) -> bool:
    return all(a[0] is b[0] and a[1] == b[1] for a, b in zip(before, after))
