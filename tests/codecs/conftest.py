"""The option that writes the golden payloads anew."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-golden",
        action="store_true",
        help="write tests/golden/*.hex anew from tests/reference/payloads.py, after a deliberate change of format",
    )
