"""The option that records the golden payloads again."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-golden",
        action="store_true",
        help="write tests/golden/*.hex anew from tests/reference/payloads.py, after a deliberate change of format",
    )
