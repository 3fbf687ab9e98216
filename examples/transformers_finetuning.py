"""A Hugging Face language model with AdamW: `python examples/transformers_finetuning.py`. Needs transformers.

It makes a small GPT-2 of its own, so that nothing is downloaded, and reads characters. To fine-tune a model that you
have, give its folder: `--model FOLDER`, with the tokenizer beside it.
"""

import argparse
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from command_line import at_least, file, folder, quieten
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparsecomm

EXCERPT = Path(__file__).parent / "shakespeare-excerpt.txt"


def read(text: Path, model: Path | None, length: int) -> tuple[Any, Tensor]:
    """A causal language model, and the text as its tokens: `[blocks, length]` int64.

    Raises:
        SystemExit: transformers is missing, or the text has less than one block.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise SystemExit(f"this example needs transformers: {error}. Use pip install transformers.") from error
    content = text.read_text(encoding="utf-8")
    if model is not None:
        network = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
        tokens = AutoTokenizer.from_pretrained(model, local_files_only=True)(content)["input_ids"]
    else:
        characters = sorted(set(content))
        tokens = [characters.index(character) for character in content]
        config = GPT2Config(vocab_size=len(characters), n_positions=length, n_embd=128, n_layer=4, n_head=4)
        network = GPT2LMHeadModel(config)
    blocks = len(tokens) // length
    if not blocks:
        raise SystemExit(f"--text must have at least {length} tokens; {text} has {len(tokens)}. Give a longer text.")
    return network, torch.tensor(tokens[: blocks * length]).view(blocks, length)


class LanguageModel(pl.LightningModule):
    """Fine-tunes a causal language model by AdamW."""

    def __init__(self, network: Any, learning_rate: float) -> None:
        super().__init__()
        self.network = network
        self.learning_rate = learning_rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the next token."""
        loss: Tensor = self.network(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), self.learning_rate, weight_decay=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=file, default=EXCERPT, help="in UTF-8")
    parser.add_argument("--model", type=folder, default=None, help="a folder with a model and its tokenizer")
    parser.add_argument("--steps", type=at_least(1), default=100)
    parser.add_argument("--length", type=at_least(2), default=64, help="tokens in a block")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--strategy", default="sparsecomm_fork")
    options = parser.parse_args()

    quieten()
    pl.seed_everything(0)
    network, blocks = read(options.text, options.model, options.length)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=options.strategy,
        callbacks=[lightning_sparsecomm.CompressionMonitor()],
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(network, options.learning_rate), DataLoader(TensorDataset(blocks), 8, shuffle=True))
    print(f"loss {trainer.callback_metrics['loss']:.3f}")
