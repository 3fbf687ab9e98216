"""Sections of one tensor, for value codecs that do not use the layout."""

import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs import ValueCodec

LAYOUT = Layout([("weight", (100,))])


def encode(codec: ValueCodec, values: torch.Tensor) -> torch.Tensor:
    return codec.encode(values, torch.arange(values.numel()), LAYOUT)
