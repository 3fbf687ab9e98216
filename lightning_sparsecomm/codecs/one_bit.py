"""Values of which only the sign is sent, with one magnitude for a group."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.grouped import Grouped
from lightning_sparsecomm.codecs.registry import register_value_codec
from lightning_sparsecomm.kernels import value_kernels_for


@register_value_codec
@dataclass(frozen=True)
class OneBit(Grouped):
    """A sign for each value, and the mean magnitude of each group of consecutive values: 1 bit, and 2 bytes a group.

    The mean is computed in float64, limited to the largest finite bfloat16, rounded to bfloat16, and decoded as
    float32. Biased; use it with error feedback. Together with `TopK` at a third of the elements or more, values become
    −a, 0 and a.

    Source: Seide et al. 2014, 1-bit Stochastic Gradient Descent, sends signs with error feedback. Magnitudes by group,
    and none for elements that are not selected, are ours.

    >>> codec, layout, at = OneBit(), Layout([("weight", (8,))]), torch.arange(4)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 4.0, -5.0]), at, layout), count=4, parameter=128)
    tensor([ 3., -3.,  3., -3.])

    Args:
        group: How many values share a magnitude. The last group may have fewer.

    Raises:
        ValueError: `group` is not a whole number from 1 to 255.
    """

    group: int = 128
    code: ClassVar[int] = 9
    bits: ClassVar[int] = 1
    head_bytes: ClassVar[int] = 2
    _kind: ClassVar[str] = "one-bit"

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        return value_kernels_for(values.device).write_one_bits(values, self.group)

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self._check(section, count, parameter)
        # The copy is aligned, wherever the section begins in the payload.
        magnitudes = section[: self.head_bytes * -(-count // parameter)].clone().view(torch.bfloat16)
        wrong = magnitudes.signbit() | ~magnitudes.isfinite()
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0, 0])
            raise self._wrong(f"magnitude at byte {2 * at} is {float(magnitudes[at])}", "a finite one, not negative")
        return value_kernels_for(section.device).read_one_bits(section, count, parameter)
