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
from tests.states import bits, linear_state

X = torch.linspace(-1, 1, 24).reshape(8, 3)
STEP = af.make_step(lambda model, batch: model(batch).square().mean())
OPTIONS = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}
NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam"]
NAMES += ["RAdam", "RMSprop", "Rprop", "ASGD", "Adafactor"]
KERNELS = [(name, {"foreach": each}) for name in NAMES for each in (False, True)]
KERNELS += [(name, {"fused": True}) for name in NAMES[:4]]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


create = partial(linear_state, model=net)


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_no_optimizer_writes_into_it(name, kernel):
    """Whichever way an optimizer goes, it moves the state and leaves the module."""
    options = {"lr": 0.1, **OPTIONS.get(name, {}), **kernel}
    optimizer = partial(getattr(torch.optim, name), **options)
    state, witness = create(optimizer=optimizer), create(optimizer=optimizer)
    for _ in range(3):
        module = af.snapshot_model(state)
        before = bits(module.state_dict())
        state, _ = STEP(state, X)
        witness, _ = STEP(witness, X)
        assert before == bits(module.state_dict())
        assert bits(state.params) == bits(witness.params)
        assert before["0.weight"] != bits(state.params["0.weight"])


def test_only_a_step_copies_and_only_what_somebody_holds():
    """A module that is gone costs an update nothing; one that is held leaves with the memory."""
    state = create()
    at = state.params["0.weight"].data_ptr()
    af.snapshot_model(state)(X)
    gc.collect()
    state, _ = STEP(state, X)
    assert state.params["0.weight"].data_ptr() == at
    modules = [af.snapshot_model(state) for _ in range(2)]
    assert all(torch._C._is_cow_tensor(module[0].weight) for module in modules)
    module = modules.pop()
    del modules[:]
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
    state = create(model=model())
    module = af.snapshot_model(state)
    before = bits(module.weight)
    assert module.weight.untyped_storage().nbytes() == 12
    state, _ = STEP(state, X)
    assert before == bits(module.weight)
    after = bits(state.params["weight"])
    module.weight.fill_(7)
    assert after == bits(state.params["weight"])


def test_another_thread_may_evaluate_it():
    """Its outputs stay the same while the state trains on, in the moment of copying too."""
    state = create(optimizer=partial(torch.optim.SGD, lr=0.001))
    lent, seen = Queue(), []

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
    state, _ = STEP(create(setup=af.compile(backend="eager")), X)
    module = af.snapshot_model(state)
    before = bits(module.state_dict())
    state, _ = STEP(state, X)
    assert before == bits(module.state_dict())
    assert before["1.running_mean"] != bits(state.buffers["1.running_mean"])
