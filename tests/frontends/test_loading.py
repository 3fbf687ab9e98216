"""`weights_only`, with functions that take it, as Lightning's do from 2.6 on, and with others."""

from functools import partial
from typing import Any

import pytest
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_sparsecomm.frontends.loading import loading


def since(path: str, map_location: Any = None, weights_only: bool | None = None) -> object:
    return path, map_location, weights_only


def before(path: str, map_location: Any = None) -> object:
    return path, map_location


@pytest.mark.parametrize("weights_only", [None, False, True])
def test_it_is_handed_to_what_takes_it(weights_only: bool | None) -> None:
    assert loading(since, weights_only)("a") == ("a", None, weights_only)
    assert loading(partial(since, map_location="cpu"), weights_only)("a") == ("a", "cpu", weights_only)

    def anything(path: str, **options: object) -> object:
        return path, options

    # What takes anything may hand it to what does not take that.
    handed = {} if weights_only is None else {"weights_only": weights_only}
    assert loading(anything, weights_only)("a") == ("a", handed)


@pytest.mark.parametrize("weights_only", [None, False])
def test_what_unpickles_anything_goes_on_as_before(weights_only: bool | None) -> None:
    assert loading(before, weights_only)("a") == ("a", None)


def test_it_is_refused_where_it_would_be_ignored() -> None:
    with pytest.raises(ValueError, match=r"weights_only must be None or False here; got True, which before does not"):
        loading(before, True)


def test_lightnings_own_plugin_is_asked() -> None:
    """Its signature decides, whatever version is installed."""
    assert callable(loading(TorchCheckpointIO().load_checkpoint, None))
