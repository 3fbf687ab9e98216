"""Whether ranks agree, in how they were set up and in the weights that they share: what differs is said, by rank."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_sparsecomm.codecs.payload import FORMAT_VERSION
from lightning_sparsecomm.gradients import NamedParameters
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.wire import SETUP, Wire

_INSTALL = "Install the same version on all ranks."
_ARGUMENTS = "Make the strategy with the same arguments on all ranks."
_MODEL = "Build the same model, and freeze the same parameters, on all ranks."
_CHANGED = (
    "Look for what changes it on some ranks only, such as a callback or a hook; machines of different kinds may also"
    " round differently."
)
_OPTIMIZERS = "Give the same parameters to the same optimizers, in the same order, on all ranks."

# Of an object without a repr of its own: differs between processes that are set up alike.
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_ABSENT = "none"
_LONG, _CONTEXT = 160, 60


class ReplicaError(RuntimeError):
    """Weights differ between ranks that should share them. Raised on all ranks, naming the first that does."""


class Fact(NamedTuple):
    """What must be equal on all ranks.

    Attributes:
        topic: What it is about.
        value: What this rank has.
        remedy: What to do where another has something else.
    """

    topic: str
    value: str
    remedy: str


def plain_repr(method: Method) -> str:
    """Its `repr`, equal in all processes in which it is made with the same arguments."""
    return _ADDRESS.sub("", repr(method))


def facts_of_run(
    method: Method, seed: int, check_replicas_every: int | None, parameters: NamedParameters, scales_loss: bool
) -> list[Fact]:
    """What each rank's strategy and model are, as far as an exchange depends on it."""
    # Not yet there when the package imports this module.
    from lightning_sparsecomm import __version__

    facts = [
        Fact("the version of lightning_sparsecomm", __version__, _INSTALL),
        Fact("the version of torch", torch.__version__, _INSTALL),
        Fact("the version of the payload format", str(FORMAT_VERSION), _INSTALL),
        Fact("method", plain_repr(method), _ARGUMENTS),
        Fact("seed", str(seed), _ARGUMENTS),
        Fact("check_replicas_every", str(check_replicas_every), _ARGUMENTS),
        Fact("the loss scaler", "one" if scales_loss else _ABSENT, "Train with the same precision on all ranks."),
    ]
    for name, parameter in parameters:
        shape = "of no shape yet" if is_lazy(parameter) else f"of shape {tuple(parameter.shape)}"
        trained = "trained" if parameter.requires_grad else "frozen"
        facts.append(Fact(f"parameter {name!r}", f"{parameter.dtype} {shape}, {trained}", _MODEL))
    return facts


def facts_of_optimizers(optimizers: Sequence[Optimizer], parameters: NamedParameters) -> list[Fact]:
    """Which optimizers there are, and which of them hold each parameter."""
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    facts = [Fact("the list of optimizers", ", ".join(kinds) or _ABSENT, _OPTIMIZERS)]
    held = [{id(each) for group in optimizer.param_groups for each in group["params"]} for optimizer in optimizers]
    for name, parameter in parameters:
        holders = [f"number {i} ({kinds[i]})" for i, members in enumerate(held) if id(parameter) in members]
        facts.append(Fact(f"the optimizer of parameter {name!r}", " and ".join(holders) or _ABSENT, _OPTIMIZERS))
    return facts


def facts_of_weights(weights: Mapping[str, Tensor], steps: int) -> list[Fact]:
    """The bits of each parameter, as a digest, after so many optimizer steps."""
    return [
        Fact(f"parameter {name!r} after optimizer step {steps}", f"digest {_digest(weight)}", _CHANGED)
        for name, weight in weights.items()
    ]


def _digest(tensor: Tensor) -> str:
    # NumPy knows no bfloat16. Positions count in row-major order, whatever the memory format.
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()


def require_agreement(
    facts: Sequence[Fact],
    wire: Wire,
    device: torch.device,
    row: str = SETUP,
    error: type[Exception] = ValueError,
) -> None:
    """Refuses ranks whose facts differ. Called on all of them together; 32 bytes each where they agree.

    Args:
        facts: This rank's.
        wire: Where to communicate.
        device: Where what is gathered lies.
        row: The ledger's, under which that is entered.
        error: What is raised.

    Raises:
        Exception: As `error` says, where they differ; on all ranks, in the same words, naming the first difference.
    """
    if wire.world_size == 1:
        return
    # Other versions of this package must be able to read it: three strings for each fact.
    text = json.dumps(facts).encode()
    digests = wire.all_gather(_tensor(hashlib.sha256(text).digest(), device), row)
    if bool((digests == digests[0]).all()):
        return
    lengths = wire.all_gather(torch.tensor([len(text)], device=device), row).view(-1).tolist()
    texts = wire.all_gather(_tensor(text.ljust(max(lengths)), device), row).cpu()
    raise error(_difference([[Fact(*fact) for fact in json.loads(bytes(each.tolist()))] for each in texts]))


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _difference(ranks: Sequence[Sequence[Fact]]) -> str:
    """The first difference in words, the same on all ranks."""
    values = [{fact.topic: fact.value for fact in facts} for facts in ranks]
    # In the order of rank 0, and then what others have besides.
    for fact in (fact for facts in ranks for fact in facts):
        found = [known.get(fact.topic, _ABSENT) for known in values]
        if len(set(found)) > 1:
            return _words(fact.topic, found, fact.remedy)
    columns = zip(*ranks, strict=True)
    column = next(column for column in columns if len({fact.topic for fact in column}) > 1)
    return _words("the order of parameters", [f"{fact.topic} earlier" for fact in column], _MODEL)


def _words(topic: str, found: Sequence[str], remedy: str) -> str:
    holders: dict[str, list[str]] = {}
    for rank, value in enumerate(_shortened(found)):
        holders.setdefault(value, []).append(str(rank))
    parts = [f"{value} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in holders.items()]
    return f"{topic} must be equal on all ranks; got {'; '.join(parts)}. {remedy}"


def _shortened(texts: Sequence[str]) -> list[str]:
    """Long texts without most of what they have in common."""
    if max(map(len, texts)) <= _LONG:
        return list(texts)
    start = max(0, _alike(texts) - _CONTEXT)
    end = max(0, _alike([text[start:][::-1] for text in texts]) - _CONTEXT)
    before, behind = "…" if start else "", "…" if end else ""
    return [before + text[start : len(text) - end] + behind for text in texts]


def _alike(texts: Sequence[str]) -> int:
    """With how many characters all of them begin."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts)))
