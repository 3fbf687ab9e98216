"""Altered payloads: each raises a PayloadError or decodes to a valid vector, in bounded time and memory."""

import os
import random
import re
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sparsecomm.basis.layout import MAX_SIZE, Layout, SparseVector
from lightning_sparsecomm.codecs import (
    INDEX_CODECS,
    VALUE_CODECS,
    Auto,
    Bitmap,
    Envelope,
    IndexCoding,
    Multiples,
    OneBit,
    PayloadError,
    ShortThreeBit,
    SignedMeans,
    ThreeBit,
    TwoBit,
    ValueCodec,
    decode_sparse,
    encode_sparse,
    most_bytes,
    open_envelope,
    seal,
)
from lightning_sparsecomm.kernels import PositionKernels
from lightning_sparsecomm.kernels.positions import blocks_cpu, cpu
from lightning_sparsecomm.kernels.positions.cpu import CpuPositionKernels

ROOT = Path(__file__).parents[2]
INDICES: list[IndexCoding] = [*INDEX_CODECS.values(), Auto()]
VALUES: list[ValueCodec] = [
    *VALUE_CODECS.values(),
    TwoBit(1),
    TwoBit(255),
    ThreeBit(1),
    ThreeBit(255),
    ShortThreeBit(3),
    OneBit(1),
    Multiples(1e-3, once=True),
    Multiples(2.0),
    SignedMeans(1),
]
LAYOUTS = [
    Layout([]),
    Layout([("scale", ())]),
    Layout([("weight", (2, 3)), ("empty", (0,)), ("bias", (2,)), ("scale", ())]),
    Layout([(f"p{i}", (i,)) for i in range(20)]),
    Layout([("weight", (70_000,)), ("bias", (3,))]),
    Layout([("weight", (MAX_SIZE - 3,)), ("bias", (3,))]),
]
HUGE = LAYOUTS[-1]
KERNELS: list[PositionKernels] = [CpuPositionKernels(), PositionKernels()]

# Bounds on all memory allocated in a decode, which is more than its peak. The reference for Golomb codes takes most:
# some 500 bytes for each byte, and 64 for each doubling of its pointers.
BYTES_PER_BYTE, BYTES_PER_ELEMENT, BYTES_BESIDES = 4096, 64, 65_536
SECONDS, SECONDS_PER_BYTE = 2.0, 1e-4

CANARY, GUARD = 0xA5, 64


class Outcome(NamedTuple):
    """The result of decoding a payload: elements, or the message of a PayloadError."""

    indices: Tensor | None
    values: Tensor | None
    message: str


class Guarded:
    """numpy, with a guard zone before and after every array that a kernel allocates."""

    def __init__(self) -> None:
        self.zones: list[np.ndarray] = []
        self.allocated_bytes = 0

    def empty(self, count: int, dtype: Any) -> np.ndarray:
        self.allocated_bytes += count * np.dtype(dtype).itemsize
        guard = GUARD // np.dtype(dtype).itemsize
        whole = np.empty(count + 2 * guard, dtype)
        zones = whole[:guard], whole[guard + count :]
        for zone in zones:
            zone.view(np.uint8)[:] = CANARY
        self.zones.extend(zones)
        return whole[guard : guard + count]

    def zeros(self, count: int, dtype: Any) -> np.ndarray:
        array = self.empty(count, dtype)
        array[:] = 0
        return array

    def check(self) -> None:
        assert all((zone.view(np.uint8) == CANARY).all() for zone in self.zones), "written out of range"

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class Allocations(TorchDispatchMode):
    """Adds up the memory of all tensors that operations allocate."""

    allocated_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self.allocated_bytes += tensor.untyped_storage().nbytes()
        return result


@pytest.fixture(scope="module", autouse=True)
def _dispatch_modes() -> None:
    """Enters a dispatch mode once, as the first one makes torch import modules for seconds."""
    with Allocations():
        torch.zeros(1)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


@contextmanager
def kernels_in_use(kernels: PositionKernels) -> Iterator[Guarded]:
    def chosen(device: torch.device) -> PositionKernels:
        return kernels

    guarded = Guarded()
    with (
        mock.patch("lightning_sparsecomm.codecs.indices.position_kernels_for", chosen),
        mock.patch("lightning_sparsecomm.codecs.adaptive.position_kernels_for", chosen),
        mock.patch("lightning_sparsecomm.codecs.bits.position_kernels_for", chosen),
        mock.patch("lightning_sparsecomm.codecs.elias.position_kernels_for", chosen),
        mock.patch.object(cpu, "np", guarded),
        mock.patch.object(blocks_cpu, "np", guarded),
    ):
        yield guarded
    guarded.check()


def received(
    kernels: PositionKernels, decode: Callable[[], SparseVector | None], measured: bool
) -> tuple[Outcome, int, float]:
    """The result of decoding, the bytes allocated for it (all of them only if `measured`), and the seconds it took."""
    allocations = Allocations()
    if measured:
        tracemalloc.start()
    begun = time.thread_time()
    try:
        with kernels_in_use(kernels) as guarded, allocations if measured else nullcontext():
            vector = decode()
        outcome = Outcome(None, None, "") if vector is None else Outcome(vector.indices, vector.values, "")
    except PayloadError as error:
        outcome = Outcome(None, None, str(error))
    seconds = time.thread_time() - begun
    allocated = allocations.allocated_bytes + guarded.allocated_bytes
    if measured:
        allocated += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return outcome, allocated, seconds


def examine(data: bytes, layout: Layout, sealed: bool, measured: bool) -> Outcome:
    """Decodes `data`, an envelope or a bare body, with both kernels, and asserts everything that decoders guarantee."""
    payload = tensor_of(data)

    def decode() -> SparseVector | None:
        return decoded(payload, layout, sealed)

    outcomes = []
    for kernels in KERNELS:
        outcome, allocated, seconds = received(kernels, decode, measured)
        count = 0 if outcome.indices is None else outcome.indices.numel()
        # Few elements of the longest vector are sent, so an allocation for the whole vector would be noticed.
        elements = layout.size if layout is not HUGE else count
        most_seconds = SECONDS + SECONDS_PER_BYTE * (len(data) + elements)
        most_allocated = BYTES_PER_BYTE * len(data) + BYTES_PER_ELEMENT * elements + BYTES_BESIDES
        if seconds >= most_seconds or allocated > most_allocated:
            # A kernel is compiled, or loaded from disk, when it is first called. A payload that costs too much does
            # so again.
            outcome, allocated, seconds = received(kernels, decode, measured)
        assert seconds < most_seconds
        assert allocated <= most_allocated
        outcomes.append(outcome)
    ours, reference = outcomes
    assert ours.message == reference.message
    if ours.indices is not None and ours.values is not None:
        assert torch.equal(ours.indices, reference.indices) and torch.equal(ours.values, reference.values)
        check_sound(ours.indices, ours.values, layout)
        if layout.size < 1000:
            body = data if not sealed else bytes(open_envelope(payload, layout, rank=0).body.tolist())
            assert elements_of(body) == dict(zip(ours.indices.tolist(), ours.values.tolist()))
    return ours


def decoded(payload: Tensor, layout: Layout, sealed: bool) -> SparseVector | None:
    """The vector in an envelope or a bare body; None in an envelope that says that a gradient is not finite."""
    if not sealed:
        return decode_sparse(payload, layout.size)
    envelope = open_envelope(payload, layout, rank=0)
    return None if envelope.nonfinite_segment is not None else decode_sparse(envelope.body, layout.size)


def check_sound(indices: Tensor, values: Tensor, layout: Layout) -> None:
    assert indices.dtype == torch.int64 and values.dtype in (torch.float32, torch.float64)
    at, numbers = indices.numpy(), values.numpy()
    assert at.size == numbers.size <= layout.size
    if at.size:
        assert at[0] >= 0 and at[-1] < layout.size
    assert (at[1:] > at[:-1]).all()
    assert np.isfinite(numbers).all()


def examine_quickly(data: bytes, layout: Layout, sealed: bool) -> bool:
    """Decodes `data` with the kernels in use, and asserts that it is refused or sound. Whether it was taken."""
    try:
        vector = decoded(tensor_of(data), layout, sealed)
    except PayloadError:
        return False
    if vector is not None:
        check_sound(vector.indices, vector.values, layout)
    return vector is not None


def elements_of(body: bytes) -> dict[int, float]:
    """A body's elements according to the decoder in docs/formats.md."""
    envelope = struct.pack("<2sBBII", b"LS", 1, 0, 0, len(body))
    return documented()(envelope + struct.pack("<I", zlib.crc32(envelope + body)) + body, 0)[4]


@cache
def documented() -> Callable[[bytes, int], Any]:
    (source,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "formats.md").read_text(encoding="utf-8"), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(source, names)
    return names["decode"]


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# Payloads


@cache
def sound_bodies(layout: Layout) -> list[bytes]:
    """Bodies for every pair of index and value codec: with no elements, one, some, all but one, and all."""
    chance = random.Random(layout.size)
    size = layout.size
    bodies = []
    for indices, values in product(INDICES, VALUES):
        if layout is HUGE and indices == Bitmap():
            continue
        for count in {0, 1, size // 100, size // 3, size - 1, size} if layout is not HUGE else {0, 1, 40}:
            if not 0 <= count <= min(size, 1000 if size > 1000 else size):
                continue
            chosen = torch.tensor(sorted(chance.sample(range(size), count)), dtype=torch.int64)
            numbers = torch.tensor([chance.gauss(0, 1) for _ in range(count)])
            body = encode_sparse(SparseVector(chosen, numbers, size), layout, values, indices)
            assert body.numel() <= most_bytes(layout)
            bodies.append(bytes(body.tolist()))
    return bodies


def interesting(size: int, chance: random.Random) -> int:
    """A 32-bit number that is valid for a field, or just outside its range."""
    near = chance.choice([0, 1, 8, 16, size, size // 2, 2**16, 2**31, 2**32 - 1]) + chance.randint(-2, 2)
    return min(max(near, 0), 2**32 - 1)


def noise(chance: random.Random, most: int) -> bytes:
    length = chance.randint(0, most)
    return chance.choice([bytes(length), b"\xff" * length, bytes(chance.getrandbits(8) for _ in range(length))])


def altered(data: bytes, bodies: Sequence[bytes], size: int, chance: random.Random) -> bytes:
    """`data` with one change, which may leave it valid."""
    at = chance.randint(0, len(data))
    kind = chance.randint(-2, 9)
    if kind < 0:
        # Changes a value, most likely to another valid one.
        at = chance.randint(max(0, len(data) - 12), len(data))
    if kind <= 2 and at < len(data):
        change = 1 << chance.randint(0, 7) if kind < 2 else chance.randint(1, 255)
        return data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data + noise(chance, 20)
    if kind == 5:
        end = chance.randint(at, len(data))
        return data[:at] + chance.choice([b"", data[at:end] * 2, noise(chance, 10)]) + data[end:]
    if kind == 6:
        return data[:at] + struct.pack("<I", interesting(size, chance)) + data[at + 4 :]
    other = chance.choice(bodies)
    if kind == 7:
        # Joins the head of one body and the sections of another, or one's positions and another's values.
        cut = chance.choice([16, 16 + int.from_bytes(data[12:16], "little"), at])
        behind = chance.choice([16, 16 + int.from_bytes(other[12:16], "little"), cut])
        return data[:cut] + other[behind:]
    count, index_bytes = interesting(size, chance), interesting(len(other), chance)
    if kind == 8:
        count, index_bytes = chance.choice([count, int.from_bytes(other[8:12], "little")]), len(other) // 2
    codes = chance.choice([*INDEX_CODECS, 0, 9]), chance.choice([*VALUE_CODECS, 0, 99])
    parameters = (
        chance.choice([0, 0, other[2], chance.randint(0, 40)]),
        chance.choice([0, other[3], 64, chance.randint(0, 255)]),
    )
    head = struct.pack("<BBBBIII", *codes, *parameters, chance.choice([size] * 9 + [count]), count, index_bytes)
    return head + chance.choice([other[16:], noise(chance, 60)])


def forged(content: bytes, layout: Layout, chance: random.Random) -> bytes:
    """An envelope with a correct checksum around arbitrary fields."""
    flags = chance.choice([0, 1, 2, 3, chance.randint(0, 255)])
    length = chance.choice([len(content)] * 9 + [interesting(len(content), chance)])
    fingerprint = chance.choice([layout.fingerprint] * 9 + [chance.getrandbits(32)])
    head = struct.pack("<2sBBII", b"LS", chance.choice([1] * 9 + [2]), flags, fingerprint, length)
    return head + struct.pack("<I", zlib.crc32(content[:length], zlib.crc32(head))) + content


def present_bitmap(layout: Layout, chance: random.Random) -> bytes:
    size = (len(layout.segments) + 7) // 8
    return chance.getrandbits(len(layout.segments)).to_bytes(size, "little")


def payload_of(layout: Layout, chance: random.Random) -> tuple[bytes, bool]:
    """Altered bytes, and whether they are a whole envelope."""
    bodies = sound_bodies(layout)
    data = chance.choice(bodies)
    kind = chance.randint(0, 9)
    if kind == 0:
        segments = len(layout.segments)
        nonfinite = chance.randrange(segments) if segments and chance.random() < 0.2 else None
        present = [chance.random() < 0.5 for _ in range(segments)]
        whole = bytes(seal(Envelope(tensor_of(data), present, nonfinite), layout).tolist())
        return altered(whole, bodies, layout.size, chance), True
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        data = altered(data, bodies, layout.size, chance)
    if kind <= 2:
        return forged(chance.choice([b"", present_bitmap(layout, chance)]) + data, layout, chance), True
    return data, False


@settings(max_examples=20)
@given(st.sampled_from(LAYOUTS[1:]), st.integers(0, 2**32 - 1))
def test_altered_payloads_are_refused_or_sound(layout: Layout, seed: int) -> None:
    # hypothesis draws only a seed: bytes that it draws one by one are mostly zeros, and too rarely almost valid.
    chance = random.Random(seed)
    for i in range(60):
        data, sealed = payload_of(layout, chance)
        try:
            examine(data, layout, sealed, measured=i % 20 == 0)
        except BaseException:
            note(f"{'envelope' if sealed else 'body'} for {layout}: {data[:1000].hex()}")
            raise


def test_unaltered_payloads_are_taken() -> None:
    for layout in LAYOUTS:
        for i, body in enumerate(sound_bodies(layout)):
            assert examine(body, layout, sealed=False, measured=i % 20 == 0).message == ""


def test_guards_notice_a_kernel_that_writes_too_far() -> None:
    class Careless(CpuPositionKernels):
        def read_bitmap(self, section: Tensor, count: int) -> Any:
            parsed = super().read_bitmap(section, count)
            # The array has room for eight more than `count`.
            np.lib.stride_tricks.as_strided(parsed.indices.numpy(), (count + 9,))[count + 8] = 7
            return parsed

    with pytest.raises(AssertionError, match="written out of range"), kernels_in_use(Careless()):
        Bitmap().decode(tensor_of(b"\x05"), 2, 8, 0)


def test_allocations_are_noticed() -> None:
    section = torch.zeros(8, dtype=torch.uint8)
    with Allocations() as allocations:
        section.view(torch.int32)
        torch.zeros(1000, dtype=torch.int64)
    assert allocations.allocated_bytes == 8000


def loop(seed: int, payloads: int, thorough_every: int = 1) -> None:
    """Examines `payloads` altered payloads, and prints a summary.

    One in `thorough_every` is also decoded by the reference, and its time and memory are measured. Writes out of range
    are looked for in all of them.
    """
    torch.set_num_threads(1)
    chance = random.Random(seed)
    for layout in LAYOUTS:
        sound_bodies(layout)
    # Compiles the kernels before numpy is replaced, and enters torch's first dispatch mode.
    for body in sound_bodies(LAYOUTS[2]):
        decode_sparse(tensor_of(body), LAYOUTS[2].size)
    examine(sound_bodies(LAYOUTS[2])[0], LAYOUTS[2], sealed=False, measured=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[tuple[bool, int, int]] = Counter()
    # Most layouts are short.
    layouts = LAYOUTS[1:4] * 4 + LAYOUTS
    for i in range(0, payloads, thorough_every):
        drawn = [(layout, *payload_of(layout, chance)) for layout in chance.choices(layouts, k=thorough_every)]
        (layout, data, sealed), *others = drawn[: payloads - i]
        taken = [examine(data, layout, sealed, measured=i // thorough_every % 50 == 0).indices is not None]
        if others:
            with kernels_in_use(KERNELS[0]):
                taken += [examine_quickly(data, layout, sealed) for layout, data, sealed in others]
        for (_, data, sealed), sound in zip(drawn, taken):
            if not sealed and len(data) >= 16:
                outcomes[sound, data[0], data[1]] += 1
    # In kilobytes on Linux. The longest payloads and layouts take some megabytes.
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for took in (True, False):
        for codes in product(INDEX_CODECS, VALUE_CODECS):
            assert outcomes[(took, *codes)], f"no payload of codecs {codes} was {'taken' if took else 'refused'}"
    took_in_all = sum(number for (took, *_), number in outcomes.items() if took)
    print(f"{payloads} payloads, {took_in_all} of {outcomes.total()} bodies taken, {grown} KiB more at the peak")
    assert grown < 128 * 1024


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("payloads", "checked"), [(200_000, False), (20_000, True)], ids=["many", "bounds_checked"])
def test_very_many_altered_payloads(tmp_path: Path, payloads: int, checked: bool) -> None:
    """Runs in its own process, to bound its memory; then with kernels that check every index, of reads too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if checked:
        environment |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = (
        f"import torch; torch.set_num_threads(1); from tests.codecs.test_fuzz import loop; loop({payloads}, {payloads})"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
