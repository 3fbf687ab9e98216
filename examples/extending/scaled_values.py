"""A value codec: one byte for each value, and one scale for each tensor."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout
from lightning_sparsecomm.codecs import PayloadError, ValueCodec, register_value_codec


@register_value_codec
@dataclass(frozen=True)
class ScaledInt8(ValueCodec):
    """Sends each value as a multiple, from −127 to 127, of its tensor's scale.

    The section holds how many values of each tensor are sent (int32), each tensor's scale (float32), and each value's
    multiple (int8).
    """

    code: ClassVar[int] = 128

    def encode(self, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
        counts = layout.counts(indices)
        largest = [float(part.abs().max()) if part.numel() else 0.0 for part in values.split(counts)]
        scales = torch.tensor(largest, device=values.device).clamp(1e-36, 3e38) / 127
        numbers = torch.tensor(counts, dtype=torch.int32, device=values.device)
        multiples = (values / scales.repeat_interleave(numbers)).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([part.view(torch.uint8) for part in (numbers, scales, multiples)])

    def decode(self, section: Tensor, count: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        tensors, rest = divmod(section.numel() - count, 8)
        if tensors < 0 or rest:
            raise PayloadError(f"scaled values: {section.numel()} bytes cannot hold {count} values.")
        numbers, scales, multiples = section.clone().split([4 * tensors, 4 * tensors, count])
        numbers = numbers.view(torch.int32)
        if bool((numbers < 0).any()) or int(numbers.sum()) != count:
            raise PayloadError(
                f"scaled values: holds {numbers.tolist()} values of each tensor, expected {count} in all."
            )
        scales = scales.view(torch.float32).repeat_interleave(numbers, output_size=count)
        values: Tensor = multiples.view(torch.int8) * scales
        if not bool(values.isfinite().all()):
            raise PayloadError("scaled values: a value is not finite.")
        return values

    def bound_bytes(self, count: int, layout: Layout) -> int | None:
        return count + 8 * len(layout.segments)
