"""The average of iterates is that of Sketched-SGD's algorithm 2."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from lightning_sparsecomm import IterateAverage


@pytest.mark.parametrize("shift", [0, 1.0, 12.5])
def test_it_is_the_weighted_mean_of_all_iterates(shift: float) -> None:
    model = torch.nn.Linear(3, 2).double()
    average, iterates = AveragedModel(model, avg_fn=IterateAverage(shift)), []
    for _ in range(30):
        model.weight.data.normal_()
        average.update_parameters(model)
        iterates.append(model.weight.detach().clone())
    factors = [(shift + t) ** 2 for t in range(1, 31)]
    expected = sum(q * w for q, w in zip(factors, iterates)) / sum(factors)
    torch.testing.assert_close(average.module.weight.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shift", [-1, float("inf"), "1"])
def test_bad_shifts_are_refused(shift: object) -> None:
    with pytest.raises(ValueError, match="shift must be 0 or more"):
        IterateAverage(shift)  # type: ignore[arg-type]
