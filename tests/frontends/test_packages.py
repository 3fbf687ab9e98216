"""Which Lightning packages are installed, and the callback classes of all of them."""

import importlib

import pytest

from lightning_sparsecomm.frontends.packages import FABRICS, TRAINERS, Callback


def test_both_packages_are_found() -> None:
    """The tests need both."""
    assert TRAINERS == ("pytorch_lightning", "lightning.pytorch")
    assert FABRICS == ("lightning_fabric", "lightning.fabric")


@pytest.mark.parametrize("package", TRAINERS)
def test_one_class_can_be_a_callback_of_all(package: str) -> None:
    assert issubclass(Callback, importlib.import_module(package).Callback)
