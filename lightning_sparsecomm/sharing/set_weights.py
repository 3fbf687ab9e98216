"""Weights that the user sets between two steps: clamped, pruned, or initialized anew."""

import copy
import struct
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.basis import PARAMETERS, Wire
from lightning_sparsecomm.basis.digests import digest_of
from lightning_sparsecomm.codecs import PayloadError
from lightning_sparsecomm.sharing.gradients import NamedParameters

# Of each weight, this many stretches of this many elements are compared.
_STRETCHES, _LENGTH = 16, 64

_CHECKSUM = struct.Struct("<I")

# The kind under which the noted weights are saved.
NOTED = "weights as noted"

# What a weight was set to: a digest where all ranks had the same weight before, so that they must have the same now.
_NOT_SET, SET_AMID = 0, -1


class SetWeights:
    """Finds weights that another than the optimizer has changed, and averages them with the next exchange.

    Ranks that train by themselves exchange what their weights have changed since an anchor. What the user sets is no
    such change: through a lossy exchange, or an outer optimizer, it would come back in part, or several times over. So
    the exchange leaves these weights out, and the mean over ranks becomes their anchor. Residuals stay as they are.

    A change is found by 16 stretches of 64 elements of each weight; smaller weights are compared whole. One that leaves
    all of these as they are counts as training. (`Ahead` compares all elements.)

    Attributes:
        found: What was set since the last exchange, by parameter name: a digest, or -1 where ranks had already trained.
        noted: Stretches of the weights as training or an exchange has left them, by parameter name.
        updating: Whether the optimizer changes weights, until they are noted; it may evaluate its closure meanwhile.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.noted: dict[str, Tensor] = {}
        self.updating = False
        self._samples: dict[str, Tensor] = {}
        self._warned = False

    def note(self, parameters: NamedParameters) -> None:
        """Notes the weights as they are, after training or an exchange has changed them."""
        self.updating = False
        for name, weight in parameters:
            sample = self._sample(name, weight)
            if name in self.noted:
                self.noted[name].copy_(sample)
            else:
                self.noted[name] = sample.clone()

    def look(self, parameters: NamedParameters, trained: bool) -> None:
        """Compares the weights with those noted; `trained` says whether ranks have trained since the last exchange."""
        for name, weight in parameters if not self.updating else ():
            noted, sample = self.noted.get(name), self._sample(name, weight)
            if noted is not None and not alike(sample, noted):
                self.found[name] = SET_AMID if trained else _number_of(weight)
                noted.copy_(sample)

    def _sample(self, name: str, weight: Tensor) -> Tensor:
        """Stretches of a weight; as it lies where it lay before, the view that was made then."""
        made = self._samples.get(name)
        if made is None or made.data_ptr() != weight.data_ptr():
            made = self._samples[name] = _sample(weight)
        return made

    def agree(self, names: Sequence[str], wire: Wire, device: torch.device) -> set[str]:
        """The names of weights that any rank has set. A collective.

        Bytes: a bit for each weight and 4 of a checksum, and 8 for each weight that was set.

        Raises:
            ValueError: A weight was equal on all ranks, and was set to different values. Raised on all ranks.
            PayloadError: What another rank has sent was altered.
        """
        mine = np.packbits(np.array([name in self.found for name in names]))
        content = mine.tobytes() + _CHECKSUM.pack(zlib.crc32(mine.tobytes()))
        gathered = wire.all_gather(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device), PARAMETERS)
        anyone = np.zeros(len(names), dtype=np.uint8)
        for rank, row in enumerate(gathered.cpu().numpy()):
            flags, checksum = row[: len(mine)], row[len(mine) :].tobytes()
            if checksum != _CHECKSUM.pack(zlib.crc32(flags.tobytes())):
                raise PayloadError(
                    f"rank {rank}'s list of weights that were set: its checksum is not that of its bits."
                )
            anyone |= np.unpackbits(flags, count=len(names))
        union = anyone.nonzero()[0].tolist()
        if union:
            values = torch.tensor([self.found.get(names[index], _NOT_SET) for index in union], device=device)
            for index, column in zip(union, wire.all_gather(values, PARAMETERS).t().tolist()):
                if SET_AMID not in column and len(set(column)) > 1:
                    left = [str(rank) for rank, value in enumerate(column) if value == _NOT_SET]
                    who = f"left alone by ranks {', '.join(left)}" if left else "set to different values"
                    raise ValueError(
                        f"parameter {names[index]!r} was changed between two steps, and not equally on all ranks: it"
                        f" was {who}. Change it on all ranks alike: draw random numbers from a generator with one seed,"
                        " or broadcast the result."
                    )
        return {names[index] for index in union}

    def warn(self, weights: Mapping[str, Tensor]) -> None:
        """Says once that these weights travel whole."""
        if not self._warned:
            self._warned = True
            size = sum(weight.numel() for weight in weights.values())
            warnings.warn(
                f"other code than the optimizer has changed {len(weights)} parameter(s) between two steps, such as"
                f" {next(iter(weights))!r}. Ranks average these whole with the next exchange: {size:,} elements. Where"
                " that happens in each step, as with clamping, little is saved: use methods.dgc() or"
                " methods.gradient_dropping(), which exchange gradients.",
                stacklevel=2,
            )

    def take(self) -> "SetWeights":
        """Moves what was found to another object, which an exchange in flight reads."""
        taken = copy.copy(self)
        self.found = {}
        return taken

    def forget(self) -> None:
        """Forgets what was found, after an exchange or a failed one."""
        self.found.clear()

    def state_dict(self) -> dict[str, Any]:
        """What was found, as tensors by name."""
        return {name: torch.tensor(value) for name, value in self.found.items()}

    def load_noted(self, noted: Mapping[str, Tensor], parameters: NamedParameters) -> None:
        """Takes over stretches of weights, by name, as `noted` had them."""
        weights = dict(parameters)
        self.noted = {
            name: sample.to(weights[name].device, copy=True)
            for name, sample in noted.items()
            if sample.dtype == weights[name].dtype
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` returned."""
        self.found = {name: int(value) for name, value in state.items()}


def _sample(weight: Tensor) -> Tensor:
    """Stretches of a weight that show whether it was set, as a view where it has one."""
    weight, size = weight.detach(), weight.numel()
    if size <= _STRETCHES * _LENGTH:
        return weight.flatten()
    if weight.dim() != 4 or not weight.is_contiguous(memory_format=torch.channels_last):
        weight = weight.flatten()
    return weight.as_strided((_STRETCHES, _LENGTH), (size // _STRETCHES, 1))


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    # What training has made NaN was not set, and the exchange refuses it.
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _number_of(weight: Tensor) -> int:
    # Positive, and so neither of the two other values.
    return int(digest_of(weight), 16) + 1
