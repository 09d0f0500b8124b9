# SPDX-License-Identifier: Apache-2.0
"""What a tracker makes of values: numbers, and copies that are each backend's own."""

import numpy as np
import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.internals import flat

WORLD = af.World.single()


def test_what_an_image_says_ends_no_rank():
    """Whether its numbers are from 0 to 1 is read on rank 0 alone, so no rank refuses them."""

    def train(world):
        tracker = af.track.in_memory(world=world)
        tracker.images({"seen": torch.full((1, 2, 2), 3.0)}, 1)
        return [each.images for each in tracker.backends.values()]

    with pytest.warns(af.errors.TrackingWarning, match="from 3 to 3"):
        assert simulate(2, train).results == ([{}], [])


class Greedy:
    """A backend that changes all that it is given."""

    backend = None

    def metrics(self, metrics, step):
        metrics.clear()

    def hyperparameters(self, hyperparameters):
        hyperparameters["deep"].clear()

    def images(self, images, step):
        images.pop("seen")[:] = 7

    def close(self, *, failed):
        """Hold nothing."""


def test_no_backend_changes_what_another_gets():
    """Each has a copy of its own, and tensors stay the caller's."""
    accepts = ("images",)
    greedy = af.track.custom(Greedy, name="mine", world=WORLD, accepts=accepts)
    memory = af.track.in_memory(world=WORLD)
    image = torch.zeros(1, 1, 2, dtype=torch.uint8)
    with af.track.together(greedy, memory) as tracker:
        tracker({"loss": 0.5}, 1)
        tracker.hyperparameters({"deep": {"lr": 0.1}})
        tracker.images({"seen": image}, 1)
    kept = memory.backends["in_memory"]
    assert kept.metrics == {"loss": {1: 0.5}}
    assert kept.hyperparameters == {"deep": {"lr": 0.1}}
    assert not kept.images["seen"][1].any()
    assert not image.any()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.int64(5), 5),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.longdouble(0.5), 0.5),
        (np.bool_(1), True),
        (np.array(3), 3),
        (torch.tensor(3), 3),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(1).bool(), True),
        ([np.int64(5)], [5]),
        (torch.ones(1), "tensor([1.])"),
        (torch.tensor(1j), "tensor(0.+1.j)"),
        (np.complex64(1j), "np.complex64(1j)"),
        (np.timedelta64(1, "s"), "np.timedelta64(1,'s')"),
        (torch.ones((), device="meta"), "tensor(..., device='meta', size=())"),
    ],
)
def test_settings_of_one_number_are_numbers(given, kept):
    """Python's own, of numpy's scalars and of tensors without a dimension; others are texts."""
    tracker = af.track.in_memory(world=WORLD)
    tracker.hyperparameters({"a": given})
    found = tracker.backends["in_memory"].hyperparameters["a"]
    assert (type(found), found) == (type(kept), kept)


NO_VALUES = {
    "meta": torch.empty((1, 2, 2), device="meta"),
    "sparse": torch.zeros(1, 2, 2).to_sparse(),
}


@pytest.mark.parametrize("kind", NO_VALUES)
def test_what_has_no_values_is_refused(kind):
    """On all ranks, before rank 0 would fail to read it."""
    tracker = af.track.in_memory(world=WORLD)
    with pytest.raises(
        af.errors.ArgumentError, match="images: 'x' is a tensor of shape"
    ):
        tracker.images({"x": NO_VALUES[kind]}, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.float16, torch.bfloat16]
)
def test_numbers_of_any_size_are_seen(dtype):
    """Images may be of any floating-point numbers."""
    image = torch.tensor([[[0.0, 1.0], [0.5, 0.25]]]).to(dtype)
    tracker = af.track.in_memory(world=WORLD)
    tracker.images({"x": image}, 1)
    kept = tracker.backends["in_memory"]
    assert kept.images["x"][1].reshape(-1).tolist() == [0, 255, 128, 64]


def test_settings_within_settings_have_the_whole_way_for_a_name():
    """However deep they are, so that two that end alike are two."""
    values = {
        "a": {"b": {"c": 1, "d": {}}, "e": [1]},
        "b": {"b": {"c": 2.0}},
        "f": None,
    }
    assert flat(values) == {
        "a.b.c": 1,
        "a.b.d": "{}",
        "a.e": "[1]",
        "b.b.c": 2.0,
        "f": "None",
    }
    with pytest.raises(af.errors.ArgumentError, match=r"a\.b"):
        flat({"a": {"b": 1}, "a.b": 2})


@pytest.mark.parametrize("accepts", [("image",), ("images", "videos"), "images"])
def test_what_no_backend_has_is_not_accepted(accepts):
    """Anything but images is refused before the backend is opened."""
    opened = []
    with pytest.raises(
        af.errors.ArgumentError, match=r"accepts=.*: expected \('images',\)"
    ):
        af.track.custom(
            lambda: opened.append(1), name="mine", world=WORLD, accepts=accepts
        )
    assert opened == []
