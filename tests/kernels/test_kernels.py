"""The kernels for the CPU against the reference, bit for bit, and both against the definitions."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparsecomm.kernels import LIMIT, OutOfRangeError, Reference, Update, kernels_for
from lightning_sparsecomm.kernels.cpu import Cpu
from tests.reference.selection import top_k

DTYPES = [torch.float32, torch.float64]
# Around the kernels' blocks of 32 and pieces of 2048.
SIZES = [0, 1, 31, 32, 33, 2047, 2048, 2049, 5000]
# No factor is representable, so that a product which is not rounded, or a factor in the wrong precision, shows.
KINDS = {
    "sum": {},
    "scaled": {"scale": 1 / 3},
    "fading": {"keep": 0.9, "scale": 1 / 3},
    "momentum": {"momentum": 0.7},
    "dampened": {"keep": 0.9, "scale": 1 / 3, "momentum": 0.7, "gain": 0.3},
    "nesterov": {"momentum": 0.7, "lookahead": 0.7},
    "dampened nesterov": {"keep": 0.9, "scale": 1 / 3, "momentum": 0.7, "gain": 0.3, "lookahead": 0.6},
}
KERNELS = [Reference(), Cpu()]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_size = pytest.mark.parametrize("size", SIZES)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: type(kernels).__name__)


def numbers(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers over some powers of two; one in sixteen is subnormal, and one in sixteen a zero of either sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dtype=dtype, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (size,), generator=generator).to(dtype))
    special = torch.randint(16, (size,), generator=generator)
    x[special == 0] *= torch.finfo(dtype).tiny / 64
    x[special == 1] *= 0
    return x


def update_of(kind: str, size: int, dtype: torch.dtype) -> Update:
    factors = KINDS[kind]
    velocity = numbers(size, dtype, 3) if "momentum" in factors else None
    return Update(numbers(size, dtype, 1), numbers(size, dtype, 2), velocity, **factors)


def copy_of(update: Update, device: torch.device | str = "cpu") -> Update:
    tensors = (update.residual, update.gradient, update.velocity)
    residual, gradient, velocity = (None if x is None else x.clone().to(device) for x in tensors)
    return update._replace(residual=residual, gradient=gradient, velocity=velocity)


def same_bits(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether both are None, or equal in everything but their device; zeros of different sign are not equal."""
    if ours is None or theirs is None:
        return ours is theirs
    return (
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and ours.cpu().numpy().tobytes() == theirs.cpu().numpy().tobytes()
    )


def same_update(ours: Update, theirs: Update) -> bool:
    return (
        same_bits(ours.residual, theirs.residual)
        and same_bits(ours.gradient, theirs.gradient)
        and same_bits(ours.velocity, theirs.velocity)
    )


def thresholds_for(x: Tensor) -> list[float]:
    """None reach the first, the largest reach the second, half reach the third, all non-zeros reach the last."""
    magnitudes = x.abs()
    largest = float(magnitudes.max()) if x.numel() else 1.0
    median = float(magnitudes.median()) if x.numel() else 1.0
    least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    return [2 * largest or 1.0, largest or 1.0, median or 1.0, least]


@pytest.mark.parametrize(
    ("dtype", "kernels"), [(torch.float32, Cpu), (torch.float64, Cpu), (torch.bfloat16, Reference)], ids=str
)
def test_kernels_for_the_cpu(dtype, kernels):
    assert type(kernels_for(torch.device("cpu"), dtype)) is kernels


@each_dtype
@each_size
@each_kind
def test_update(kind, size, dtype):
    start, expected = update_of(kind, size, dtype), update_of(kind, size, dtype)
    nothing = Reference().update_(expected, None, 0)
    assert nothing is not None and nothing.dtype == torch.int64 and nothing.numel() == 0
    actual = copy_of(start)
    assert same_bits(Cpu().update_(actual, None, 0), nothing)
    assert same_update(actual, expected)

    for threshold in thresholds_for(expected.residual):
        found = Reference().reaching(expected.residual, threshold, size)
        assert found is not None and found.dtype == torch.int64
        count = found.numel()
        assert found.tolist() == [i for i, x in enumerate(expected.residual.tolist()) if abs(x) >= threshold]
        # Enough room, or just enough, or one too few, or none.
        for capacity in {10**9, size, count, max(count - 1, 0), 0}:
            room = found if count <= capacity else None
            assert same_bits(Reference().reaching(expected.residual, threshold, capacity), room)
            assert same_bits(Cpu().reaching(expected.residual, threshold, capacity), room)
            for kernels in KERNELS:
                actual = copy_of(start)
                assert same_bits(kernels.update_(actual, threshold, capacity), room)
                # All of it was done, also where there was no room.
                assert same_update(actual, expected)


def test_update_is_what_it_says():
    # The plain formulas, in numpy's scalars, which round every operation.
    for dtype in DTYPES:
        update = update_of("dampened nesterov", 200, dtype)
        start = copy_of(update)
        Reference().update_(update, None, 0)
        scalar = start.residual.numpy().dtype.type
        keep, scale, momentum, gain, lookahead = (
            scalar(x) for x in (start.keep, start.scale, start.momentum, start.gain, start.lookahead)
        )
        assert start.velocity is not None and update.velocity is not None
        vectors = (start.residual.numpy(), start.gradient.numpy(), start.velocity.numpy())
        for i, (v, gradient, u) in enumerate(zip(*vectors)):
            g = scale * gradient
            u = momentum * u + gain * g
            v = (keep * v + g) + lookahead * u
            assert (v, u) == (update.residual.numpy()[i], update.velocity.numpy()[i])


@each_dtype
@each_size
@each_kind
def test_an_update_can_be_taken_back(kind, size, dtype):
    start, update = update_of(kind, size, dtype), update_of(kind, size, dtype)
    for kernels in KERNELS:
        kernels.update_(update, None, 0)
        kernels.take_back_(update)
        # A few roundings of the largest of its terms.
        tolerance = 16 * torch.finfo(dtype).eps * float(update.gradient.abs().max() if size else 1)
        torch.testing.assert_close(update.residual, start.residual, rtol=tolerance, atol=tolerance)
        if update.velocity is not None:
            torch.testing.assert_close(update.velocity, start.velocity, rtol=tolerance, atol=tolerance)


def flawed(update: Update) -> list[Update]:
    """The same, checked, with what is out of range in the gradient: at either end, at an edge of a piece, or often."""
    size, dtype = update.gradient.numel(), update.gradient.dtype
    some = numbers(size, dtype, 7).abs() < 0.1
    middle = torch.tensor([size // 2])
    places = [torch.tensor([0]), torch.tensor([size - 1]), middle, some.nonzero().view(-1), middle, middle]
    updates = []
    for value, positions in zip((float("nan"), -float("inf"), float("inf"), float("nan"), LIMIT, -3e38), places):
        if positions.numel():
            gradient = update.gradient.clone()
            gradient[positions] = value
            updates.append(copy_of(update)._replace(gradient=gradient, checked=True))
    return updates


@each_dtype
@pytest.mark.parametrize("size", [1, 31, 4095, 4096, 4097, 10000])
@each_kind
@each_kernels
def test_what_is_out_of_range_is_told_of_and_counts_as_nothing(kernels, kind, size, dtype):
    start = update_of(kind, size, dtype)
    for update in flawed(start):
        expected = copy_of(start)
        in_range = update.gradient.abs() < LIMIT
        expected.gradient[~in_range] = 0
        Reference().update_(expected, None, 0)
        for threshold in (None, 1.0):
            actual = copy_of(update)
            with pytest.raises(OutOfRangeError):
                kernels.update_(actual, threshold, size)
            assert same_bits(actual.residual, expected.residual) and same_bits(actual.velocity, expected.velocity)
            assert same_bits(actual.gradient, update.gradient)
            kernels.take_back_(actual)
            tolerance = 16 * torch.finfo(dtype).eps * float(update.gradient[in_range].abs().sum() + 1)
            torch.testing.assert_close(actual.residual, start.residual, rtol=tolerance, atol=tolerance)
            if actual.velocity is not None:
                torch.testing.assert_close(actual.velocity, start.velocity, rtol=tolerance, atol=tolerance)


@each_dtype
@each_size
@each_kind
def test_a_gradient_in_range_is_taken_in_as_ever_when_it_is_checked(kind, size, dtype):
    start, expected = update_of(kind, size, dtype), update_of(kind, size, dtype)
    below = torch.tensor(LIMIT, dtype=dtype).nextafter(torch.tensor(0.0, dtype=dtype))
    for update in (start, expected):
        update.gradient[: size // 3] = below
        update.gradient[size // 3 : size // 2] = -below
    found = Reference().update_(expected, 1.0, size)
    for kernels in KERNELS:
        actual = copy_of(start)._replace(checked=True)
        assert same_bits(kernels.update_(actual, 1.0, size), found)
        assert same_update(actual, expected)


@each_dtype
def test_a_velocity_that_has_just_begun_is_taken_back_to_nothing(dtype):
    # In any memory format and dtype of the gradient.
    gradient = torch.randn(4, 3, 2, 2).bfloat16().contiguous(memory_format=torch.channels_last)
    residual, velocity = torch.zeros(48, dtype=dtype), torch.zeros(48, dtype=dtype)
    update = Update(residual, gradient.to(dtype).contiguous().view(-1), velocity, 1.0, 0.5, 0.0, 1.0, 0.9)
    Reference().update_(update, None, 0)
    assert residual.any()
    Reference().take_back_(update._replace(gradient=gradient))
    assert not velocity.any()
    assert residual.abs().max() < 8 * torch.finfo(dtype).eps


@each_dtype
@each_kernels
def test_factors_that_differ_in_the_last_bit_are_told_apart(kernels, dtype):
    # In double precision, factors must not be rounded to float32 on their way.
    factor = 1 + 2.0**-40
    update = Update(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype), None, factor, factor)
    found = kernels.update_(update, 2 * factor, 3)
    assert update.residual.tolist() == [2.0 if dtype == torch.float32 else 2 * factor] * 3
    assert found.tolist() == [0, 1, 2]


@each_dtype
@each_size
@each_kind
def test_probe(kind, size, dtype):
    update, start = update_of(kind, size, dtype), update_of(kind, size, dtype)
    after = copy_of(start)
    Reference().update_(after, None, 0)
    for stride in (1, 3, 7, size + 5):
        for kernels in KERNELS:
            assert same_bits(kernels.probe(update, stride), after.residual[::stride].abs())
            assert same_update(update, start)


def values(kind: str, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, dtype=dtype, generator=generator)
    if kind == "heavy-tailed":
        return x**3
    if kind == "sparse":
        return x * (torch.rand(size, generator=generator) < 0.02)
    if kind == "constant":
        return torch.full((size,), -1.5, dtype=dtype)
    if kind == "sorted":
        return x.sort().values
    if kind == "zero":
        return x * 0
    if kind == "ties":
        return (2 * x).round()
    if kind == "negative":
        return -x.abs()
    if kind == "subnormal":
        # Multiples of the least positive number, some of them 0.
        return (4 * x).round() * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    if kind == "mixed":
        return numbers(size, dtype, size)
    return x


VALUES = ["normal", "heavy-tailed", "sparse", "constant", "sorted", "zero", "ties", "negative", "subnormal", "mixed"]
each_values = pytest.mark.parametrize("kind", VALUES)


@each_dtype
@each_values
def test_largest(kind, dtype):
    for size in (0, 1, 33, 2049):
        x = values(kind, size, dtype)
        before = x.clone()
        for k in sorted({1, 2, size // 100, size // 2, size - 1, size, size + 1, 3 * size} - {0, -1}):
            seed = (0, 1, 2**62 + 12345, 2**63 - 1)[k % 4]
            expected = torch.tensor(top_k(x.numpy(), k, seed), dtype=torch.int64)
            for kernels in KERNELS:
                assert same_bits(kernels.largest(x, k, seed), expected)
        assert same_bits(x, before)


@each_dtype
@each_values
def test_kth_largest(kind, dtype):
    for size in (1, 33, 2049):
        magnitudes = values(kind, size, dtype).abs()
        ordered = magnitudes.sort(descending=True).values.tolist()
        for k in sorted({1, 2, max(1, size // 100), (size + 1) // 2, max(1, size - 1), size}):
            for kernels in KERNELS:
                assert kernels.kth_largest(magnitudes, min(k, size)) == ordered[min(k, size) - 1]


least = float(np.finfo(np.float32).smallest_subnormal)
# Few distinct magnitudes, so that ties are the rule.
crowded = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, least, -least, 2 * least, 3e38, -3e38])
spread = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)  # numba compiles at the first call
@given(
    st.lists(crowded, max_size=70) | st.lists(spread, max_size=70),
    st.sampled_from(DTYPES),
    st.integers(1, 80),
    st.integers(0, 2**63 - 1),
)
def test_selection_of_anything(elements, dtype, k, seed):
    x = torch.tensor(elements, dtype=dtype)
    expected = top_k(x.numpy(), k, seed)
    ordered = sorted((abs(value) for value in x.tolist()), reverse=True)
    for kernels in KERNELS:
        assert kernels.largest(x, k, seed).tolist() == expected
        if elements:
            assert kernels.kth_largest(x.abs(), min(k, len(elements))) == ordered[min(k, len(elements)) - 1]


def in_order(indices: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums by index, one addition after the other in the vectors' precision."""
    sums: dict[int, np.floating] = {}
    for index, value in zip(indices.tolist(), x.numpy()):
        sums[index] = sums[index] + value if index in sums else value
    ordered = sorted(sums)
    return torch.tensor(ordered, dtype=torch.int64), torch.tensor([sums[i] for i in ordered], dtype=x.dtype)


def assert_adds_up(runs: list[list[int]], x: Tensor) -> None:
    indices = torch.tensor([index for run in runs for index in run], dtype=torch.int64)
    expected = in_order(indices, x)
    before = indices.clone(), x.clone()
    for kernels in KERNELS:
        unique, sums = kernels.add_up(indices, x)
        assert same_bits(unique, expected[0]) and same_bits(sums, expected[1])
    assert same_bits(indices, before[0]) and same_bits(x, before[1])


@each_dtype
@pytest.mark.parametrize(
    "runs",
    [
        [[]],
        [[5]],
        [[0, 3, 2**40]],
        [[], [1, 2]],
        [[1, 2], []],
        [[1, 2, 3], [1, 2, 3]],
        [[4, 5], [1, 2]],
        [[1, 4, 9], [], [0, 4, 9], [9]],
        [[7], [7], [7], [7]],
    ],
    ids=str,
)
def test_add_up(runs, dtype):
    # Multiplied by themselves: a sum in another order, or in higher precision, is another number.
    x = torch.randn(sum(map(len, runs)), dtype=dtype) ** 3
    assert_adds_up(runs, x)


@each_dtype
@each_kernels
def test_adds_up_in_the_order_of_the_runs(kernels, dtype):
    big = 8.0 / torch.finfo(dtype).eps
    indices = torch.zeros(4, dtype=torch.int64)
    # Beside the big number, ones vanish.
    for x, total in ([big, -big, 1, 1], 2), ([big, 1, 1, -big], 0), ([1, 1, big, -big], 0), ([1, big, -big, 1], 1):
        unique, sums = kernels.add_up(indices, torch.tensor(x, dtype=dtype))
        assert (unique.tolist(), sums.tolist()) == ([0], [total])


@each_dtype
def test_adds_up_long_runs(dtype):
    generator = torch.Generator().manual_seed(4)
    runs = [torch.randperm(3000, generator=generator)[:size].sort().values.tolist() for size in (1000, 2500, 0, 1)]
    assert all(a < b for run in runs for a, b in pairwise(run))
    assert_adds_up(runs, torch.randn(3501, dtype=dtype, generator=generator) ** 3)


@settings(deadline=None)  # numba compiles at the first call
@given(
    st.lists(st.lists(st.integers(0, 6), unique=True, max_size=6).map(sorted), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_adds_up_anything(runs, dtype, data):
    # Sums of both zeros are left to the test below.
    size = sum(map(len, runs))
    elements = st.floats(-(2.0**99), 2.0**99, width=32).map(lambda value: value + 0.0)
    assert_adds_up(runs, torch.tensor(data.draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype))


@each_dtype
@pytest.mark.parametrize("kernels", [Cpu(), Reference()], ids=lambda kernels: type(kernels).__name__)
def test_adds_up_negative_zeros(kernels, dtype):
    indices = torch.tensor([1, 2, 3, 2, 3])
    x = torch.tensor([-0.0, -0.0, -0.0, -0.0, 0.0], dtype=dtype)
    sums = kernels.add_up(indices, x)[1]
    assert same_bits(sums, torch.tensor([-0.0, -0.0, 0.0], dtype=dtype))
