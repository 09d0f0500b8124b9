# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the time to create a model and load its weights from a file."""

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
    """Load a model as in Accelerate's guide to big models."""
    with init_empty_weights(include_buffers=False):
        model = network()
    return load_checkpoint_and_dispatch(model, str(where), device_map={"": "cpu"})


def loads(ours: Path, others: Path) -> dict[str, Load]:
    """Return the functions that load the model, by contestant."""
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
    """Free the memory of the last model, so that the next contestant starts equally."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(rounds: int) -> list[Figure]:
    """Measure the CPU time of each contestant until the model is loaded."""
    with written() as (ours, others, expected):
        made = loads(ours, others)
        for load in made.values():
            check(load(), expected)
        return _timed(made, rounds)


def measure_used(rounds: int) -> list[Figure]:
    """Measure the CPU time to load the model and run a forward pass, which reads all weights."""
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
