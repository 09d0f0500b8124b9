# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors on real ranks: saved on some, loaded on others, cut otherwise, and back."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.internals import read_manifest
from tests.processes import run_ranks
from tests.ranks import programs_of_slices as programs

pytestmark = pytest.mark.ranks(2)

EXPECTED = {name: programs.whole(name) for name in programs.PLACES} | {
    "weight": torch.arange(15.0).reshape(5, 3),
    "bias": torch.ones(5),
}


def assert_all_there(found: dict[str, Any], *, sharded: bool) -> None:
    """Assert that a rank has every tensor, bitwise, in the kind that it should."""
    assert found.pop("is one")
    assert EXPECTED.keys() == found.keys()
    for name, (kind, tensor) in found.items():
        assert kind == ("DTensor" if sharded and name != "bias" else "Tensor"), name
        assert EXPECTED[name].dtype == tensor.dtype, name
        assert torch.equal(EXPECTED[name], tensor), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of sharded tensors on two ranks."""
    folder = tmp_path_factory.mktemp("slices") / "saved"
    run_ranks(2, programs.save, folder)
    return folder


@pytest.mark.ranks(3)
def test_there_and_back(saved, tmp_path):
    """L47: cut in the same way or another, or not at all, on any ranks, each has its slice."""
    back = tmp_path / "plain"
    for folder, size, flipped in (
        *((saved, 2, False), (saved, 2, True), (saved, 1, False), (saved, 3, False)),
        *((back, 2, False), (back, 3, False)),
    ):
        last = str(back) if size == 1 else ""
        load = partial(programs.load, flipped=flipped, back=last)
        for split, plain in run_ranks(size, load, folder):
            assert_all_there(split, sharded=True)
            assert_all_there(plain, sharded=False)


def test_each_rank_writes_its_slices(saved):
    """No slice is written twice, nor any that has nothing in it."""
    manifest = read_manifest(saved)
    held = {rank: set(file.tensors) for rank, file in manifest.files.items()}
    places = {name: set(each["slices"]) for name, each in manifest.sharded.items()}
    by_name = {name.rpartition(".")[2]: place for name, place in places.items()}
    first, second = sorted(held)
    assert by_name["rows"] == by_name["columns"] == by_name["weight"] == {first, second}
    assert by_name["whole"] == {first}
    for name, place in places.items():
        assert {rank for rank in held if name in held[rank]} == place


def test_saved_behind_the_training(tmp_path):
    """What is copied to the host and written behind is the same."""
    run_ranks(2, partial(programs.save, async_=True), tmp_path / "runs")
    for split, _ in run_ranks(2, programs.load, tmp_path / "runs" / "step-00000000"):
        assert_all_there(split, sharded=True)


def test_another_shape(saved):
    """A sharded tensor of another shape is refused by its name, with both shapes."""
    for said in run_ranks(2, programs.load_other_shape, saved):
        assert "slots.mine.in.rows was saved as (5, 3)" in said
        assert "(7, 3)" in said


def test_summands(tmp_path):
    """C17: a DTensor of summands is refused by its name on every rank."""
    for said in run_ranks(2, programs.save_summands, tmp_path / "saved"):
        assert "slots.mine is a DTensor with the placement" in said
        assert "redistribute" in said
    assert not (tmp_path / "saved").exists()
