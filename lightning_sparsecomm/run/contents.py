"""Contents of checkpoints and of ranks' files: fingerprints, checksums, entries of each rank, the mean over ranks."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Elements of each tensor in a fingerprint. Few are enough: training moves all weights between two saves.
_SAMPLE = 64

State = dict[str, Any]


def fingerprint_of(checkpoint: object) -> str:
    """A hash of a checkpoint's content, equal before it is written and after it is read."""
    return _digest(_texts(checkpoint, _SAMPLE))


def checksum_of(content: object) -> str:
    """A hash of every bit of a content, equal before it is written and after it is read."""
    return _digest(_texts(content, None))


def _digest(texts: Iterator[object]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.data if isinstance(text, np.ndarray) else f"{text!r};".encode())
    return digest.hexdigest()


def _texts(item: object, sample: int | None) -> Iterator[object]:
    if isinstance(item, Tensor):
        yield str(item.dtype), tuple(item.shape)
        if item.layout == torch.strided and item.numel():
            flat = item.detach().reshape(-1)
            stride = 1 if sample is None else flat.numel() // sample | 1
            # As bytes, since NumPy lacks bfloat16.
            yield flat[::stride].cpu().contiguous().view(torch.uint8).numpy()
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _texts(key, sample)
            yield from _texts(value, sample)
    elif isinstance(item, (list, tuple)):
        yield len(item)
        for value in item:
            yield from _texts(value, sample)
    elif isinstance(item, (str, int, float, bool, type(None))):
        yield item


# Entries that a Trainer itself puts into a checkpoint.
_TRAINER_KEYS = ("state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers")


def own_entries(checkpoint: State, handed: State | None) -> State:
    """The entries of a checkpoint that differ between ranks whose replicas drift.

    These are averages of weights over time. Callbacks keep them in their state, add them as new entries, or replace
    the model's weights, which were `handed` to them, by averages.
    """
    entries = {key: value for key, value in checkpoint.items() if key not in _TRAINER_KEYS and _holds_weights(value)}
    if checkpoint["state_dict"] is not handed:
        entries["state_dict"] = checkpoint["state_dict"]
    callbacks = checkpoint.get("callbacks", {})
    return entries | {"callbacks": {key: value for key, value in callbacks.items() if _holds_weights(value)}}


def with_entries(checkpoint: State, entries: State) -> None:
    """Replaces rank 0's entries in a checkpoint by this rank's own, in place."""
    for key, value in entries.items():
        if key == "callbacks":
            checkpoint.setdefault(key, {}).update(value)
        else:
            checkpoint[key] = value


def _holds_weights(item: object) -> bool:
    if isinstance(item, Tensor):
        return item.dim() > 0
    if isinstance(item, Mapping):
        return any(map(_holds_weights, item.values()))
    return isinstance(item, (list, tuple)) and any(map(_holds_weights, item))


def mean_with(mean: Any, item: Any, count: int) -> Any:
    """Updates the mean of `count - 1` states, in place, to the mean of `count` states.

    Floating-point tensors are averaged; one that a state lacks, or all of them where it has None, counts as zero. Lists
    become their union. For all other values the first state's is kept.
    """
    if mean is None or item is None:
        return scaled(item, 1 / count) if mean is None else scaled(mean, 1 - 1 / count)
    if isinstance(mean, Tensor):
        return mean.add_(item.sub(mean), alpha=1 / count) if mean.is_floating_point() else mean
    if isinstance(mean, list):
        if all(isinstance(each, dict) for each in mean):
            return [mean_with(*pair, count) for pair in zip(mean, item, strict=True)]
        return mean + [each for each in item if each not in mean]
    if not isinstance(mean, dict):
        return mean
    for key in mean.keys() | item.keys():
        if key not in mean:
            mean[key] = scaled(item[key], 1 / count)
        elif key not in item:
            mean[key] = scaled(mean[key], 1 - 1 / count)
        else:
            mean[key] = mean_with(mean[key], item[key], count)
    return mean


def scaled(item: Any, factor: float) -> Any:
    """Dictionaries and lists whose floating-point tensors are multiplied; all else is as it was."""
    if isinstance(item, dict):
        return {key: scaled(value, factor) for key, value in item.items()}
    if isinstance(item, list):
        return [scaled(value, factor) for value in item]
    return item * factor if isinstance(item, Tensor) and item.is_floating_point() else item
