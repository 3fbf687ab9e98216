"""The strategy of a Trainer on each of Ray Train's workers. It imports no Ray."""

import inspect
import os
from collections.abc import Callable
from typing import Any

from lightning_sparsecomm.basis.arguments import plain_for_command_lines
from lightning_sparsecomm.frontends.trainer import TrainerMixin
from lightning_sparsecomm.run.rank_files import RankFile, RankFiles
from lightning_sparsecomm.run.saves import Ranks
from lightning_sparsecomm.sharing.method import Method

EXTRA = "pip install 'lightning-sparsecomm[ray]'"

# Options of DDPStrategy that mean nothing here, and what to do instead.
_RAYS_OWN = {
    "start_method": "Ray starts the processes. Leave it out",
    "process_group_backend": "Ray makes the process group. Use TorchTrainer(torch_config=TorchConfig(backend=...))",
    "timeout": "Ray makes the process group. Use TorchTrainer(torch_config=TorchConfig(timeout_s=...))",
}


class RayTrainerMixin(TrainerMixin):
    """What makes a Trainer's strategy one for Ray Train's workers; the binding combines it with Ray's own for DDP.

    Attributes:
        missing: Why Ray Train could not be imported; None where it was.
    """

    missing: ImportError | None = None

    def __init__(self, method: Method | None = None, seed: int = 0, **kwargs: Any) -> None:
        """Takes the method.

        Args:
            method: How ranks share what they train; `methods.default()` by default.
            seed: Seed of the method's randomness; equal on all ranks.
            **kwargs: Further options of `SparseCommStrategy`, and those of DDPStrategy and of DistributedDataParallel.

        Raises:
            ModuleNotFoundError: Ray Train is not installed.
            TypeError: As `SparseCommStrategy` says.
            ValueError: As `SparseCommStrategy` says; or `start_method`, `process_group_backend` or `timeout` is given,
                which Ray decides. At set-up: the Trainer lacks Ray's environment.
        """
        with plain_for_command_lines():
            if self.missing is not None:
                raise ModuleNotFoundError(
                    f"{type(self).__name__} needs Ray Train, which cannot be imported ({self.missing}). Install it with"
                    f" {EXTRA}."
                ) from self.missing
            _refuse_rays_own(kwargs, type(self))
        super().__init__(method, seed, **kwargs)
        # By the path that this rank has saved to, what all ranks call the checkpoint, if that is another.
        self._common: dict[str, str] = {}

    def setup_environment(self) -> None:
        # By name, as it may be of either Lightning package, or derived from it.
        kinds = [kind.__name__ for kind in type(self.cluster_environment).__mro__]
        if "RayLightningEnvironment" not in kinds:
            raise ValueError(
                f"plugins must have RayLightningEnvironment(), by which ranks know themselves; got {kinds[0]} instead."
                " Use Trainer(plugins=[RayLightningEnvironment()], ...), from ray.train.lightning."
            )
        super().setup_environment()

    def _files_of_all(self, path: Any, ranks: Ranks, file: RankFile) -> RankFiles:
        """Beside rank 0's path; or, where this rank's own is in another folder, in that one, for Ray to collect."""
        own, common = os.fspath(path), self._common_path(path, ranks, file)
        self._common.pop(own, None)
        if os.path.dirname(own) == os.path.dirname(common):
            return super()._files(common)
        self._common[own] = common
        return self._files(own)

    def _remove(self, path: Any, remove: Callable[[], None]) -> None:
        super()._remove(path, remove)
        if os.fspath(path) in self._common:
            self._saves.remove_own(self._files(path), self._own_file(0))

    def _files(self, path: Any) -> RankFiles:
        return RankFiles(path, self.checkpoint_io, common=self._common.get(os.fspath(path)))


def _refuse_rays_own(given: dict[str, Any], strategy: type) -> None:
    """Raises `ValueError` for options that Ray decides. Command lines pass all defaults, which are left out."""
    ddp = next(each for each in strategy.__mro__ if each.__name__ == "DDPStrategy")
    known = inspect.signature(ddp.__init__).parameters  # type: ignore[misc]
    for option, remedy in _RAYS_OWN.items():
        if option in given and given[option] != known[option].default:
            raise ValueError(f"{option} must be left out on Ray's workers; got {given[option]!r}. {remedy}.")
