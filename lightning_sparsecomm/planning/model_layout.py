"""What a model gives ranks to exchange: parameters, tensors, optimizers, and DDP's buckets."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.planning.quantities import as_bytes

# DDP's buckets, in bytes; the first is smaller.
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20

# Tensors that are named.
_LARGEST = 5


class LargeTensor(NamedTuple):
    """A trained parameter."""

    name: str
    shape: list[int]
    elements: int


@dataclass(frozen=True)
class ModelLayout:
    """The parameters that ranks share.

    Attributes:
        tensors, elements, size_bytes: Of the parameters that require a gradient.
        frozen_elements: Of all others, for which nothing is sent.
        dtypes: Elements by dtype.
        optimizers: Elements by kind of optimizer; empty where unknown.
        largest: The largest tensors, in falling order.
        buckets_bytes: DDP's buckets, in the order in which the backward pass fills them.
    """

    tensors: int
    elements: int
    size_bytes: int
    frozen_elements: int
    dtypes: dict[str, int]
    optimizers: dict[str, int]
    largest: list[LargeTensor]
    buckets_bytes: list[int]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], optimizers: Sequence[Optimizer] = ()) -> "ModelLayout":
        """The layout of modules that train together.

        >>> ModelLayout.of([torch.nn.Linear(1000, 500)]).line()
        '500,500 parameters in 2 tensors, 2 MB of float32, in 1 bucket of DDP; the largest is weight with 99.9%'

        Args:
            modules: The modules; a parameter that several share counts once.
            optimizers: What trains them, where that is known.
        """
        named = {id(weight): (name, weight) for module in modules for name, weight in module.named_parameters()}
        trained = [(name, weight) for name, weight in named.values() if weight.requires_grad]
        dtypes, kinds = Counter[str](), Counter[str]()
        for _, weight in trained:
            dtypes[str(weight.dtype).removeprefix("torch.")] += weight.numel()
        for optimizer in optimizers:
            weights = (weight for group in optimizer.param_groups for weight in group["params"])
            kinds[type(optimizer).__name__] += sum(weight.numel() for weight in weights if weight.requires_grad)
        largest = sorted(trained, key=lambda each: -each[1].numel())[:_LARGEST]
        return cls(
            len(trained),
            sum(dtypes.values()),
            sum(weight.nbytes for _, weight in trained),
            sum(weight.numel() for _, weight in named.values() if not weight.requires_grad),
            dict(dtypes),
            dict(kinds),
            [LargeTensor(name, list(weight.shape), weight.numel()) for name, weight in largest],
            [sum(weight.nbytes for weight in bucket) for bucket in ddp_buckets([weight for _, weight in trained])],
        )

    def line(self) -> str:
        """All of it in a sentence."""
        words = f"{self.elements:,} parameters in {self.tensors} tensors, {as_bytes(self.size_bytes)} of"
        words += f" {' and '.join(self.dtypes)}"
        if self.optimizers:
            words += ", trained by " + ", ".join(f"{name} ({count:,})" for name, count in self.optimizers.items())
        if self.frozen_elements:
            words += f", {self.frozen_elements:,} more frozen"
        buckets = len(self.buckets_bytes)
        words += f", in {buckets} bucket{'s' if buckets != 1 else ''} of DDP"
        if self.largest:
            first = self.largest[0]
            words += f"; the largest is {first.name} with {first.elements / self.elements:.1%}"
        return words

    def table(self) -> str:
        """The sentence, the largest tensors, and DDP's buckets."""
        width = max((len(each.name) for each in self.largest), default=0) + 2
        lines = [f"The model has {self.line()}.", "", f"{'largest tensors':<{max(width, 17)}}{'elements':>16}  shape"]
        for each in self.largest:
            lines.append(f"{each.name:<{max(width, 17)}}{each.elements:>16,}  {' x '.join(map(str, each.shape))}")
        sizes = ", ".join(as_bytes(size) for size in self.buckets_bytes)
        return "\n".join([*lines, "", f"DDP's buckets, in the order of the backward pass: {sizes}."])

    def as_dict(self) -> dict[str, object]:
        """All of it, for JSON."""
        return asdict(self) | {"largest": [each._asdict() for each in self.largest]}


def ddp_buckets(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """DDP's buckets with its default sizes: from the last parameter to the first, as the backward pass goes.

    Args:
        parameters: Those that require a gradient, in the module's order.
    """
    buckets: list[list[Parameter]] = []
    bucket: list[Parameter] = []
    filled = 0
    for parameter in reversed(parameters):
        bucket.append(parameter)
        filled += parameter.nbytes
        if filled >= (_BUCKET if buckets else _FIRST_BUCKET):
            buckets.append(bucket)
            bucket, filled = [], 0
    return [*buckets, bucket] if bucket else buckets
