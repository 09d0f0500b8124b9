# SPDX-License-Identifier: Apache-2.0
"""`gather_valid`: what counts once comes once; what is no value a sample is refused."""

import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state

DATA = af.Data(torch.arange(7.0).reshape(7, 1), global_batch_size=4)


def first_batch(world):
    """Return the first four of seven samples."""
    return next(iter(af.batches(linear_state(data=DATA, world=world))))


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (torch.zeros(3), r"\[3\]"),
        ([1, 2, 3, 4, 5], r"\[5\]"),
        ({"a": torch.zeros(4), "b": torch.zeros(2)}, r"\[4, 2\]"),
        (torch.tensor(1.0), r"\[None\]"),
        ("text", r"\[None\]"),
        ({}, r"\[\]"),
        (None, r"\[None\]"),
    ],
)
def test_not_one_a_sample(values, found):
    """Other numbers than the batch's samples are refused with both."""
    world = af.World.single()
    batch = first_batch(world)
    with pytest.raises(
        af.errors.BatchError, match=f"batch has 4 samples.*values have lengths {found}"
    ):
        af.all_gather_valid(values, batch, world)


@pytest.mark.parametrize("size", [1, 2])
def test_objects_that_cannot_travel(size):
    """What is no plain data is refused by its place, on one rank as on several."""

    def program(world):
        batch = first_batch(world)
        return af.all_gather_valid([{1}] * len(batch.filler), batch, world)

    with pytest.raises(af.errors.PlainDataError, match=r"values\[0\] is a set"):
        simulate(size, program)
