# SPDX-License-Identifier: Apache-2.0
"""A model that stays in its files is the one that was read from them."""

import tempfile
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.laws.bytes_read import bytes_read

SLACK = 50_000
"""Bytes of headers."""


def network(widths: list[int], dtype: torch.dtype) -> nn.Module:
    layers = map(nn.Linear, widths, widths[1:])
    model = nn.Sequential(*layers, nn.BatchNorm1d(widths[-1])).to(dtype)
    model[0].register_buffer("none", torch.empty(3, 0, dtype=dtype))
    return model


def write(model: nn.Module, folder: Path, *, padding: int | None) -> Path:
    """Write a model as accelfn does; or as safetensors, what is padded beginning anywhere."""
    if padding is None:
        state = af.TrainState.create(model=lambda: model, optimizer=torch.optim.SGD)
        af.export_model(state, folder / "model", at="eval")
        return folder / "model" / "model.safetensors"
    file = folder / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), file, {"said": "x" * padding})
    return file


def stays(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a file, as the system says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, path = line.split(maxsplit=5)
        begin, end = (int(each, 16) for each in place.split("-"))
        if begin <= tensor.data_ptr() < end:
            return "model.safetensors" in path
    return False


def trained(model: nn.Module, batches: torch.Tensor) -> af.TrainState:
    state = af.TrainState.create(
        model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    for batch in batches:
        state, _ = step(state, batch)
    return state


@given(
    widths=st.lists(st.sampled_from([1, 3, 8, 16, 33, 64]), min_size=2, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    padding=st.none() | st.integers(0, 63),
    seed=st.integers(0, 9),
    updates=st.integers(0, 3),
    is_removed=st.booleans(),
)
def test_a_model_in_its_file_is_one_in_memory(
    widths, dtype, padding, seed, updates, is_removed
):
    """Whoever wrote it: it computes and trains bitwise the same, and the file stays as it was."""
    torch.manual_seed(seed)
    make = partial(network, widths, dtype)
    with tempfile.TemporaryDirectory() as folder:
        file = write(make(), Path(folder), padding=padding)
        before = file.read_bytes()
        beside, mapped = (
            af.import_model(make, file),
            af.import_model(make, file, mapped=True),
        )
        held = [*mapped.parameters()]
        assert all(each.data_ptr() % 64 == 0 for each in held)
        if padding is None:
            assert all(stays(each) for each in held if each.nbytes % 64 == 0)
        assert not any(map(stays, beside.parameters()))
        if is_removed:
            kept = file.rename(Path(folder) / "kept")
            file.write_bytes(b"")
            file = kept
        batches = torch.randn(updates + 1, 5, widths[0], dtype=dtype)
        with torch.no_grad():
            assert torch.equal(beside.eval()(batches[-1]), mapped.eval()(batches[-1]))
        one, two = (trained(each.train(), batches[:-1]) for each in (beside, mapped))
        for name, param in one.params.items():
            assert torch.equal(param, two.params[name]), name
        assert file.read_bytes() == before


@given(rows=st.integers(10, 30))
def test_nothing_is_read_before_it_is_used(rows: int) -> None:
    """A model of a megabyte or more is there when its headers were read."""
    with tempfile.TemporaryDirectory() as folder:
        make = partial(nn.Linear, 16 * 1024, rows)
        file = write(make(), Path(folder), padding=None)
        before = bytes_read()
        model = af.import_model(make, file, mapped=True)
        assert bytes_read() - before < SLACK < model.weight.nbytes
        assert safetensors.torch.load_file(file)["weight"].equal(model.weight)
