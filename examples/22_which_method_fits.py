# SPDX-License-Identifier: Apache-2.0
"""Estimate the traffic of five methods on three networks, for a model too large to load.

Ranks are simulated on torch's meta device, where tensors have shapes but no values.
"""

from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import accelfn as af
from accelfn.testing import Link, communication

RANKS, PERIOD, LAYERS = 2, 8, 32  # 32 layers of Llama's are 6.7 billion parameters
CABLES = {n: Link(latency=0.001, bandwidth=n * 125e6) for n in (0.1, 1, 10)}  # Gbit/s
METHODS = {
    "DDP": (af.wrap_ddp(), 1),
    "DDP in 16 bits": (af.chain(af.wrap_ddp(), af.compress_grads("bf16")), 1),
    "FSDP": (af.wrap_fsdp(LlamaDecoderLayer), 1),
    "local SGD": (af.local_sgd(sync_every=PERIOD), PERIOD),
    "DiLoCo in 4 bits": (af.diloco(sync_every=PERIOD, bits=4), PERIOD),
}


def loss_fn(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the loss; with a mask, Transformers does not read values of the tokens."""
    return model(tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss


def train(world: af.World, setup: af.Transform, updates: int, layers: int) -> None:
    """Train for some updates, as on real machines."""
    config = LlamaConfig(num_hidden_layers=layers, attn_implementation="eager")
    state = af.TrainState.create(
        model=partial(LlamaForCausalLM, config),
        optimizer=partial(torch.optim.AdamW, lr=3e-4),
        setup=setup,
        world=world,
    )
    tokens = torch.zeros(1, 128, dtype=torch.int64, device=world.device)
    for _ in range(updates):
        state, _ = af.make_step(loss_fn)(state, tokens)


def main(ranks: int = RANKS, layers: int = LAYERS) -> None:
    """Print a row for each method."""
    table = Table("method", "GB per rank", *(f"s at {n} Gbit/s" for n in CABLES))
    for says, (setup, updates) in METHODS.items():
        program = partial(train, setup=setup, updates=updates, layers=layers)
        traffic = communication(program, ranks=[ranks], device="meta")
        sent = sum(traffic.bytes(ranks).values()) / (1e9 * ranks * updates)
        seconds = (traffic.seconds(cable, ranks=ranks) for cable in CABLES.values())
        table.add_row(says, f"{sent:.2f}", *(f"{s:,.1f}" for s in seconds))
    Console().print(table)


if __name__ == "__main__":
    main()
