"""What may choose another method while a run goes on."""

from typing import Protocol

from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.method import RunSize


class Chooser(Protocol):
    """Looks at each step, and may switch the run to another method between two of them."""

    def follow(self, run: RunSize) -> None:
        """Takes the methods in their forms for the run, before the first step; equal on all ranks."""

    def before_batch(self) -> None:
        """Called before a batch's forward pass, where the front end knows it."""

    def after_step(self, tracked: TrackedOptimizer) -> None:
        """Called after each optimizer step on all ranks alike. It may communicate."""

    def state_dict(self) -> State:
        """What a resumed run goes on from."""

    def load_state_dict(self, state: State) -> None:
        """Takes over what `state_dict` returned, before the shares' own state is loaded."""
