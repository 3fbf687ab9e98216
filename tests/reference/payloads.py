"""The formats of docs/formats.md, implemented again with struct alone, and the golden payloads made from them."""

import itertools
import json
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.reference.selection import k_of, top_k

GOLDEN = Path(__file__).parent.parent / "golden"
GROUP = 3  # The group size of golden payloads whose values share magnitudes.
STEP = 0.5  # What values of golden payloads are multiples of.
VALUE_FORMATS = {"Float32": (1, "f", 3.4028234663852886e38), "Float16": (2, "e", 65504.0), "Float64": (3, "d", 1.8e308)}


class GoldenCase(NamedTuple):
    """One entry of payloads.json: the inputs of a payload."""

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
        """`x`, after `zeros_before` zeros."""
        return np.array([0.0] * self.zeros_before + self.x, dtype=self.dtype)


def golden_cases() -> list[GoldenCase]:
    """The inputs of all golden payloads."""
    return [GoldenCase(**case) for case in json.loads((GOLDEN / "payloads.json").read_text())]


def golden_bytes(name: str) -> bytes:
    """A recorded payload."""
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def record(case: GoldenCase) -> None:
    """Writes a golden payload, 16 bytes a line."""
    data = reference_payload(case)
    lines = [data[i : i + 16].hex(" ") for i in range(0, len(data), 16)]
    (GOLDEN / f"{case.name}.hex").write_text("\n".join(lines) + "\n")


def reference_payload(case: GoldenCase) -> bytes:
    """The payload of a case. No case has a tie at the threshold."""
    x = case.vector()
    indices = top_k(x, k_of(case.density, len(x)), 0)
    sizes = [math.prod(shape) for _, shape in case.tensors]
    body = sparse_body(indices, [float(x[i]) for i in indices], len(x), case.values, case.indices, sizes)
    return envelope(body, case.tensors, case.present, case.nonfinite_segment)


def fingerprint(tensors: Sequence[tuple[str, Sequence[int]]]) -> int:
    """The checksum of names and shapes."""
    return zlib.crc32(repr([(name, tuple(shape)) for name, shape in tensors]).encode())


def sparse_body(
    indices: Sequence[int],
    values: Sequence[float],
    size: int,
    codec: str,
    index_codec: str = "Raw32",
    segments: Sequence[int] = (),
) -> bytes:
    """A sparse body. `segments` are the sizes of segments, for SharedMean."""
    if index_codec == "Auto":
        # The first of the shortest sections.
        sections = {
            name: index_section(indices, size, name)[2]
            for name in ("RunLength16", "Raw32", "Bitmap", "Golomb", "AdaptiveGolomb")
        }
        index_codec = min(sections, key=lambda name: len(sections[name]))
    index_code, index_parameter, positions = index_section(indices, size, index_codec)
    value_code, value_parameter, numbers = value_section(indices, values, codec, segments)
    head = bytes([index_code, value_code, index_parameter, value_parameter])
    return head + struct.pack("<III", size, len(indices), len(positions)) + positions + numbers


def index_section(indices: Sequence[int], size: int, codec: str) -> tuple[int, int, bytes]:
    """Code, parameter and bytes of positions."""
    code = {"Raw32": 1, "RunLength16": 2, "Golomb": 3, "Bitmap": 4, "Runs": 5, "AdaptiveGolomb": 6}[codec]
    runs = [index - before - 1 for before, index in zip([-1, *indices], indices)]
    if len(indices) == size:
        return code, 0, b""
    if codec == "Raw32":
        return code, 0, b"".join(struct.pack("<I", index) for index in indices)
    if codec == "RunLength16":
        return code, 0, b"".join(b"\xff\xff" * (run // 65535) + struct.pack("<H", run % 65535) for run in runs)
    if codec == "Bitmap":
        return code, 0, sum(1 << index for index in indices).to_bytes(-(-size // 8), "little")
    if codec == "Runs":
        firsts = [index for index, run in zip(indices, [1, *runs[1:]]) if run]
        lasts = [index for index, run in zip(indices, [*runs[1:], 1]) if run]
        return code, 0, b"".join(struct.pack("<II", first, last - first + 1) for first, last in zip(firsts, lasts))
    if codec == "AdaptiveGolomb":
        return code, 0, adaptive_section(runs)
    if not indices:
        return code, 0, b""
    golden = (math.sqrt(5) + 1) / 2
    parameter = max(0, 1 + math.floor(math.log2(math.log(golden - 1) / math.log(1 - len(indices) / size))))
    stream, length = 0, 0
    for run in runs:
        quotient, remainder = divmod(run, 1 << parameter)
        stream |= ((1 << quotient) - 1 | remainder << quotient + 1) << length
        length += quotient + 1 + parameter
    return code, parameter, stream.to_bytes(-(-length // 8), "little")


def adaptive_section(runs: Sequence[int]) -> bytes:
    """Runs in a code for each block of 64."""
    changes = codes = prefixes = suffixes = thirds = ""
    before = 0
    for first in range(0, len(runs), 64):
        block = runs[first : first + 64]
        lengths = {
            c: sum(map(len, itertools.chain(*(adaptive_word(run, c) for run in block)))) for c in near(block, before)
        }
        code = min(lengths, key=lambda each: (lengths[each] + 6 * (each != before), each))
        changes += "01"[code != before]
        codes += low_first(code, 6) if code != before else ""
        before = code
        for run in block:
            prefix, suffix, third = adaptive_word(run, code)
            prefixes, suffixes, thirds = prefixes + prefix, suffixes + suffix, thirds + third
    bits = changes + codes + prefixes + suffixes + thirds
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def near(block: Sequence[int], before: int) -> set[int]:
    """The codes that a sender considers for a block."""
    bits = (sum(block) // len(block)).bit_length()
    b = min(20, sum((run + 1).bit_length() - 1 for run in block) // len(block))
    codes = {3 * i + kind for i in range(bits - 2, bits) for kind in (0, 1)} | {3 * bits}
    return {code for code in codes | {3 * b + 2, 3 * max(0, b - 1) + 2, before} if 0 <= code < 64}


def adaptive_word(run: int, code: int) -> tuple[str, str, str]:
    """Prefix, suffix and third of a run, in the order of the stream."""
    b, kind = divmod(code, 3)
    whole, low = divmod(run, 2**b)
    if kind == 0:
        return "0" * whole + "1", low_first(low, b), ""
    if kind == 1:
        quotient, rest = divmod(whole, 3)
        return "0" * quotient + "1", low_first(low, b) + "011"[rest], ["", "0", "1"][rest]
    logarithm = (whole + 1).bit_length() - 1
    return "0" * logarithm + "1", low_first(run - (2**logarithm - 1) * 2**b, b + logarithm), ""


def low_first(number: int, bits: int) -> str:
    """The number in so many bits, the lowest first."""
    return f"{number:0{bits}b}"[::-1] if bits else ""


def value_section(
    indices: Sequence[int], values: Sequence[float], codec: str, segments: Sequence[int]
) -> tuple[int, int, bytes]:
    """Code, parameter and bytes of values."""
    if codec == "SharedMean":
        section, start = b"", 0
        for size in segments:
            group = [value for index, value in zip(indices, values) if start <= index < start + size]
            start += size
            if group:
                section += leb128(len(group)) + struct.pack("<f", sum(group) / len(group))
        return 4, 0, section
    if codec == "TwoBit":
        levels, stream = b"", 0
        for first in range(0, len(values), GROUP):
            group = [abs(value) for value in values[first : first + GROUP]]
            middle = sum(group) / len(group)
            large = [magnitude for magnitude in group if magnitude >= middle]
            small = [magnitude for magnitude in group if magnitude < middle] or large
            levels += struct.pack("<2e", *(min(65504.0, sum(part) / len(part)) for part in (small, large)))
            for i, magnitude in enumerate(group, first):
                stream |= ((values[i] < 0) | (magnitude >= middle) << 1) << 2 * i
        return 5, GROUP, levels + stream.to_bytes(-(-len(values) // 4), "little")
    if codec == "ThreeBit":
        heads, stream = b"", 0
        for first in range(0, len(values), GROUP):
            head, numbers = three_bit_group(values[first : first + GROUP])
            heads += head
            for i, number in enumerate(numbers, first):
                stream |= ((values[i] < 0) | number << 1) << 3 * i
        return 7, GROUP, heads + stream.to_bytes(-(-3 * len(values) // 8), "little")
    if codec == "ShortThreeBit":
        heads, ranks = b"", []
        for first in range(0, len(values), GROUP):
            head, numbers = three_bit_group(values[first : first + GROUP])
            swapped = numbers.count(1) > numbers.count(0)
            heads += bytes([head[0], head[1] | 128 * swapped, *head[2:]])
            ranks += [(1 - number if swapped and number < 2 else number) for number in numbers]
        bits = [value < 0 for value in values]
        for least in range(3):
            bits += [rank > least for rank in ranks if rank >= least]
        stream = sum(bit << i for i, bit in enumerate(bits))
        return 8, GROUP, heads + stream.to_bytes(-(-len(bits) // 8), "little")
    if codec == "OneBit":
        groups = [values[first : first + GROUP] for first in range(0, len(values), GROUP)]
        means = b"".join(bfloat16(sum(abs(value) for value in group) / len(group)) for group in groups)
        stream = sum(1 << i for i, value in enumerate(values) if value < 0)
        return 9, GROUP, means + stream.to_bytes(-(-len(values) // 8), "little")
    signs = sum(1 << i for i, value in enumerate(values) if value < 0).to_bytes(-(-len(values) // 8), "little")
    if codec in ("Multiples", "Once"):
        multiples = [1 if codec == "Once" else max(1, int(abs(value) // STEP)) for value in values]
        lengths = [f"{multiple:b}"[1:][::-1] for multiple in multiples]
        unary = bits_of("".join("0" * len(digits) + "1" for digits in lengths)) if any(lengths) else b""
        return 10, 0, struct.pack("<fI", STEP, len(unary)) + unary + bits_of("".join(lengths)) + signs
    if codec in ("SignedMeans", "SignedMean"):
        section, start = b"", 0
        for size in segments:
            group = [value for index, value in zip(indices, values) if start <= index < start + size]
            start += size
            sides = [[v for v in group if v >= 0], [-v for v in group if v < 0]]
            sides = sides if codec == "SignedMeans" else [[abs(v) for v in group]]
            if group:
                means = (sum(side) / max(1, len(side)) for side in sides)
                section += leb128(len(group)) + struct.pack(f"<{len(sides)}f", *means)
        return 11, 1 + (codec == "SignedMeans"), section + signs
    code, letter, largest = VALUE_FORMATS[codec]
    return code, 0, b"".join(struct.pack("<" + letter, max(-largest, min(largest, value))) for value in values)


def bits_of(stream: str) -> bytes:
    """The bytes of zeros and ones, the first of them lowest."""
    return bytes(int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8))


def three_bit_group(values: Sequence[float]) -> tuple[bytes, list[int]]:
    """The head of a group of three-bit values, and which of the four magnitudes each value takes."""
    magnitudes = [min(2.0**126, abs(value)) if abs(value) >= 2.0**-126 else 0.0 for value in values]
    mean = sum(magnitudes) / len(magnitudes)
    with_zero = min(magnitudes) < mean / 8
    least = 7 / 8 * mean if with_zero else min(magnitudes)
    if least < 2.0**-126:
        return bfloat16(0.0) + bfloat16(1.0), [3] * len(values)
    ratio = (max(magnitudes) / least) ** (1 / (2 if with_zero else 3))
    head = bfloat16(least) + bfloat16(-ratio if with_zero else ratio)
    first, rise = (np.float32(struct.unpack("<f", b"\0\0" + part)[0]) for part in (head[:2], head[2:]))
    levels = [np.float32(0)] * with_zero + [first]
    while len(levels) < 4:
        levels.append(levels[-1] * abs(rise))
    bounds = [(float(low) + float(high)) / 2 for low, high in itertools.pairwise(levels)]
    return head, [sum(abs(value) >= bound for bound in bounds) for value in values]


def bfloat16(number: float) -> bytes:
    """The nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return struct.pack("<I", bits + 0x7FFF + (bits >> 16 & 1))[2:]


def leb128(number: int) -> bytes:
    """Seven bits a byte, lowest first. The eighth bit says whether more bytes follow."""
    return bytes([number]) if number < 128 else bytes([number % 128 + 128]) + leb128(number // 128)


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
