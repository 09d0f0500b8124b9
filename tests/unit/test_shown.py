# SPDX-License-Identifier: Apache-2.0
"""What `dir`, `help` and `repr` show of public values."""

import html
import inspect
import pydoc
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import communication
from tests.states import linear_state


def loss_fn(model, batch):
    return model(batch).square().mean()


def records():
    """Return a value of each kind that a training has."""
    state = af.TrainState.create(
        model=lambda: nn.Linear(2, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=af.Data(torch.ones(8, 2), global_batch_size=4),
        setup=af.chain(af.ema(0.9)),
        world=af.World.single(device="cpu"),
    )
    batch = next(iter(af.batches(state)))
    metrics, grads = af.value_and_grad(loss_fn)(state, batch)
    return [state, state.world, state.data, state.setup, batch, metrics, grads]


@pytest.mark.parametrize("value", records(), ids=lambda value: type(value).__name__)
def test_dir_shows_what_exists(value):
    """Each name that `dir` shows is defined, and `help` works."""
    shown = [name for name in dir(value) if not name.startswith("_")]
    assert shown
    for name in shown:
        inspect.getattr_static(value, name)  # asks no __getattr__, which gives hints
    assert type(value).__name__ in pydoc.render_doc(type(value))


def test_the_package_shows_few_names_and_no_folders():
    """`dir(af)` is short, and each of its names exists."""
    assert len(dir(af)) <= 110
    modules = {name for name in dir(af) if inspect.ismodule(getattr(af, name))}
    assert modules == {"errors", "megatron", "orders", "schedules", "track", "typing"}


def test_a_step_is_printed_with_its_loss():
    """The repr of a step names the loss function."""
    assert repr(af.make_step(loss_fn)).startswith("<function step of loss_fn at 0x")


def test_data_is_true_without_a_length():
    """`if data:` holds for a stream, which need not know its length."""

    class Numbers:
        def __iter__(self):
            return iter(range(3))

    assert af.Data(Numbers(), global_batch_size=1)


def test_tables_are_shown_in_notebooks():
    """A notebook shows the table that `print` shows."""
    state = linear_state()
    plan = af.plan_devices(torch.nn.Linear(1, 1), {"cpu": "1MB"})
    traffic = communication(af.barrier, ranks=(2, 3))
    for each in (af.memory(state), plan, traffic):
        assert each._repr_html_() == f"<pre>{html.escape(str(each))}</pre>"
