# SPDX-License-Identifier: Apache-2.0
"""Sharded tensors on real ranks: saved on some, loaded on others, cut otherwise, and back."""

import itertools
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


@pytest.mark.parametrize("flipped", [False, True])
def test_loaded_on_as_many(saved, flipped):
    """L47: cut in the same way or in another, each rank has its slice of what was saved."""
    for each in run_ranks(2, partial(programs.load, flipped=flipped), saved):
        assert_all_there(each, sharded=True)


def test_loaded_on_one(saved):
    """L47: a rank that shards nothing has whole tensors; so has each of several."""
    for size in (1, 2):
        for each in run_ranks(size, programs.load_plain, saved):
            assert_all_there(each, sharded=False)


@pytest.mark.ranks(3)
def test_there_and_back(saved, tmp_path):
    """L47: from 2 ranks to 1 and to 3 is as from 2 to 3; whole tensors are sharded again."""
    run_ranks(1, programs.save_plain, saved, tmp_path / "plain")
    for folder, size in itertools.product((saved, tmp_path / "plain"), (2, 3)):
        for each in run_ranks(size, programs.load, folder):
            assert_all_there(each, sharded=True)


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
    for each in run_ranks(2, programs.load, tmp_path / "runs" / "step-00000000"):
        assert_all_there(each, sharded=True)


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


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_gradients_are_clipped_by_the_norm_over_all_shards(norm_type):
    """L14: sharded gradients, beside one that is not, are clipped as whole ones are."""
    expected = {
        name: programs.whole(name).double() / 64 - 1 for name in programs.PLACES
    }
    expected["plain"] = torch.tensor([3.0, -4.0], dtype=torch.float64)
    flat = torch.cat([each.flatten() for each in expected.values()])
    norm = float(torch.linalg.vector_norm(flat, norm_type))
    for told, found in run_ranks(2, programs.clipped, norm_type):
        assert told == pytest.approx(norm, rel=1e-12)
        for name, each in expected.items():
            assert torch.allclose(found[name], each * (0.5 / norm), rtol=1e-12)
