"""Chooses an optimizer's method, and what the method does instead of the optimizer: momentum, moments, clipping."""

import warnings
from collections.abc import Sequence

from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel.adam_moments import AdamMoments
from lightning_sparsecomm.channel.clipping import ClipLocalNorm
from lightning_sparsecomm.channel.momentum import Momentum, Velocity
from lightning_sparsecomm.channel.signs import SharedSign
from lightning_sparsecomm.sharing.adam import AdamTakeover
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.own_step import has_own_rule
from lightning_sparsecomm.sharing.sync import Sync
from lightning_sparsecomm.sharing.takeover import MomentumTakeover, Takeover, momentum_rules


def method_for(
    optimizer: Optimizer, methods: Sequence[Method], held: NamedParameters, clips_by_value: bool = False
) -> Method:
    """The first method that is defined for an optimizer.

    If one of its syncs applies momentum or clipping instead of the optimizer, all its syncs do, for all parameters.
    Where the optimizer has a rule of its own, a fallback is preferred that leaves momentum and moments to it; where the
    Trainer clips by value, one that leaves clipping to the Trainer.

    Raises:
        TypeError: No method is defined for the optimizer.
        ValueError: A sync cannot apply what another one does.
    """
    objection = None
    for method in methods:
        objections = (sync.objection(optimizer) for sync, _ in method.candidates(held))
        objection = next((each for each in objections if each), None)
        if objection is None and method is not methods[-1]:
            if _takes_over(method, held) and has_own_rule(optimizer):
                continue
            if clips_by_value and any(parts_in(method.syncs, ClipLocalNorm)):
                continue
        if objection is None:
            return _joined(method, optimizer, held)
    raise TypeError(f"the method is not defined for {type(optimizer).__name__}: {objection}")


def advice_on_clipping(optimizer: Optimizer, methods: Sequence[Method], held: NamedParameters) -> list[str]:
    """A line where a method is passed over since the Trainer clips by value; none otherwise."""
    usual, chosen = method_for(optimizer, methods, held), method_for(optimizer, methods, held, clips_by_value=True)
    if repr(usual) == repr(chosen):
        return []
    name = repr(usual).partition("(")[0]
    return [
        "sparsecomm: gradient_clip_algorithm='value' clips each element of the mean gradient, so all of it is sent."
        f" With 'norm', {name} is used, which sends fewer bytes"
    ]


def advice_on_signs(optimizer: Optimizer, method: Method) -> list[str]:
    """A line where ranks step by signs, which the optimizer would average once more; none otherwise."""
    averages = not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups)
    if not averages or not any(parts_in(method, SharedSign)):
        return []
    kind = "momentum" if isinstance(optimizer, SGD) else f"the moments of {type(optimizer).__name__}"
    return [
        f"sparsecomm: {method} steps by signs, and averaging them by {kind} once more leaves little to learn. Use"
        " torch.optim.SGD with momentum=0 and a learning rate for signs, such as 1e-3"
    ]


def takeover_for(optimizer: Optimizer, method: Method, held: NamedParameters, members: set[int]) -> Takeover | None:
    """Replaces the optimizer's own momentum or moments; None if the method leaves them to the optimizer.

    `members` are the identities of the parameters that the method trains; the caller adds more later.

    Raises:
        ValueError: It does, and the momentum is outside [0, 1].
    """
    _warn_of_own_rule(optimizer, method, held)
    syncs = [sync for sync, _ in method.candidates(held)]
    if any(_has(sync, AdamMoments) for sync in syncs):
        return AdamTakeover(optimizer)
    if not isinstance(optimizer, SGD) or not any(_has(sync, Velocity) for sync in syncs):
        return None
    momentum_rules(optimizer, [])
    return MomentumTakeover(optimizer, members)


Parts = Sequence[tuple[Sync, NamedParameters]]
"""Syncs, and the parameters of each."""


def parts_of(method: Method, before: Parts, named: NamedParameters) -> list[tuple[Sync, NamedParameters]]:
    """A method's syncs with their parameters, to which some may have been added.

    Args:
        method: As chosen for the optimizer's parameters at its first step.
        before: What this returned before; empty at first. Syncs of another method do not count.
        named: All parameters that the optimizer trains.

    Raises:
        ValueError: A sync gets its first parameter late, and momentum, moments or clipping are the optimizer's there
            but not elsewhere, or the reverse: they would count twice, or not at all.
    """
    parts = method.parts(named)
    syncs = [sync for sync, _ in before if sync in method.syncs]
    for sync, piece in parts if syncs else ():
        for kind, what in ((Velocity, "momentum"), (AdamMoments, "moments"), (ClipLocalNorm, "clipping")):
            taken = any(_has(each, kind) for each in syncs)
            if sync not in syncs and _has(sync, kind) != taken:
                raise ValueError(
                    f"parameter {piece[0][0]!r} must belong to its optimizer from the first step on, since it is the"
                    f" first of its part of the method, and {what} cannot be taken over for one part alone. Give it to"
                    " the optimizer at the start, with requires_grad=False until it is trained."
                )
    return parts


def directed(parts: Sequence[tuple[Sync, NamedParameters]]) -> list[Parameter]:
    """The parameters for which ranks share directions instead of gradients, in units of the learning rate."""
    return [parameter for sync, piece in parts if _has(sync, AdamMoments) for _, parameter in piece]


def _takes_over(method: Method, held: NamedParameters) -> bool:
    """Whether a method applies momentum or moments instead of an optimizer that holds these parameters."""
    syncs = [sync for sync, _ in method.candidates(held)]
    return any(_has(sync, kind) for sync in syncs for kind in (Velocity, AdamMoments))


def _warn_of_own_rule(optimizer: Optimizer, method: Method, held: NamedParameters) -> None:
    """Warns where a method takes over momentum or moments from an optimizer that has a rule of its own."""
    if _takes_over(method, held) and has_own_rule(optimizer):
        name = type(optimizer).__name__
        warnings.warn(
            f"{name} changes gradients, weights or state in code of its own, and the method applies momentum or moments"
            f" as torch's class does: in {name}'s step, .grad holds what is shared of these, or nothing, and the"
            " groups' momentum and weight decay are 0. So it trains by another rule than with ddp. Use 'sparsecomm' or"
            " methods.gradient_dropping(), which leave its rule as it is.",
            stacklevel=2,
        )


def _joined(method: Method, optimizer: Optimizer, held: NamedParameters) -> Method:
    """The method with momentum and clipping in all its syncs, if one of them has it."""
    parts = method.candidates(held)
    clip = next(parts_in([sync for sync, _ in parts], ClipLocalNorm), None)
    corrects = any(_has(sync, Velocity) for sync, _ in parts)
    syncs: list[Sync] = []
    for sync in method.syncs:
        piece = next((piece for each, piece in parts if each is sync), ())
        momentum = Momentum() if corrects and not _has(sync, Velocity) else None
        missing = clip if not _has(sync, ClipLocalNorm) else None
        if piece and (momentum is not None or missing is not None):
            try:
                sync = sync.joining(missing, momentum)
            except ValueError as error:
                taken = "the momentum" if momentum else "clipping"
                raise ValueError(
                    f"the method takes over {taken} of {type(optimizer).__name__}, which also holds"
                    f" {piece[0][0]!r}: {error}"
                ) from None
        syncs.append(sync)
    return method.with_syncs(syncs)


def _has(sync: Sync, kind: type[object]) -> bool:
    return next(parts_in(sync, kind), None) is not None
