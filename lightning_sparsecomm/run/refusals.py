"""Refusals of parameters that a method cannot exchange."""

import itertools
from collections.abc import Collection, Sequence
from typing import cast

from torch import nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from lightning_sparsecomm.basis.overlaps import overlapping
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.gradients import NamedParameters, has_sparse_gradient
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.sync import Sync, matches
from lightning_sparsecomm.sharing.takeover import MomentumTakeover, Takeover


def refuse_unmatched(syncs: Sequence[Sync], names: Sequence[str]) -> None:
    """Refuses patterns that match no parameter."""
    for sync in syncs:
        limits = (*itertools.chain(*sync.inside), *sync.outside)
        for option, patterns in (("parameters", (*sync.parameters, *limits)), ("exclude", sync.exclude)):
            for pattern in patterns:
                if not any(matches(name, (pattern,)) for name in names):
                    raise ValueError(
                        f"{option}: the pattern {pattern!r} matches no parameter. Patterns are shell-style and match"
                        f" whole names; the names are {listed(names)}."
                    )


def refuse_misplaced(method: Method, named: NamedParameters) -> None:
    """Refuses parameters that belong to no sync of a method or to several, or that their sync cannot take."""
    for name, parameter in named:
        claiming = [sync for sync in method.syncs if sync.claims(name, parameter)]
        frozen = has_sparse_gradient(parameter) and not parameter.requires_grad
        if len(claiming) > 1 or not (frozen or method.takes(name, parameter)):
            raise ValueError(
                f"each parameter must belong to exactly one sync; {name!r} belongs to {len(claiming)}."
                " Change the `parameters` and `exclude` patterns of the method's syncs."
            )
    for sync, parameters in method.parts(named):
        sync.check(parameters)


def refuse_sparse(methods: Sequence[Method], named: NamedParameters) -> None:
    """Refuses parameters with sparse gradients that a method cannot take."""
    for name, parameter in named:
        if has_sparse_gradient(parameter) and not all(method.takes(name, parameter) for method in methods):
            raise TypeError(
                f"the gradient of {name!r} is sparse (sparse=True), which this method cannot take. Use"
                f" methods.split([{name!r}], methods.s2_reducer(), methods.local_adam()) (methods.dgc() for SGD),"
                " methods.parallax() or omnireduce(), a method that exchanges weights, such as methods.sbc(), or a"
                " layer with sparse=False."
            )


def refuse_renormalizing(methods: Sequence[Method], name: str, module: nn.Module) -> None:
    """Refuses embeddings whose forward passes change weights, where ranks do not exchange weights."""
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
        return
    weight = f"{name}.weight" if name else "weight"
    syncs = [sync for method in methods for sync, _ in method.parts([(weight, cast(Parameter, module.weight))])]
    if module.weight.requires_grad and not all(isinstance(sync, DeltaSync) for sync in syncs):
        raise ValueError(
            f"max_norm of {name!r} must be None with a method that shares gradients; got {module.max_norm}. Forward"
            " passes rescale the rows that a rank's batch meets, so replicas drift apart, with ddp in silence. Rescale"
            f" all rows after each step, by weight.data.renorm_({module.norm_type:g}, 0, {module.max_norm}) in"
            " on_train_batch_end; or use a method that exchanges weights, such as methods.sbc()."
        )


def refuse_complex(name: str, parameter: Parameter) -> None:
    if parameter.is_complex():
        raise TypeError(
            f"parameter {name!r} is complex, which no method can take. Store it as a real tensor (torch.view_as_real),"
            " or use strategy='ddp'."
        )


def refuse_ignored(takeover: Takeover | None, ignored: bool) -> None:
    """Refuses, and ends, a takeover of momentum if DDP ignores some of the optimizer's parameters."""
    if ignored and isinstance(takeover, MomentumTakeover):
        takeover.close()
        raise ValueError(
            "the method replaces the momentum of an optimizer that also holds parameters which DDP is told to ignore"
            " (_ddp_params_and_buffers_to_ignore), and these would have none. Give them an optimizer of their own, or"
            " use methods.dgc(momentum_correction=False)."
        )


def refuse_strangers(parameters: Sequence[Parameter]) -> None:
    """Refuses an optimizer's parameters that no module holds, if there are any."""
    if parameters:
        raise ValueError(
            f"the optimizer holds {len(parameters)} parameter(s) that the model lacks, of shapes"
            f" {listed([tuple(each.shape) for each in parameters])}: their gradients would stay local, and the replicas"
            " drift apart. Make them part of the model."
        )


def refuse_unannounced(named: NamedParameters, noted: Collection[int]) -> None:
    """Refuses parameters that have a gradient, though none were `noted` to require one: other ranks may differ."""
    for name, parameter in named:
        if parameter.grad is not None and id(parameter) not in noted:
            raise ValueError(
                f"parameter {name!r} has a gradient, but required none in a backward pass of the strategy, so other"
                " ranks may not exchange it. Let it require one during manual_backward or fabric.backward, or set its"
                " .grad to None."
            )


def refuse_lbfgs(optimizer: Optimizer, in_nodes: bool) -> None:
    """Refuses what looks at each rank's own loss, by which ranks of a node would make different steps."""
    if in_nodes and isinstance(optimizer, LBFGS):
        raise TypeError(
            "nodes must be left out with LBFGS: it stops by each rank's own loss, so ranks of a node would differ. Use"
            " torch.optim.SGD or AdamW."
        )


def refuse_moved_by_others(named: NamedParameters, others: Collection[int]) -> None:
    """Refuses weights that another share, or another of these weights, would also set to an anchor.

    Args:
        named: The weights.
        others: The identities of other optimizers' members.
    """
    for name, parameter in named:
        if id(parameter) in others:
            raise ValueError(
                f"parameter {name!r} belongs to two optimizers. Each would set it to its own anchor and undo the"
                " other's steps. Give it to one optimizer, or use methods.default(every=1) or"
                " methods.gradient_dropping(), which exchange in each step."
            )
    if (found := overlapping(named)) is not None:
        raise ValueError(
            f"parameters {found[0]!r} and {found[1]!r} must not share memory, as a transposed weight does: each is set"
            " to its own anchor, and would undo the other's steps. Register one of them, and compute the other from it"
            " in forward; or use methods.default(every=1) or methods.gradient_dropping()."
        )


def listed(things: Sequence[object], most: int = 6) -> str:
    """The first few things, as text."""
    shown = ", ".join(str(thing) for thing in things[:most])
    return shown if len(things) <= most else f"{shown}, … ({len(things)} in all)"
