# SPDX-License-Identifier: Apache-2.0
"""`af.snapshot_model`: memory is shared until one of the two is written, and never seen to be."""

import gc
import threading
from functools import partial
from queue import Queue

import numpy as np
import pytest
import torch
from torch import nn

import accelfn as af

X = torch.linspace(-1, 1, 24).reshape(8, 3)
STEP = af.make_step(lambda model, batch: model(batch).square().mean())
WAYS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    **{name: {} for name in ("AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam")},
    **{name: {} for name in ("RAdam", "RMSprop", "Rprop", "ASGD", "Adafactor")},
}
FUSED = "SGD", "Adam", "AdamW", "Adagrad"
KERNELS = [
    *((name, {"foreach": each}) for name in WAYS for each in (False, True)),
    *((name, {"fused": True}) for name in FUSED),
]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


SGD = partial(torch.optim.SGD, lr=0.1)


def make(model=net, optimizer=SGD, **options):
    return af.TrainState.create(model=model, optimizer=optimizer, **options)


def values(module):
    """Return copies of all that a module has, by name."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().clone() for name, value in found.items()}


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_no_optimizer_writes_into_it(name, kernel):
    """Whichever way an optimizer goes, it moves the state and leaves the module."""
    options = {"lr": 0.1, **WAYS[name], **kernel}
    make_optimizer = partial(getattr(torch.optim, name), **options)
    state, witness = make(optimizer=make_optimizer), make(optimizer=make_optimizer)
    for _ in range(3):
        module = af.snapshot_model(state)
        before = values(module)
        state, _ = STEP(state, X)
        witness, _ = STEP(witness, X)
        now = values(module)
        assert all(torch.equal(before[each], now[each]) for each in before)
        params = state.params
        assert all(torch.equal(params[each], witness.params[each]) for each in params)
        assert not all(torch.equal(params[each], before[each]) for each in params)


def test_nothing_is_copied_until_a_step():
    """Twenty modules of one state have its memory, however large it is."""
    state = make(lambda: nn.Linear(2048, 2048))
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read twice

        def resident():
            file.seek(0)
            return int(file.read().split()[1]) * 4096

        af.snapshot_model(state)
        gc.collect()
        before = resident()
        modules = [af.snapshot_model(state) for _ in range(20)]
        grown = resident() - before
    assert len(modules) * state.params["weight"].nbytes > 20 * 2**24 - 1
    assert grown < 2**24  # a copy is as much


def test_what_nobody_holds_is_not_copied_by_a_step():
    """A module that is gone costs an update nothing; one that is held leaves with the memory."""
    state = make()
    at = state.params["0.weight"].data_ptr()
    af.snapshot_model(state)(X)
    gc.collect()
    state, _ = STEP(state, X)
    assert state.params["0.weight"].data_ptr() == at

    module = af.snapshot_model(state)
    state, _ = STEP(state, X)
    assert state.params["0.weight"].data_ptr() != at
    assert module[0].weight.data_ptr() == at


def of_numpy():
    model = nn.Linear(3, 1)
    model.weight = nn.Parameter(torch.from_numpy(np.ones((1, 3), np.float32)))
    return model


def of_slices():
    model, whole = nn.Linear(3, 1), torch.ones(1000, 3)
    model.weight = nn.Parameter(whole[5:6])
    return model


def of_a_shared_memory():
    return nn.Linear(3, 1).share_memory()


@pytest.mark.parametrize("model", [of_numpy, of_slices, of_a_shared_memory])
def test_memory_of_others_is_copied_at_once(model):
    """Neither sees what is written into the other, and a slice takes no more than itself."""
    state = make(model())
    module = af.snapshot_model(state)
    before = values(module)
    assert module.weight.untyped_storage().nbytes() == 12
    state, _ = STEP(state, X)
    assert torch.equal(module.weight, before["weight"])
    after = state.params["weight"].clone()
    module.weight.fill_(7)
    assert torch.equal(state.params["weight"], after)


def test_another_thread_may_evaluate_it():
    """Its outputs stay the same while the state trains on, in the moment of copying too."""
    state, lent, seen = make(optimizer=partial(torch.optim.SGD, lr=0.001)), Queue(), []

    def evaluate():
        for module, expected in iter(lent.get, None):
            seen.extend(torch.equal(module(X), expected) for _ in range(20))

    others = [threading.Thread(target=evaluate) for _ in range(2)]
    for each in others:
        each.start()
    for _ in range(100):
        module = af.snapshot_model(state)
        lent.put((module, module(X)))
        state, _ = STEP(state, X)
    for _ in others:
        lent.put(None)
    for each in others:
        each.join()
    assert seen == [True] * 2000


def test_a_compiled_step_writes_into_none():
    """Nor do running statistics that a compiled pass writes."""
    state = make(setup=af.compile(backend="eager"))
    state, _ = STEP(state, X)
    module = af.snapshot_model(state)
    before = values(module)
    state, _ = STEP(state, X)
    now = values(module)
    assert all(torch.equal(before[each], now[each]) for each in before)
    assert not torch.equal(state.buffers["1.running_mean"], before["1.running_mean"])
