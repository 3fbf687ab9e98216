"""Checks of arguments, and errors that name the caller's own parameters."""

import pytest

from lightning_sparsecomm.basis.arguments import check_booleans, is_number, is_whole_number, renamed


def test_numbers() -> None:
    assert [is_number(value) for value in (1, -0.5, True, "1", None, 1j)] == [True, True, False, False, False, False]
    assert [is_whole_number(value) for value in (1, -1, 1.0, True, "1")] == [True, True, False, False, False]


def test_booleans() -> None:
    check_booleans(mask=True, sparse=False)
    for value in ("no", 1, None):
        with pytest.raises(
            TypeError, match=f"^sparse must be True or False; got {value!r}. Leave it out for its default"
        ):
            check_booleans(mask=True, sparse=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ValueError, TypeError, UnicodeError])
def test_renames_the_parameter_that_an_error_begins_with(kind: type[Exception]) -> None:
    for message, expected in (
        ("size must be at least 1; got 0: size counts elements.", "block_size must be at least 1; got 0: size counts"),
        ("shape[1] must be in (0, 1].", r"warmup_shape\[1\] must be"),
        ("size", "block_size$"),
    ):
        with pytest.raises(kind, match=f"^{expected}") as caught, renamed(size="block_size", shape="warmup_shape"):
            raise kind(message)
        assert type(caught.value) is kind
        assert caught.value.__suppress_context__
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("sizes must be a list."),
        ValueError("the size must be at least 1."),
        ValueError("size_bytes must be at least 1."),
        ValueError(" size must be at least 1."),
        ValueError(""),
        ValueError(),
        RuntimeError("size must be at least 1."),
        KeyError("size"),
    ],
    ids=repr,
)
def test_leaves_other_errors_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, renamed(size="block_size"):
        raise error
    assert caught.value is error


def test_renames_step_by_step_and_does_nothing_without_an_error() -> None:
    with pytest.raises(ValueError, match=r"^density_of_weights must"):  # noqa: SIM117
        with renamed(block_density="density_of_weights"), renamed(density="block_density"):
            raise ValueError("density must be in (0, 1].")
    with renamed(size="block_size"):
        reached = True
    assert reached
