"""The words of a text, and the network that predicts them."""

import re
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from clients import HELD_OUT_STREAMS, Batch, State, Text, TextNetwork, read_utf8
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

OptimizerName = Literal["sgd", "adam"]

HELD_OUT = 0.1  # of a text
UNKNOWN = 0  # the number of all words outside the vocabulary
WORDS = 35  # through which gradients are backpropagated
DIMENSIONS = 256  # of the embedding
UNITS = 128
TABLE = "embedding.weight"


class Words(NamedTuple):
    """A text as numbers of its words.

    Attributes:
        text: Numbers in `[0, symbols)`: `UNKNOWN`, and then words by decreasing frequency.
        unknown: Fraction of the held-out words that are not in the vocabulary.
    """

    text: Text
    unknown: float


def read_words(path: Path) -> Words:
    """Words and punctuation marks of a text in UTF-8, in lower case.

    The vocabulary holds those that occur at least twice in the training part; all others count as one unknown word.

    Raises:
        ValueError: The text is too short, or not in UTF-8.
    """
    words = re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", read_utf8(path).lower())
    length = int(HELD_OUT * len(words)) // HELD_OUT_STREAMS
    if length < WORDS:
        least = round(WORDS * HELD_OUT_STREAMS / HELD_OUT)
        raise ValueError(f"{path} must have at least {least:,} words; got {len(words):,}. Name a longer text.")
    end = len(words) - length * HELD_OUT_STREAMS
    known = [word for word, count in Counter(words[:end]).most_common() if count > 1]
    numbers = {word: number for number, word in enumerate(known, UNKNOWN + 1)}
    text = torch.tensor([numbers.get(word, UNKNOWN) for word in words])
    held_out = text[end:].view(HELD_OUT_STREAMS, length)
    return Words(Text(text[:end], held_out, len(known) + 1), float((held_out == UNKNOWN).float().mean()))


class WordLSTM(TextNetwork):
    """An embedding of 256 dimensions, 128 LSTM units and an adaptive softmax. Its symbols are words.

    The adaptive softmax (Grave et al. 2017) gives exact probabilities. It has fewer dimensions for rarer words, so it
    is smaller than the embedding and faster than the LSTM. The learning rate falls linearly to 0.

    Args:
        vocabulary: Number of distinct words.
        iterations: Optimizer steps of the whole training.
        optimizer: sgd, with an initial learning rate of 20, or adam, with 0.003.
        sparse: Whether the gradient of the embedding is a sparse tensor. Needs sgd.
    """

    def __init__(self, vocabulary: int, iterations: int, optimizer: OptimizerName, sparse: bool) -> None:
        super().__init__()
        self.iterations, self.optimizer = iterations, optimizer
        self.embedding = nn.Embedding(vocabulary, DIMENSIONS, sparse=sparse)
        self.lstm = nn.LSTM(DIMENSIONS, UNITS, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.output = nn.AdaptiveLogSoftmaxWithLoss(UNITS, vocabulary, [vocabulary // 10, vocabulary // 3])
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def loss(self, windows: Tensor, state: State | None) -> tuple[Tensor, State]:
        outputs, (hidden, cell) = self.lstm(self.dropout(self.embedding(windows[:, :-1])), state)
        loss = self.output(self.dropout(outputs).flatten(0, 1), windows[:, 1:].flatten()).loss
        return loss, (hidden.detach(), cell.detach())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross-entropy of a batch of windows."""
        loss, self.state = self.loss(batch[0], self.state)
        # In a batch without rare words, the softmax does not use its part for them, but ddp waits for its gradients.
        nothing = [0 * parameter.sum() for parameter in self.output.tail.parameters()]
        return loss + torch.stack(nothing).sum()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the norm as Lightning does, but also with a sparse gradient, which torch cannot clip."""
        if not self.embedding.sparse:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        assert gradient_clip_val is not None
        values = []
        for parameter in self.parameters():
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            values.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
        norm = nn.utils.get_total_norm(values)
        torch._foreach_mul_(values, (gradient_clip_val / (norm + 1e-6)).clamp(max=1.0))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """SGD without momentum, which changes only words that are read; or Adam, whose averages change all words."""
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.parameters(), lr=20)
            if self.optimizer == "sgd"
            else torch.optim.Adam(self.parameters(), lr=3e-3)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.iterations)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
