"""Texts and numbers of all ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_sparsecomm.basis.wire import Wire


def gather_texts(text: str, wire: Wire, device: torch.device, row: str) -> list[str]:
    """Every rank's text. A collective; each rank hands over 8 bytes if all texts are empty."""
    data = text.encode()
    lengths = wire.all_gather(torch.tensor([len(data)], device=device), row).view(-1).tolist()
    if not any(lengths):
        return [""] * len(lengths)
    texts = wire.all_gather(as_tensor(data.ljust(max(lengths)), device), row).cpu()
    return [bytes(each.tolist())[:length].decode() for each, length in zip(texts, lengths)]


def gather_numbers(numbers: Iterable[int], wire: Wire, device: torch.device, row: str) -> list[list[int]]:
    """Every rank's numbers, each of them in [0, 2^64). A collective; 8 bytes for each number."""
    signed = [number - 2**64 if number >= 2**63 else number for number in numbers]
    gathered = wire.all_gather(torch.tensor(signed, device=device), row)
    return [[number % 2**64 for number in numbers] for numbers in gathered.tolist()]


def as_tensor(data: bytes, device: torch.device) -> Tensor:
    """Bytes as a tensor, uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
