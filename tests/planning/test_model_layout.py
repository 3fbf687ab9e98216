"""What `sparsecomm probe --model` and a run's loggers say of a model."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sparsecomm.commands.model import model_named, optimizers_of
from lightning_sparsecomm.planning.model_layout import LargeTensor, ModelLayout, ddp_buckets


class Tuned(nn.Module):
    """A frozen layer, and two that train."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(10, 10).requires_grad_(False)
        self.middle = nn.Linear(1000, 600)
        self.head = nn.Linear(600, 5)

    def configure_optimizers(self) -> object:
        return [torch.optim.AdamW(self.parameters())], [{"scheduler": None}]


def needs_a_size(size: int) -> nn.Module:
    return nn.Linear(size, size)


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def nothing() -> None:
    return None


TRAINED = 1000 * 600 + 600 + 600 * 5 + 5


class NeedsATrainer(Tuned):
    def configure_optimizers(self) -> object:
        raise RuntimeError("not attached to a Trainer")


def test_optimizers_that_cannot_be_made_are_left_out_with_the_reason() -> None:
    with pytest.warns(UserWarning, match=r"NeedsATrainer\.configure_optimizers\(\) failed.*not attached to a Trainer"):
        assert optimizers_of(NeedsATrainer()) == []


def test_a_layout_counts_what_trains() -> None:
    model = Tuned()
    layout = ModelLayout.of([model, model.head], optimizers_of(model))
    assert (layout.tensors, layout.elements) == (4, TRAINED)
    assert (layout.size_bytes, layout.frozen_elements) == (4 * TRAINED, 110)
    assert layout.dtypes == {"float32": TRAINED}
    assert layout.optimizers == {"AdamW": TRAINED}
    assert layout.largest[0] == LargeTensor("middle.weight", [600, 1000], 600_000)
    assert sum(layout.buckets_bytes) == 4 * TRAINED
    assert layout.line() == (
        "603,605 parameters in 4 tensors, 2.41 MB of float32, trained by AdamW (603,605), 110 more frozen, in 1 bucket"
        " of DDP; the largest is middle.weight with 99.4%"
    )


def test_the_table_names_the_largest() -> None:
    lines = ModelLayout.of([Tuned()]).table().splitlines()
    assert re.fullmatch(r"middle\.weight +600,000  600 x 1000", lines[3])
    assert lines[-1] == "DDP's buckets, in the order of the backward pass: 2.41 MB."


def test_buckets_are_those_of_ddp() -> None:
    sizes = (10, 9 << 20, 100, 7 << 20, 3 << 20, 5, 1 << 18)
    parameters = [torch.empty(1).expand(size) for size in sizes]
    ours = [[id(each) for each in bucket] for bucket in ddp_buckets(parameters)]  # type: ignore[arg-type]
    turned = parameters[::-1]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(turned, [2**20, 25 * 2**20])
    assert ours == [[id(turned[index]) for index in bucket] for bucket in theirs]
    assert len(ours) == 4


def test_a_model_of_ones_own_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_training_file.py").write_text("from torch import nn\ndef small(): return nn.Linear(3, 2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for place in ("my_training_file", "my_training_file.py", "./my_training_file.py"):
        assert ModelLayout.of([model_named(f"{place}:small")]).elements == 8


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("import no_such_package_of_yours", ModuleNotFoundError, "no_such_package_of_yours"),
        ("import torch\ntorch.no_such_function", AttributeError, "no_such_function"),
        ("from torch import nn\ndef small(): return nn.Linear(4, '4')", TypeError, "empty"),
    ],
)
def test_an_error_of_ones_own_code_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"my_training_file_{error.__name__}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(error, match=words):
        model_named(f"{name}:small")


a_model = nn.Linear(3, 4)

HERE = "tests.planning.test_model_layout"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.py", r"got 'train\.py'\. Write --model train:Model"),
        ("no_such_file:Model", r"No module named 'no_such_file'\. Start it in the folder that has no_such_file"),
        (f"{HERE}:Unknown", r"has no Unknown"),
        (f"{HERE}:needs_a_size", r"missing a required argument: 'size'\. Write a function without arg"),
        (f"{HERE}:a_model", r"which is a model already\. Write a function that makes it"),
        (f"{HERE}:HERE", r"which is of type str\. Write a function that makes it"),
        (f"{HERE}:nothing", r"a torch\.nn\.Module; got .*, which makes NoneType"),
        (f"{HERE}:frozen", r"without a parameter that requires a gradient"),
    ],
)
def test_what_is_no_model_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"--model must be file:Class.*{words}"):
        model_named(text)
