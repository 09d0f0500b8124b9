# SPDX-License-Identifier: Apache-2.0
"""Making a model and giving it the weights of a file: the time."""

import ctypes
import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from big_model import check, network, output, written
from checkpoint import loop
from figures import Figure
from rounds import compared, timed
from torch import nn
from transformers import LlamaForCausalLM

import accelfn as af

Load = Callable[[], nn.Module]


def by_accelerate(where: Path) -> nn.Module:
    """Load as Accelerate's guide to big models does."""
    with init_empty_weights(include_buffers=False):
        model = network()
    return load_checkpoint_and_dispatch(model, str(where), device_map={"": "cpu"})


def loads(ours: Path, others: Path) -> dict[str, Load]:
    """Return what makes the model, by contestant."""
    return {
        "Transformers from_pretrained": partial(
            LlamaForCausalLM.from_pretrained, others
        ),
        "Accelerate load_checkpoint_and_dispatch": partial(
            by_accelerate, others / "model.safetensors"
        ),
        "accelfn import_model": partial(af.import_model, network, others),
        "accelfn, mapped=True": partial(af.import_model, network, others, mapped=True),
        "accelfn, mapped=True, of export_model": partial(
            af.import_model, network, ours, mapped=True
        ),
    }


def settle() -> None:
    """Give the system the memory that a model had, for which the next one would pay."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(rounds: int) -> list[Figure]:
    """Return the time that each one's processor took until the model is there."""
    with written() as (ours, others, expected):
        made = loads(ours, others)
        for load in made.values():
            check(load(), expected)
        return _timed(made, rounds)


def measure_used(rounds: int) -> list[Figure]:
    """Return that time with a first forward pass, for which all is read."""
    with written() as (ours, others, _):
        made = {
            name: (lambda load=load: output(load()))
            for name, load in loads(ours, others).items()
        }
        return _timed(made, rounds)


def _timed(acts: Mapping[str, Callable[[], object]], rounds: int) -> list[Figure]:
    loops = {name: loop(act) for name, act in acts.items()}
    clock = time.process_time
    return compared(timed(loops, rounds=rounds, steps=1, settle=settle, clock=clock))
