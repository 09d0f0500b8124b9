# SPDX-License-Identifier: Apache-2.0
"""Optimizers are torch's own, bitwise, whatever is done to the states between updates."""

from functools import partial

import pytest
import torch
from torch import nn, optim

import accelfn as af
from accelfn.errors import OptimizerError
from tests.states import STEP, bits, square
from tests.states import create as create_state

X = torch.linspace(-1, 1, 24).reshape(8, 3)
PARTS = [X + i for i in range(5)]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Counting(optim.Optimizer):
    """Keeps a number in its groups, and an integer and a list in each state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "num_updates": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["num_updates"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["age"] = state.get("age", 0) + 1
                state.setdefault("ages", []).append(state["age"])
                scale = group["lr"] / (group["num_updates"] + len(state["ages"]))
                param.sub_(scale * state["age"] * param.grad)


class GroupStep(optim.Optimizer):
    """Adds a number to its groups at the first update, as Apex's fused ones do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                param.sub_(group["lr"] / group["step"] * param.grad)


class GroupTensor(optim.Optimizer):
    """Keeps a tensor in its groups, which it changes in place."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "t": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] += 1
            for param in group["params"]:
                param.sub_(group["lr"] / group["t"] * param.grad)


OPTIMIZERS = {
    **{
        name: kind
        for name, kind in sorted(vars(optim).items())
        if isinstance(kind, type) and kind is not optim.Optimizer
    },
    "SGD momentum": partial(
        optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam amsgrad": partial(optim.Adam, lr=0.1, amsgrad=True),
    "AdamW fused": partial(optim.AdamW, lr=0.1, fused=True),
    "AdamW foreach": partial(optim.AdamW, lr=0.1, foreach=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=2),
    "tensor lr": partial(optim.Adam, lr=torch.tensor(0.1), foreach=False),
    "counting": Counting,
    "group step": GroupStep,
    "group tensor": GroupTensor,
}
CANNOT_STEP = {
    "LBFGS": (OptimizerError, "closure"),
    "Muon": (ValueError, "2D"),
    "SparseAdam": (RuntimeError, "does not support dense gradients"),
}


def values(state):
    """Return parameters and optimizer state, to be compared bitwise."""
    return bits(state.params), bits(state.opt_state)


def seeded():
    """Return a model, leaving torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return net()


def by_hand(make, parts):
    """Return the parameters of a hand-written loop after each update."""
    model = seeded()
    optimizer = make([param for _, param in model.named_parameters()])
    history = []
    for part in parts:
        optimizer.zero_grad()
        square(model, part).backward()
        optimizer.step()
        history.append(bits(dict(model.named_parameters())))
    return history


def create(make):
    return create_state(
        model=seeded(), optimizer=lambda named: make([param for _, param in named])
    )


@pytest.mark.parametrize("name", CANNOT_STEP)
def test_optimizers_that_cannot_step_say_why(name):
    """When the state is created, or at its first step."""
    error, words = CANNOT_STEP[name]
    with pytest.raises(error, match=words):
        STEP(create(OPTIMIZERS[name]), X)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - CANNOT_STEP))
def test_optimizers_step_as_by_hand(name, tmp_path):
    """Also a state that is saved and loaded at each update, beside a fork and a look."""
    make = OPTIMIZERS[name]
    state = create(make)
    for i, part in enumerate(PARTS):
        if i == 2:
            fork = state.copy()
        state, _ = STEP(state, part)
        af.save(state, tmp_path / str(i))
        loaded = af.load(create(make), tmp_path / str(i))
        assert values(state) == values(loaded)
        STEP(state, part + 1, donate=False)
        assert values(state) == values(loaded)
        state = loaded
        if i >= 2:
            fork, _ = STEP(fork, -part)
    assert by_hand(make, PARTS)[-1] == bits(state.params)
    forked = PARTS[:2] + [-part for part in PARTS[2:]]
    assert by_hand(make, forked)[-1] == bits(fork.params)


def test_numbers_of_groups_are_in_the_state():
    """Numbers that a step changes are read in `opt_state`, by parameter and by group."""
    state = create(Counting)
    for part in PARTS[:2]:
        state, _ = STEP(state, part)
    assert state.opt_state["0.bias"] == {"age": 2, "ages": [1, 2]}
    assert state.opt_state["<group 0>"] == {"num_updates": 2}


# Ready optimizers.


class Global(optim.SGD):
    """Keeps two entries that belong to no parameter, as MADGRAD keeps one."""

    def step(self, closure=None):
        self.state["k"] = self.state.get("k", 0) + 1
        self.state["twice"] = 2 * self.state["k"]
        super().step(closure)


@pytest.mark.parametrize("forked", [False, True])
def test_state_of_no_parameter(forked):
    """An entry of no parameter is kept like the others, in a steady loop and in forks."""
    state = create(partial(Global, lr=0.1))
    for i, part in enumerate(PARTS):
        state, _ = STEP(state.copy() if forked else state, part)
        assert state.opt_state["<optimizer>"] == {"k": i + 1, "twice": 2 * i + 2}


class OfOnesOwn(optim.SGD):
    """Is none of torch's, and so is tried when a state is made."""


@pytest.mark.parametrize("kind", [optim.SGD, OfOnesOwn, Counting])
def test_ready_optimizer_hands_over_its_state_and_hooks(kind):
    """What it has gathered is gone on with, and hooks run at each update, and at nothing else."""
    model, twin, seen = seeded(), seeded(), []
    optimizer, other = (kind(each.parameters(), lr=0.1) for each in (model, twin))
    for each, its in ((model, optimizer), (twin, other)):
        square(each, X).backward()
        its.step()
        its.zero_grad()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("behind"))
    groups, rate = optimizer.param_groups, optimizer.param_groups[0]["lr"]
    schedule = af.schedules.constant(1.0)
    state = create_state(model=model, optimizer=optimizer, schedule=schedule)
    assert seen == []
    for part in PARTS:
        state, _ = STEP(state, part)
        other.zero_grad()
        square(twin, part).backward()
        other.step()
    assert bits(dict(twin.named_parameters())) == bits(state.params)
    assert seen == ["before", "behind"] * len(PARTS)
    assert rate == groups[0]["lr"]
    assert groups[0].get("num_updates", 1) == 1  # nobody wrote into what was given


def test_an_update_that_was_refused_is_not_counted():
    """What an optimizer wrote before it raised in the very first goes with it."""

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (nn.Embedding(3, 2, sparse=True) for _ in range(2))

    def loss(model, rows, is_dense):
        two = model.two.weight[rows] if is_dense else model.two(rows)
        return (model.one(rows) + two).square().mean()

    sparse = partial(optim.SparseAdam, lr=0.1)
    plain, state = (create_state(model=Tables, optimizer=sparse) for _ in range(2))
    step, rows = af.make_step(loss), torch.tensor([0, 1])
    before = values(state)
    with pytest.raises(RuntimeError, match="dense gradients"):
        step(state, rows, True)  # noqa: FBT003 - an extra of the loss
    assert values(state) == before
    plain, _ = step(plain, rows, False)  # noqa: FBT003
    state, _ = step(state, rows, False)  # noqa: FBT003
    assert values(plain) == values(state)


# What is refused.


class Asking(optim.SGD):
    """Takes no closure by its signature, but asks for one."""

    def step(self, closure=None):
        assert closure is not None, "this needs a closure"
        return super().step(closure)


class Calling(optim.SGD):
    def step(self, closure=None):
        closure()
        return super().step()


class Around(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.base = optim.Adam(
            [p for group in self.param_groups for p in group["params"]]
        )

    def step(self, closure=None):
        return self.base.step(closure)


READY = seeded()
SOME = optim.SGD(READY[0].parameters(), lr=0.1)
OTHERS = optim.SGD(net().parameters(), lr=0.1)
NONE = r"optimizer.*partial"
REFUSED = [
    (READY, OTHERS, r"SGD\): .* of another model.*functools"),
    (net, OTHERS, r"functools.partial"),
    (
        net,
        lambda _: optim.SGD(net().parameters(), lr=0.1),
        r"SGD.: .* of another model",
    ),
    (READY, SOME, r"lacks .*2\.weight, 2\.bias.*requires_grad_"),
    (
        net,
        lambda named: optim.LBFGS([param for _, param in named]),
        r"LBFGS .*closure.*gradients",
    ),
    (net, Asking, "Asking requires a closure"),
    (net, Calling, "Calling requires a closure"),
    (READY, Asking(READY.parameters()), "Asking requires a closure"),
    (net, Around, "Around: its attribute base is another optimizer"),
    (net, 42, NONE),
    (net, None, NONE),
    (net, "adam", NONE),
    (net, lambda _: None, NONE),
]


@pytest.mark.parametrize(("model", "optimizer", "words"), REFUSED)
def test_what_is_no_optimizer_of_the_model_is_refused(model, optimizer, words):
    """With the reason and what to write, before any step."""
    with pytest.raises(OptimizerError, match=words) as caught:
        create_state(model=model, optimizer=optimizer)
    assert isinstance(caught.value, ValueError)


CHANGES = {
    "a rate": lambda given: given.param_groups[0].__setitem__("lr", 0.2),
    "several": lambda given: given.param_groups[0].update(lr=0.2),
    "one taken out": lambda given: given.param_groups[0].pop("lr"),
    "a torch scheduler": lambda given: optim.lr_scheduler.StepLR(given, 3),
    "more parameters": lambda given: given.add_param_group({"params": [X]}),
    "a state dict": lambda given: given.load_state_dict(given.state_dict()),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_of_an_optimizer_given_away(case):
    """What is set in an optimizer after `create` would have no effect, and is refused."""
    model = seeded()
    optimizer = optim.Adam([{"params": model.parameters(), "lr": 0.1}])
    create_state(model=model, optimizer=optimizer)
    with pytest.raises(OptimizerError, match="you passed this"):
        CHANGES[case](optimizer)
