"""docs/extending.md: its parts obey the laws, train, and resume, as the page says."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_sparsecomm import Method
from lightning_sparsecomm.codecs import VALUE_CODECS
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from lightning_sparsecomm.testing import check_compressor, check_method

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "extending"
FILES = sorted(FOLDER.glob("*.py"))
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
CHECKS = [text for language, text in BLOCKS if language == "python" and "testing import" in text]

# LightningCLI 2.6 calls what jsonargparse 4.53 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


@pytest.fixture(autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a folder with these files; afterwards neither modules nor codecs of theirs are left."""
    monkeypatch.syspath_prepend(FOLDER)
    codecs = dict(VALUE_CODECS)
    yield
    VALUE_CODECS.clear()
    VALUE_CODECS.update(codecs)
    for file in FILES:
        sys.modules.pop(file.stem, None)


def code_lines(source: str) -> int:
    """Lines that are neither blank, nor of imports and docstrings."""
    left = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node = node.body[0]
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        left -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(left)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_page_has_the_file_as_it_is(file: Path) -> None:
    assert ("python", file.read_text()) in BLOCKS
    assert code_lines(file.read_text()) < 40


def test_the_page_has_no_other_code() -> None:
    assert len([language for language, _ in BLOCKS if language == "python"]) == len(FILES) + len(CHECKS)
    assert len(CHECKS) == len(FILES)


@pytest.mark.few(2)
@pytest.mark.parametrize("check", CHECKS, ids=lambda text: re.findall(r"check_\w+", text)[0])
def test_the_laws_hold_as_the_page_says(check: str) -> None:
    exec(check, {})


def test_a_payload_of_these_parts_decodes() -> None:
    from random_k import RandomK
    from scaled_values import ScaledInt8

    from lightning_sparsecomm.codecs import Golomb, SparseCodec

    check_compressor(SparseCodec(RandomK(0.1), ScaledInt8(), Golomb()), tolerance=1 / 250)


def part(class_path: str, **init_args: Any) -> dict[str, Any]:
    name = class_path if class_path[0].islower() else f"lightning_sparsecomm.{class_path}"
    return {"class_path": name, "init_args": init_args}


def method_of(exchange: dict[str, Any], *memories: dict[str, Any]) -> dict[str, Any]:
    channel = part("Channel", exchange=exchange, memories=list(memories))
    return part("Method", syncs=[part("GradientSync", channel=channel)])


def gather(**options: Any) -> dict[str, Any]:
    codec = {"class_path": "lightning_sparsecomm.codecs.SparseCodec", "init_args": options}
    return {"class_path": "lightning_sparsecomm.exchange.Gather", "init_args": {"compressor": codec}}


TOP = {"class_path": "lightning_sparsecomm.codecs.TopK", "init_args": {"density": 0.1}}
RESIDUAL = part("ErrorFeedback")
STRATEGY, COMPOSED = (yaml.safe_load(text) for language, text in BLOCKS if language == "yaml")
METHODS = {
    "random_k": method_of(gather(selector=part("random_k.RandomK", density=0.1)), RESIDUAL),
    "scaled_values": method_of(gather(selector=TOP, values=part("scaled_values.ScaledInt8")), RESIDUAL),
    "two_states": method_of(gather(selector=TOP), part("two_states.EF21")),
    "power_sgd": COMPOSED["method"],
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "scaled_values" else ()) for name in METHODS]
)
def test_a_method_from_yaml_trains_and_resumes(name: str) -> None:
    """To the bit, with parts that jsonargparse has made: these are copied for each optimizer, and compared by repr."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Method, "method")
    config = parser.parse_string(yaml.dump({"method": METHODS[name]}))
    method = parser.instantiate_classes(config).method
    assert re.search("RandomK|ScaledInt8|PowerSGD|EF21", repr(method))
    assert "0x" not in repr(method)
    check_method(lambda: method)


def test_the_pages_strategy_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.dump(STRATEGY))
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config={file}"])
    # Of another test in this process: the strategy is that of the package whose LightningCLI was imported.
    monkeypatch.delitem(sys.modules, "lightning.pytorch.cli", raising=False)
    quiet = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False}
    trainer = LightningCLI(
        BoringModel, trainer_defaults=quiet, run=False, save_config_callback=None, seed_everything_default=0
    ).trainer
    assert isinstance(trainer.strategy, SparseCommStrategy)
    assert repr(trainer.strategy.method) == "RandomBytes(density=0.05)"
    assert repr(trainer.strategy.method.syncs).count("RandomK(density=0.05)") == 1
