"""Some steps on small stand-ins, before the first real one: they compile the kernels that a training will need."""

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.codecs import SparseCodec
from lightning_sparsecomm.codecs.sparse import decode_sparse, encode_sparse
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.method import Method

# The first parameter of each dtype has a stand-in with so many elements a dimension, all others one with fewer.
_LONG, _SHORT = 160, 6

# Steps of a rehearsal, at its beginning and again after warm-ups; and a step and an epoch after any warm-up.
_STEPS, _LATE = 3, 10**9

# Elements of a vector that is coded in all ways.
_ELEMENTS = 20_000

# Optimizers that methods take over: their settings choose kernels. Others have no settings that matter here.
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

_COMPILING = "sparsecomm: compiling kernels, once per machine; `sparsecomm warm` does it beforehand"


def compile_kernels(
    engine: Engine,
    first: bool,
    barrier: Callable[[str], object],
    say: Callable[[str], None],
    methods: Sequence[Method] | None = None,
) -> None:
    """Compiles what a run will need, on one rank of each machine; then the others load that. A collective.

    Args:
        engine: The run, with its optimizers, before the first step. Nothing of it is touched.
        first: Whether this rank is the first of its machine.
        barrier: Waits for all ranks.
        say: Prints a line, before the first kernel that is compiled.
        methods: What the run may use; its method by default.
    """
    # Not at the top: it imports numba, which takes a second.
    from lightning_sparsecomm.kernels.numba_jit import announcing

    # DDP's buckets need no kernel.
    methods = [each for each in methods or engine.registry.methods[:1] if not isinstance(each.syncs[0], BucketSync)]
    if methods:
        if first:
            with announcing(lambda: say(_COMPILING)):
                _rehearse(engine, methods)
        barrier("kernels are compiled")
        if not first:
            _rehearse(engine, methods)


def _rehearse(engine: Engine, methods: Sequence[Method]) -> None:
    kinds = [(each.optimizer, _trained_by(each.optimizer, engine)) for each in engine.registry.optimizers]
    for method in methods:
        rehearse_method(method, kinds, [engine.length])


def rehearse_method(
    method: Method, kinds: Sequence[tuple[Optimizer, NamedParameters]], lengths: Sequence[float]
) -> None:
    """Takes steps with a method on stand-ins of parameters, as if with one other rank.

    What cannot be rehearsed is compiled in the first step.

    Args:
        method: The method; it stays as it is.
        kinds: Optimizers, with the parameters that each trains.
        lengths: Optimizer steps of the runs to prepare for: density, and so the coding, may follow from it.
    """
    with own_randomness(kinds), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for length in lengths:
                _take_steps(method, kinds, length)
            for codec in parts_in(list(method.syncs), SparseCodec):
                _code(codec)
        except Exception:
            # Parts from outside may need what only a real run has. The run itself says what is wrong, if anything is.
            return


def own_randomness(kinds: Sequence[tuple[Optimizer, NamedParameters]]) -> AbstractContextManager[None]:
    """A context after which the generators of the CPU and of the parameters' GPUs are as before it."""
    devices = {parameter.device for _, parameters in kinds for _, parameter in parameters if parameter.is_cuda}
    return torch.random.fork_rng(devices=devices)


def _trained_by(optimizer: Optimizer, engine: Engine) -> NamedParameters:
    known = engine.registry.known
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return [known[id(weight)] for weight in weights if id(weight) in known]


def _take_steps(method: Method, kinds: Sequence[tuple[Optimizer, NamedParameters]], length: float) -> None:
    engine = Engine(copy.deepcopy(method), MirrorWire())
    optimizers = []
    for optimizer, parameters in kinds:
        stand_ins = _stand_ins(parameters)
        engine.registry.known |= {id(parameter): (name, parameter) for name, parameter in stand_ins}
        weights = [parameter for _, parameter in stand_ins]
        optimizers.append(alike(optimizer, weights))
    # The run that is rehearsed does not end in these steps.
    engine.expect(max(length, _STEPS + 1))
    for step in range(2 * _STEPS):
        if step == _STEPS:
            # After any warm-up, methods may send so few elements that they code them otherwise.
            engine.epoch = _LATE
            for tracked in engine.registry.optimizers:
                tracked.steps += _LATE
            engine.expect(max(length, _STEPS + 1))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = torch.randn_like(weight)
            with engine.stepping(optimizer):
                engine.closure(optimizer, lambda: None)()
                optimizer.step()
    engine.settle()
    engine.guards.close()


def alike(optimizer: Optimizer, weights: list[Parameter]) -> Optimizer:
    """An optimizer of the same kind and settings for other weights; RMSprop where its settings do not matter here."""
    kind = type(optimizer)
    if kind not in _KNOWN:
        return torch.optim.RMSprop(weights)
    # AdamW's defaults hold an argument of Adam's that its own constructor does not take.
    known = inspect.signature(kind).parameters
    return kind(weights, **{name: value for name, value in optimizer.defaults.items() if name in known})


def _code(codec: SparseCodec) -> None:
    """Encodes and decodes with all codecs that a compressor chooses among: which one it is depends on the data."""
    for share in (0.01, 0.5):
        indices = (torch.rand(_ELEMENTS) < share).nonzero().view(-1)
        for positions in codec.indices.codecs():
            for values in codec.values.codecs():
                vector = SparseVector(indices, torch.randn(len(indices)), _ELEMENTS)
                decode_sparse(encode_sparse(vector, Layout([("", (_ELEMENTS,))]), values, positions), _ELEMENTS)


def _stand_ins(parameters: NamedParameters) -> list[tuple[str, Parameter]]:
    """Small parameters of the same names, dtypes, devices and numbers of dimensions."""
    seen: set[torch.dtype] = set()
    stand_ins = []
    for name, parameter in parameters:
        most = _SHORT if parameter.dtype in seen or parameter.dim() < 2 else _LONG
        if parameter.dim() > 1:
            seen.add(parameter.dtype)
        shape = [min(size, most if index < 2 else 3) for index, size in enumerate(parameter.shape)]
        values = torch.randn(shape, device=parameter.device).to(parameter.dtype)
        stand_ins.append((name, Parameter(values, requires_grad=parameter.requires_grad)))
    return stand_ins
