# SPDX-License-Identifier: Apache-2.0
"""`gather_valid`: what counts once comes once; what is no value a sample is refused."""

import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state

X = torch.arange(7.0).reshape(7, 1)


def batches(world, remainder="short", num_micro_batches=1, *, shards=True):
    """Return a rank's batches of seven samples, four an update."""
    parts = af.accumulate(num_micro_batches=num_micro_batches)
    state = linear_state(
        data=af.Data(X, global_batch_size=4, remainder=remainder),
        world=world,
        setup=af.chain(af.shard_data(), parts) if shards else parts,
    )
    return af.batches(state, until_epoch=1)


def joined(batch):
    """Return the values of a batch's micro-batches, one after the other."""
    return torch.cat(batch.micro_batches)


KINDS = {
    "tensor": lambda x: x,
    "tree": lambda x: {"x": (x, x.int())},
    "numbers": lambda x: x.reshape(-1).tolist(),
    "texts": lambda x: [str(int(each)) for each in x],
    "ragged": lambda x: [torch.full((int(each),), float(each)) for each in x],
    "trees": lambda x: [{"a": [float(each), None, (True, "b")]} for each in x],
}


def plain(value):
    """Return a gathered value as something that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(each) for each in value)
    return value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remainder", ["short", "pad", "drop"])
@pytest.mark.parametrize(("num_micro_batches", "shards"), [(1, False), (3, True)])
def test_each_sample_once_on_any_world(kind, remainder, num_micro_batches, shards):
    """Every rank of every world has what one process has, in the batch's order."""
    see = KINDS[kind]

    def program(world):
        loop = batches(world, remainder, num_micro_batches, shards=shards)
        return [
            plain(af.all_gather_valid(see(joined(batch)), batch, world))
            for batch in loop
        ]

    own = [X[0:4], X[4:7]][: 1 if remainder == "drop" else 2]
    expected = [plain(see(rows)) for rows in own]
    for size in (1, 2, 3, 5):
        assert set(map(str, simulate(size, program).results)) == {str(expected)}


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
    batch = next(iter(batches(world)))
    with pytest.raises(
        af.errors.BatchError, match=f"batch has 4 samples.*values have lengths {found}"
    ):
        af.all_gather_valid(values, batch, world)


@pytest.mark.parametrize("size", [1, 2])
def test_objects_that_cannot_travel(size):
    """What is no plain data is refused by its place, on one rank as on several."""

    def program(world):
        batch = next(iter(batches(world)))
        return af.all_gather_valid([{1}] * len(batch.filler), batch, world)

    with pytest.raises(af.errors.PlainDataError, match=r"values\[0\] is a set"):
        simulate(size, program)


def test_breaking_off_harms_nothing():
    """A loop that is left in the middle changes nothing for the next."""

    def program(world):
        for batch in batches(world):
            af.all_gather_valid(joined(batch), batch, world)
            break
        return [len(af.all_gather_valid(joined(b), b, world)) for b in batches(world)]

    assert set(map(tuple, simulate(3, program))) == {(4, 3)}
