"""The formats of docs/formats.md, written a second time, with struct alone; and the golden payloads made from it."""

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.reference.selection import k_of, top_k

GOLDEN = Path(__file__).parent.parent / "golden"
VALUE_FORMATS = {"Float32": (1, "f", 3.4028234663852886e38), "Float16": (2, "e", 65504.0), "Float64": (3, "d", 1.8e308)}


class GoldenCase(NamedTuple):
    """One entry of payloads.json: what goes into a payload."""

    name: str
    tensors: list[tuple[str, list[int]]]
    dtype: str
    x: list[float]
    density: float
    values: str
    present: list[bool] | None
    nonfinite_segment: int | None
    indices: str = "Raw32"
    zeros_before: int = 0

    def vector(self) -> np.ndarray:
        """`x` behind so many zeros."""
        return np.array([0.0] * self.zeros_before + self.x, dtype=self.dtype)


def golden_cases() -> list[GoldenCase]:
    """The inputs of all golden payloads."""
    return [GoldenCase(**case) for case in json.loads((GOLDEN / "payloads.json").read_text())]


def golden_bytes(name: str) -> bytes:
    """A recorded payload."""
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def record(case: GoldenCase) -> None:
    """Writes a golden payload anew, 16 bytes a line."""
    data = reference_payload(case)
    lines = [data[i : i + 16].hex(" ") for i in range(0, len(data), 16)]
    (GOLDEN / f"{case.name}.hex").write_text("\n".join(lines) + "\n")


def reference_payload(case: GoldenCase) -> bytes:
    """The payload for a case's inputs. None of them has a tie at the threshold."""
    x = case.vector()
    indices = top_k(x, k_of(case.density, len(x)), 0)
    body = sparse_body(indices, [float(x[i]) for i in indices], len(x), case.values, case.indices)
    return envelope(body, case.tensors, case.present, case.nonfinite_segment)


def fingerprint(tensors: Sequence[tuple[str, Sequence[int]]]) -> int:
    """The checksum of names and shapes."""
    return zlib.crc32(repr([(name, tuple(shape)) for name, shape in tensors]).encode())


def sparse_body(
    indices: Sequence[int], values: Sequence[float], size: int, codec: str, index_codec: str = "Raw32"
) -> bytes:
    """A sparse body."""
    code, letter, largest = VALUE_FORMATS[codec]
    index_code = {"Raw32": 1, "RunLength16": 2}[index_codec]
    if len(indices) == size:
        positions = b""
    elif index_code == 1:
        positions = b"".join(struct.pack("<I", index) for index in indices)
    else:
        positions, following = b"", 0
        for index in indices:
            zeros = index - following
            positions += b"\xff\xff" * (zeros // 65535) + struct.pack("<H", zeros % 65535)
            following = index + 1
    head = bytes([index_code, code, 0, 0]) + struct.pack("<III", size, len(indices), len(positions))
    return head + positions + b"".join(struct.pack("<" + letter, max(-largest, min(largest, v))) for v in values)


def envelope(
    body: bytes,
    tensors: Sequence[tuple[str, Sequence[int]]],
    present: Sequence[bool] | None = None,
    nonfinite_segment: int | None = None,
) -> bytes:
    """An envelope around a body."""
    flags = 0
    if nonfinite_segment is not None:
        flags, body = 2, struct.pack("<I", nonfinite_segment)
    if present is not None and False in present:
        flags += 1
        bitmap = sum(1 << i for i, here in enumerate(present) if here)
        body = bitmap.to_bytes(-(-len(present) // 8), "little") + body
    head = b"LS" + bytes([1, flags]) + struct.pack("<II", fingerprint(tensors), len(body))
    return head + struct.pack("<I", zlib.crc32(head + body)) + body
