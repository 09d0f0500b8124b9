# SPDX-License-Identifier: Apache-2.0
"""What reading a model takes at its peak: the model and one tensor, or nothing beside it."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

import accelfn as af

WIDTH, LAYERS = 2048, 5
TENSOR = 4 * WIDTH * WIDTH
SLACK = 4_000_000


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def memory(word: str) -> int:
    said = Path("/proc/self/status").read_text().split()
    return int(said[said.index(f"{word}:") + 1]) * 1024


def risen(read: Callable[[], nn.Module]) -> int:
    """Return by how many bytes this process's memory rises at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    kept = read()
    del kept
    return memory("VmHWM") - before


def test_what_is_converted_is_never_there_whole(tmp_path: Path) -> None:
    """The model in its dtype, and less than one tensor of it; the file's tensors are larger."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(network().state_dict(), path)
    in_16_bits = partial(af.import_model, network, path, dtype=torch.bfloat16)
    assert risen(in_16_bits) <= (LAYERS + 1) * TENSOR // 2 + SLACK


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Into a factory, the model and one tensor; into values that are there, nothing."""
    model, path = network(), tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    made = risen(lambda: af.import_model(network, path))
    assert made <= (LAYERS + 1) * TENSOR + SLACK
    filled = risen(lambda: af.import_model(model, path))
    assert filled <= SLACK
