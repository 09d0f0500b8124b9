# SPDX-License-Identifier: Apache-2.0
"""Benchmark of a compiled step of a decoder in bf16 and in float8, on an accelerator."""

import torch
from device import there, wait
from figures import Figure
from precision import LAYERS, by_hand, decoder, ours
from rounds import compared, timed
from torch import nn
from torchao.float8 import convert_to_float8_training

import accelfn as af

HEAD = str(LAYERS)
"""The name of the layer that stays in bf16, because its 16 outputs are too few for float8."""


def in_eight_bits() -> nn.Module:
    """Return the model with matrix products in float8, except in the head."""
    return convert_to_float8_training(
        there(decoder), module_filter_fn=lambda _, name: name != HEAD
    )


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a step, compared with torch.compile of the model in bf16."""
    eight = af.autocast("fp8", layers=lambda name, _: name != HEAD)
    loops = {
        "bf16, torch.compile by hand": by_hand(torch.compile(there(decoder))),
        "bf16, accelfn": ours(af.autocast("bf16"), af.compile()),
        "fp8, torch.compile by hand": by_hand(torch.compile(in_eight_bits())),
        "fp8, accelfn": ours(eight, af.compile()),
    }
    return compared(timed(loops, rounds=rounds, steps=5, fence=wait))
