# SPDX-License-Identifier: Apache-2.0
"""A compiled step of a decoder in 16 and in 8 bits, on an accelerator."""

import torch
from device import there, wait
from figures import Figure
from precision import LAYERS, by_hand, decoder, ours
from rounds import compared, timed
from torch import nn
from torchao.float8 import convert_to_float8_training

import accelfn as af

HEAD = str(LAYERS)
"""Which layer stays in 16 bits; its 16 classes are too few."""


def in_eight_bits() -> nn.Module:
    """Return the model with products in float8, but for the head's."""
    return convert_to_float8_training(
        there(decoder), module_filter_fn=lambda _, name: name != HEAD
    )


def measure(rounds: int) -> list[Figure]:
    """Return what a step costs, beside that of a model in bf16 that is compiled by hand."""
    eight = af.autocast("fp8", layers=lambda name, _: name != HEAD)
    loops = {
        "bf16, torch.compile by hand": by_hand(torch.compile(there(decoder))),
        "bf16, accelfn": ours(af.autocast("bf16"), af.compile()),
        "fp8, torch.compile by hand": by_hand(torch.compile(in_eight_bits())),
        "fp8, accelfn": ours(eight, af.compile()),
    }
    return compared(timed(loops, rounds=rounds, steps=5, fence=wait))
