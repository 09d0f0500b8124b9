# SPDX-License-Identifier: Apache-2.0
"""A Llama model with 136 million parameters (542 MB), in files of accelfn and Transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from checkpoint import folder
from device import DEVICE
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import accelfn as af

CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    vocab_size=16_000,
    max_position_embeddings=512,
)
IDS = torch.arange(16).reshape(1, 16)
network = partial(LlamaForCausalLM, CONFIG)
logging.set_verbosity_error()
logging.disable_progress_bar()


@contextmanager
def written() -> Iterator[tuple[Path, Path, torch.Tensor]]:
    """Yield folders that accelfn and Transformers wrote, and the model's output for IDS."""
    torch.manual_seed(0)
    with folder() as (root, _):
        model = network().eval()
        expected = model(IDS).logits.detach()
        model.save_pretrained(root / "others")
        CONFIG.save_pretrained(root / "ours")
        state = af.TrainState.create(model=model, optimizer=torch.optim.SGD)
        af.export_model(state, root / "export", at="eval")
        (root / "export" / "model.safetensors").rename(
            root / "ours" / "model.safetensors"
        )
        yield root / "ours", root / "others", expected


def output(model: nn.Module) -> torch.Tensor:
    """Return a model's output for IDS."""
    with torch.no_grad():
        return model(IDS.to(DEVICE)).logits


def check(model: nn.Module, expected: torch.Tensor) -> None:
    """Check that a model's output for IDS is bitwise the expected output.

    Raises:
        ValueError: the outputs differ.
    """
    if not torch.equal(output(model.eval()), expected):
        msg = "the loaded model has another output than the saved model"
        raise ValueError(msg)
