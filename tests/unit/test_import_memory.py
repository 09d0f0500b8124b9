# SPDX-License-Identifier: Apache-2.0
"""What reading a model takes at its peak: the model and one tensor, or nothing beside it."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import accelfn as af

NO_LARGE_PAGES = not Path("/sys/kernel/mm/transparent_hugepage").exists()

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


def test_what_is_converted_is_never_there_whole(tmp_path):
    """The model in its dtype, and less than one tensor of it; the file's tensors are larger."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(network().state_dict(), path)
    in_16_bits = partial(af.import_model, network, path, dtype=torch.bfloat16)
    assert risen(in_16_bits) <= (LAYERS + 1) * TENSOR // 2 + SLACK


def test_one_tensor_at_a_time(tmp_path):
    """Into a factory, the model and one tensor; into values that are there, nothing."""
    model, path = network(), tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    made = risen(lambda: af.import_model(network, path))
    assert made <= (LAYERS + 1) * TENSOR + SLACK
    filled = risen(lambda: af.import_model(model, path))
    assert filled <= SLACK


def lies_in_large_pages(tensor: torch.Tensor) -> bool:
    """Whether the system was asked for large pages in the middle of a tensor's memory."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in rest
    pytest.fail("the tensor lies nowhere")


@pytest.mark.skipif(NO_LARGE_PAGES, reason="no large pages that a program can ask for")
def test_what_is_read_lies_in_large_pages(tmp_path):
    """Large tensors of a model, as they are and converted, and of a state that is loaded."""
    model, path = network(), tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    read = af.import_model(network, path)
    assert all(map(lies_in_large_pages, read.parameters()))
    converted = af.import_model(network, path, dtype=torch.bfloat16)
    assert all(map(lies_in_large_pages, converted.parameters()))
    state = af.TrainState.create(model=network, optimizer=torch.optim.SGD)
    af.save(state, tmp_path / "state")
    loaded = af.load(state, tmp_path / "state")
    assert all(map(lies_in_large_pages, loaded.params.values()))
