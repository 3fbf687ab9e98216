"""Runs: its bytes, and what it refuses."""

import struct

import pytest
import torch

from lightning_sparsecomm.basis.layout import MAX_SIZE
from lightning_sparsecomm.codecs import PayloadError, Runs


def test_runs_bytes():
    section = Runs().encode(torch.tensor([0, 3, 4, 5, 2**32 - 3, 2**32 - 2]), MAX_SIZE)
    assert bytes(section.tolist()) == struct.pack("<6I", 0, 1, 3, 3, 2**32 - 3, 2)
    assert Runs().encode(torch.empty(0, dtype=torch.int64), 9).numel() == 0


@pytest.mark.parametrize(
    ("words", "count", "size", "text"),
    [
        ([1, 2, 3], 2, 10, "has 12 bytes, expected a multiple of 8"),
        ([1, 0], 1, 10, "run at byte 0 is 0 positions from 1 on, expected at least 1, below 10"),
        ([8, 3], 3, 10, "run at byte 0 is 3 positions from 8 on, expected at least 1, below 10"),
        # Its end is above 2^32.
        ([2**32 - 2, 2**32 - 1], 3, MAX_SIZE, "run at byte 0 is 4294967295 positions from 4294967294 on"),
        ([1, 2, 3, 1], 3, 10, "run at byte 8 is 1 positions from 3 on, expected at least 1, from 4 on, below 10"),
        ([4, 2, 1, 1], 3, 10, "run at byte 8 is 1 positions from 1 on, expected at least 1, from 7 on, below 10"),
        ([1, 2], 3, 10, "its runs hold 2 positions, expected 3"),
        ([], 1, 10, "its runs hold 0 positions, expected 1"),
        # Its positions would take 32 GiB.
        ([0, 2**32 - 1], 2, MAX_SIZE, "its runs hold 4294967295 positions, expected 2"),
        ([0, 10], 10, 10, "has 8 bytes, expected 0 for 10 of 10 positions"),
    ],
)
def test_runs_refuses(words: list[int], count: int, size: int, text: str):
    section = torch.tensor(list(struct.pack(f"<{len(words)}I", *words)), dtype=torch.uint8)
    with pytest.raises(PayloadError, match=text):
        Runs().decode(section, count, size, 0)
