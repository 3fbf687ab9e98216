"""Digests of tensors, to compare them between ranks."""

import zlib

import torch
from torch import Tensor


def digest_of(tensor: Tensor) -> str:
    """A digest of a tensor's bits, in row-major order, whatever the memory format: 8 hexadecimal digits.

    A CRC: it finds accidents, at a fifth of the time of a cryptographic hash. Of random differences it misses one in
    4 billion, and none of up to 32 neighbouring bits.
    """
    # As bytes, since NumPy lacks bfloat16.
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return f"{zlib.crc32(data.numpy().data):08x}"
