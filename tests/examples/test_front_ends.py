"""The examples of front ends and other libraries run, in short form."""

import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
from torch import nn

from tests.examples.test_commands import EXAMPLES, run_example

# Each run imports Lightning anew, which is slow on a busy machine.
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def test_fabric_loop(tmp_path: Path) -> None:
    output = run_example("fabric_loop.py", "--epochs=2", folder=tmp_path)
    found = re.findall(r"accuracy ([\d.]+)%, ([\d.]+) times fewer bytes", output)
    assert len(found) == 1
    assert float(found[0][0]) > 70  # chance is 10
    assert float(found[0][1]) > 5


def test_gan(tmp_path: Path) -> None:
    output = run_example("gan.py", "--epochs=1", folder=tmp_path)
    # 22 batches of each of two ranks, and two optimizers.
    assert "over 44 steps" in output
    generator, discriminator = (float(loss) for loss in re.findall(r"(?:loss|discriminator's) ([\d.]+)", output))
    assert 0 < generator < 2 and 0 < discriminator < 1


@pytest.mark.skipif(has("torchvision"), reason="torchvision is there")
def test_resnet_without_torchvision(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"needs a torchvision that fits torch .* No module named 'torchvision'"):
        run_example("resnet.py", "--steps=1", folder=tmp_path)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_resnet_with_a_small_network_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's wheels fit few builds of torch, and ResNet-18 takes seconds for each step here."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    resnet = importlib.import_module("resnet")
    small = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    assert resnet.train(small, steps=44) > 0.5  # chance is 0.1


@pytest.mark.skipif(not has("transformers"), reason="needs transformers")
def test_transformers(tmp_path: Path) -> None:
    output = run_example("transformers_finetuning.py", "--steps=15", folder=tmp_path)
    assert float(re.findall(r"loss ([\d.]+)", output)[-1]) < 4.0  # all characters alike: 4.1
    assert "compression ratio" in output


@pytest.mark.skipif(not has("nbclient"), reason="needs the extra `notebook`")
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    kernel = {"kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    nbclient.NotebookClient(notebook, timeout=300, **kernel).execute()
    accuracy, ratio = re.findall(r"accuracy ([\d.]+)%, ([\d.]+) times", notebook.cells[-1].outputs[-1].text)[0]
    assert float(accuracy) > 80  # chance is 10
    assert float(ratio) > 5


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 4
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == 4 * [([], None)]
