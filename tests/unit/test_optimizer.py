# SPDX-License-Identifier: Apache-2.0
"""Optimizers are torch's own, bitwise, whatever is done to the states between updates."""

from functools import partial

import pytest
import torch
from torch import nn, optim

import accelfn as af
from accelfn.errors import OptimizerError
from tests.states import bits

X = torch.linspace(-1, 1, 24).reshape(8, 3)
PARTS = [X + i for i in range(5)]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss(model, batch):
    return model(batch).square().mean()


STEP = af.make_step(loss)


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
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(
        optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam": partial(optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(optim.AdamW, lr=0.1),
    "AdamW fused": partial(optim.AdamW, lr=0.1, fused=True),
    "AdamW foreach": partial(optim.AdamW, lr=0.1, foreach=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adafactor": partial(optim.Adafactor, lr=0.1),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "NAdam": partial(optim.NAdam, lr=0.1),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=2),
    "tensor lr": partial(optim.Adam, lr=torch.tensor(0.1), foreach=False),
    "counting": Counting,
    "group step": GroupStep,
    "group tensor": GroupTensor,
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
    optimizer = make(list(model.named_parameters()))
    history = []
    for part in parts:
        optimizer.zero_grad()
        loss(model, part).backward()
        optimizer.step()
        history.append(bits(dict(model.named_parameters())))
    return history


def create(make, **options):
    return af.TrainState.create(model=seeded(), optimizer=make, **options)


optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


@optimizers
def test_loaded_states_go_on_alike(name, tmp_path):
    """A state saved and loaded at each update goes on as the loop by hand."""
    state = create(OPTIMIZERS[name])
    for i, part in enumerate(PARTS):
        state, _ = STEP(state, part)
        af.save(state, tmp_path / str(i))
        loaded = af.load(create(OPTIMIZERS[name]), tmp_path / str(i))
        assert values(state) == values(loaded)
        state = loaded
    assert by_hand(OPTIMIZERS[name], PARTS)[-1] == bits(state.params)


@optimizers
@pytest.mark.parametrize("at", [0, 2])
def test_forks_stepped_in_turn_are_apart(name, at):
    """Stepping a fork, or with donate=False, between updates changes nothing in either."""
    state = create(OPTIMIZERS[name])
    for part in PARTS[:at]:
        state, _ = STEP(state, part)
    fork = state.copy()
    for part in PARTS[at:]:
        before = values(state)
        STEP(state, part + 1, donate=False)
        assert before == values(state)
        state, _ = STEP(state, part)
        fork, _ = STEP(fork, -part)
    forked = PARTS[:at] + [-part for part in PARTS[at:]]
    assert by_hand(OPTIMIZERS[name], PARTS)[-1] == bits(state.params)
    assert by_hand(OPTIMIZERS[name], forked)[-1] == bits(fork.params)


def test_numbers_of_groups_are_in_the_state():
    """Numbers that a step changes are read in `opt_state`, by parameter and by group."""
    state = create(Counting)
    for part in PARTS[:2]:
        state, _ = STEP(state, part)
    assert state.opt_state["0.bias"] == {"age": 2, "ages": [1, 2]}
    assert state.opt_state["<group 0>"] == {"num_updates": 2}


# Ready optimizers.


def grouped(model, make=optim.AdamW):
    """Return an optimizer with two groups of different rates and decays."""
    return make(
        [
            {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.5},
            {"params": model[2].parameters(), "lr": 0.1, "name": "head"},
        ]
    )


def test_ready_optimizer_with_groups():
    """Groups keep their rates and decays, and a schedule multiplies each rate."""
    model = seeded()
    state = af.TrainState.create(
        model=model, optimizer=grouped(model), schedule=af.schedules.linear(10)
    )
    assert state.lrs == (0.01, 0.1)
    twin = seeded()
    optimizer = grouped(twin)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, af.schedules.linear(10))
    for part in PARTS:
        state, _ = STEP(state, part)
        optimizer.zero_grad()
        loss(twin, part).backward()
        optimizer.step()
        scheduler.step()
    assert bits(dict(twin.named_parameters())) == bits(state.params)


def test_ready_optimizer_hands_over_its_state():
    """What a ready optimizer has gathered is gone on with, bitwise."""
    model, twin = seeded(), seeded()
    optimizer, other = grouped(model), grouped(twin)
    for each, its in ((model, optimizer), (twin, other)):
        loss(each, X).backward()
        its.step()
        its.zero_grad()
    state = af.TrainState.create(model=model, optimizer=optimizer)
    assert sorted(state.params) == sorted(state.opt_state)
    for part in PARTS:
        state, _ = STEP(state, part)
        other.zero_grad()
        loss(twin, part).backward()
        other.step()
    assert bits(dict(twin.named_parameters())) == bits(state.params)


class OfOnesOwn(optim.SGD):
    """Is none of torch's, and so is tried when a state is made."""


@pytest.mark.parametrize("kind", [optim.SGD, OfOnesOwn])
def test_step_hooks_run(kind):
    """Hooks that a ready optimizer has are run at each update, and at nothing else."""
    model, seen = seeded(), []
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("behind"))
    state = af.TrainState.create(model=model, optimizer=optimizer)
    assert seen == []
    for part in PARTS[:2]:
        state, _ = STEP(state, part)
    assert seen == ["before", "behind"] * 2


def test_hyper_of_a_group():
    """A transform sets a hyperparameter of one group, by index or by name."""

    @af.transform
    class Sets:
        where: object

        def hyper(self, hyper, slot, update):
            return {(self.where, "lr"): 0.0}, slot

    for where, moved in (("head", "0."), (1, "0."), (0, "2.")):
        model = seeded()
        state = af.TrainState.create(
            model=model, optimizer=grouped(model), setup=Sets(where)
        )
        before = bits(state.params)
        after = bits(STEP(state, X)[0].params)
        assert {f"{moved}weight", f"{moved}bias"} == {
            name for name in before if before[name] != after[name]
        }


# What is refused.


def test_optimizer_of_another_model():
    """A ready optimizer over other parameters is refused, with what goes together."""
    optimizer = optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(
        OptimizerError, match=r"SGD\): .* of another model.*functools"
    ) as caught:
        af.TrainState.create(model=net(), optimizer=optimizer)
    assert isinstance(caught.value, ValueError)


def test_ready_optimizer_with_a_model_factory():
    """A ready optimizer cannot belong to what a factory makes."""
    optimizer = optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match=r"functools.partial"):
        af.TrainState.create(model=net, optimizer=optimizer)


def test_factory_over_other_parameters():
    """A factory that ignores what it is given is refused."""
    other = net()
    with pytest.raises(OptimizerError, match=r"SGD.: .* of another model"):
        af.TrainState.create(
            model=net, optimizer=lambda _: optim.SGD(other.parameters(), lr=0.1)
        )


def test_optimizer_that_lacks_parameters():
    """A trainable parameter that no group has is named, with what to do."""
    model = net()
    optimizer = optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(
        OptimizerError, match=r"lacks .*2\.weight, 2\.bias.*requires_grad_"
    ):
        af.TrainState.create(model=model, optimizer=optimizer)


def test_optimizer_that_calls_the_loss():
    """LBFGS needs a closure, which a step cannot give."""
    with pytest.raises(OptimizerError, match=r"LBFGS .*closure.*gradients"):
        af.TrainState.create(
            model=net,
            optimizer=lambda named: optim.LBFGS([param for _, param in named]),
        )


class Asking(optim.SGD):
    """Takes no closure by its signature, but asks for one."""

    def step(self, closure=None):
        assert closure is not None, "this needs a closure"
        return super().step(closure)


class Calling(optim.SGD):
    """Calls the closure that nobody gave."""

    def step(self, closure=None):
        closure()
        return super().step()


@pytest.mark.parametrize("make", [Asking, Calling])
@pytest.mark.parametrize("ready", [True, False])
def test_optimizer_that_needs_a_closure_when_tried(make, ready):
    """An optimizer that asks for a closure, or calls it, is refused before any step."""
    model = seeded()
    factory = partial(make, lr=0.1)
    optimizer = factory(model.named_parameters()) if ready else factory
    with pytest.raises(OptimizerError, match=rf"{make.__name__} requires a closure"):
        af.TrainState.create(model=model, optimizer=optimizer)


def test_trying_leaves_no_trace():
    """An optimizer that is tried for a closure has its own numbers and hooks untouched."""
    model, seen = seeded(), []
    optimizer = Counting(model.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("hook"))
    groups, entries = optimizer.param_groups, optimizer.state
    state = af.TrainState.create(model=model, optimizer=optimizer)
    assert (seen, dict(entries)) == ([], {})
    assert groups[0]["num_updates"] == 0
    assert STEP(state, X)[0].opt_state["<group 0>"] == {"num_updates": 1}


class Around(optim.Optimizer):
    """Keeps another optimizer, as Lookahead does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.base = optim.Adam(
            [p for group in self.param_groups for p in group["params"]]
        )

    def step(self, closure=None):
        return self.base.step(closure)


def test_an_update_that_was_refused_is_not_counted():
    """What an optimizer wrote before it raised in the very first goes with it."""

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (nn.Embedding(3, 2, sparse=True) for _ in range(2))

    def loss(model, rows, is_dense):
        two = model.two.weight[rows] if is_dense else model.two(rows)
        return (model.one(rows) + two).square().mean()

    def make():
        return af.TrainState.create(
            model=Tables,
            optimizer=lambda named: torch.optim.SparseAdam(dict(named).values()),
        )

    step, rows = af.make_step(loss), torch.tensor([0, 1])
    plain, state = make(), make()
    with pytest.raises(RuntimeError, match="dense gradients"):
        step(state, rows, True)  # noqa: FBT003 - an extra of the loss
    plain, _ = step(plain, rows, False)  # noqa: FBT003
    state, _ = step(state, rows, False)  # noqa: FBT003
    assert values(plain) == values(state)


def test_optimizer_around_another():
    """State of an optimizer inside another would be in no copy; it is refused by name."""
    with pytest.raises(
        OptimizerError, match="Around: its attribute base is another optimizer"
    ):
        create(Around)


EVERY = sorted(
    name
    for name, each in vars(optim).items()
    if isinstance(each, type) and each is not optim.Optimizer
)
REFUSED = {
    "LBFGS": (OptimizerError, "closure"),
    "Muon": (ValueError, "2D"),
    "SparseAdam": (RuntimeError, "does not support dense gradients"),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_of_torch_steps_or_says_why(name):
    """Each class of torch.optim trains as by hand, or is refused with the reason."""
    kind = getattr(optim, name)
    make = lambda named: kind([param for _, param in named])  # noqa: E731
    if name in REFUSED:
        error, why = REFUSED[name]
        with pytest.raises(error, match=why):
            STEP(create(make), X)
        return
    state = create(make)
    for part in PARTS:
        state, _ = STEP(state, part)
    assert by_hand(make, PARTS)[-1] == bits(state.params)


@pytest.mark.parametrize("optimizer", [42, None, "adam", lambda _: None])
def test_no_optimizer(optimizer):
    """What is no optimizer, nor a factory of one, is refused with an example."""
    with pytest.raises(OptimizerError, match=r"optimizer.*partial"):
        af.TrainState.create(model=net, optimizer=optimizer)


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


def test_optimizer_given_away_is_not_used_again():
    """A state shares nothing with a ready optimizer but the tensors it was given."""
    model = seeded()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    loss(model, X).backward()
    optimizer.step()
    groups, rate = optimizer.param_groups, optimizer.param_groups[0]["lr"]
    state = af.TrainState.create(
        model=model, optimizer=optimizer, schedule=af.schedules.constant(0.5)
    )
    STEP(state, X)
    assert rate == groups[0]["lr"]


def given_away():
    """Return a ready optimizer that a state was made of."""
    model = seeded()
    optimizer = optim.Adam([{"params": model.parameters(), "lr": 0.1}])
    af.TrainState.create(model=model, optimizer=optimizer)
    return optimizer


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
    """A10: what is set in an optimizer after `create` would have no effect, and is refused."""
    optimizer = given_away()
    with pytest.raises(OptimizerError, match="you passed this"):
        CHANGES[case](optimizer)
