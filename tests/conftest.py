import pytest
import torch

# Tests fork their ranks. A thread pool started before a fork is dead in the child, so none is ever started here.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
