# SPDX-License-Identifier: Apache-2.0
"""Annotations name what only a type checker imports, as Python 3.14 allows without quotes."""

import sys

import pytest

import accelfn as af

WRITTEN = """
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import accelfn as af

if TYPE_CHECKING:
    from somewhere import Absent


@af.transform
class Scale:
    by: Absent
    offset: Absent | None = None
    rows: ClassVar[Absent] = 3

    def grads(self, grads: Absent, slot: Absent, update: Absent) -> Absent:
        return grads.map(lambda gradient: gradient * self.by), slot


class Descent(torch.optim.SGD):
    def step(self, closure: Absent | None = None) -> Absent:
        return super().step(closure)


class Slower(StepLR):
    def step(self, epoch: Absent | None = None) -> Absent:
        return super().step(epoch)


def net() -> Absent:
    return nn.Linear(2, 1, bias=False)


def optimizer(params: Absent) -> Absent:
    return Descent(params, lr=0.5)


def scheduler(optimizer: Absent) -> Absent:
    return Slower(optimizer, step_size=1)


def loss_fn(model: Absent, batch: Absent) -> Absent:
    return model(batch).sum()


def kept(name: Absent, parameter: Absent) -> Absent:
    return True


def train() -> Absent:
    schedule = af.schedules.from_torch(scheduler)
    parts = {"model": net, "optimizer": optimizer, "schedule": schedule}
    state = af.TrainState.create(**parts, setup=Scale(2.0))
    before = af.snapshot_model(state).weight.clone()
    batch = torch.ones(1, 2)
    state, _ = af.make_step(loss_fn)(state.with_trainable(kept), batch)
    return before - af.snapshot_model(state).weight


@af.transform
class Wrong:
    def grads(self, grads: Absent) -> Absent:
        return grads, None
"""


@pytest.fixture
def written():
    """Return what the code above defines; before Python 3.14 its annotations are texts."""
    late = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    named = {"__name__": "written"}
    code, _, wrong = WRITTEN.rpartition("@af.transform")
    exec(compile(late + code, "written", "exec", dont_inherit=True), named)  # noqa: S102
    named["wrong"] = compile(
        late + f"@af.transform{wrong}", "wrong", "exec", dont_inherit=True
    )
    return named


def test_what_is_annotated_so_trains(written):
    """A transform, an optimizer, a schedule and a loss are taken, and do what they say."""
    assert written["train"]().tolist() == [[1.0, 1.0]]


def test_its_options(written):
    """Options are the annotations that are none of the class, and a name."""
    scale = written["Scale"]
    assert repr(scale(2, offset=1, name="other")) == (
        "Scale(2, offset=1, name='other')"
    )
    with pytest.raises(af.errors.CallError, match="no argument rows="):
        scale(2, rows=1)


def test_what_is_wrong_is_told(written):
    """A method that takes other arguments than it is called with is refused by its name."""
    with pytest.raises(af.errors.ArgumentError, match="Wrong.grads: accelfn calls"):
        exec(written["wrong"], written)  # noqa: S102
