# SPDX-License-Identifier: Apache-2.0
"""Given away means given away: a model or optimizer that a state was made of raises."""

import copy
import functools
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import accelfn as af
from accelfn.testing import assert_states_equal

SHARED: dict[str, nn.Module] = {}
"""One activation for several models, as code that is written once has it."""


class Tied(nn.Module):
    """Two names of one weight, an activation that is everybody's, and plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.activation, self.width = SHARED.setdefault("gelu", nn.GELU()), 3

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.first(batch)))

    @property
    def size(self) -> int:
        return self.width


def hooked() -> nn.Module:
    made = Tied()
    made.first.register_forward_hook(lambda _, __, found: found * 2)
    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "tied": Tied,
    "hooked": hooked,
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.BatchNorm1d(3)),
    "a norm without parameters": lambda: nn.Sequential(
        nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3)
    ),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "evaluated": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval(),
}
USES: dict[str, Callable[[Any], object]] = {
    "call": lambda each: each(torch.ones(2, 3)),
    "set": lambda each: setattr(each, "new", 1),
    "delete": lambda each: delattr(each, "training"),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "save": lambda each: torch.save(each, io.BytesIO()),
    "contain": lambda each: nn.Sequential(each).eval(),
    "own attribute": lambda each: each.width,
    "property": lambda each: each.size,
    "data parallel": lambda each: nn.DataParallel(each).state_dict(),
}
METHODS = sorted(name for name in dir(nn.Linear(1, 1)) if not name.startswith("__"))
OF_OPTIMIZERS = sorted(
    {name for name in dir(torch.optim.Adam) if not name.startswith("__")}
    | {"param_groups", "state", "defaults"}
)


def made(kind: str) -> nn.Module:
    """Return a model as a factory of its kind makes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[kind]()


def trained(state: af.TrainState, updates: int) -> af.TrainState:
    step = af.make_step(lambda net, batch: net(batch).square().mean())
    for _ in range(updates):
        state, _ = step(state, torch.linspace(-1, 1, 12).reshape(4, 3))
    return state


@given(
    kind=st.sampled_from(sorted(MODELS)),
    use=st.one_of(st.sampled_from(sorted(USES)), st.sampled_from(METHODS)),
    part=st.integers(0, 3),
    updates=st.integers(0, 2),
)
@example(kind="a norm without parameters", use="call", part=0, updates=0)
def test_a_model_that_was_given_raises(kind, use, part, updates):
    """A5: whatever is asked of it, or of a part of it that holds tensors, before a load or after.

    The state trains as that of a copy does; activations that have no tensors stay everybody's.
    """
    SHARED["gelu"] = nn.GELU()
    model = made(kind)
    copied = copy.deepcopy(model)
    parts, others = [], []  # what holds tensors of any kind, and what is everybody's
    for each in model.modules():
        (parts if [*each.parameters(), *each.buffers()] else others).append(each)
    given = parts[part % len(parts)]
    make = functools.partial(torch.optim.Adam, lr=0.1)
    state = trained(af.TrainState.create(model=model, optimizer=make), updates)
    with pytest.raises(
        af.errors.ModelError,
        match=r"passed this .* to TrainState.create.*state 'state'\. \w",
    ):
        (USES[use] if use in USES else lambda each: getattr(each, use))(given)
    other = trained(af.TrainState.create(model=copied, optimizer=make), updates)
    assert_states_equal(state, other)
    assert all("given to the state 'state'" in repr(each) for each in parts)
    assert not any("given to the state" in repr(each) for each in others)
    assert SHARED.pop("gelu").eval()(torch.zeros(1)) == 0
    with pytest.raises(af.errors.ModelError, match="already belongs to the state"):
        af.TrainState.create(model=nn.Sequential(given), optimizer=make)


class Replicas(nn.parallel.DistributedDataParallel):
    """One without a group, which nobody asks it for."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.process_group = module, None


WRAPPERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "DistributedDataParallel": (Replicas, r"\.module, .*af\.wrap_ddp"),
    "DataParallel": (nn.DataParallel, r"\.module, .*accelfn launch"),
    "OptimizedModule": (
        functools.partial(torch.compile, backend="eager"),
        r"\._orig_mod, .*af\.compile\(regions=",
    ),
}


@given(
    kind=st.sampled_from(sorted(WRAPPERS)),
    around=st.integers(0, 2),
    instance=st.booleans(),
)
@example(kind="DataParallel", around=1, instance=True)
def test_what_torch_has_wrapped_is_refused(kind, around, instance):
    """A5: a model, or a part of it at any depth, with its way; the model stays the caller's."""
    wrap, way = WRAPPERS[kind]
    model: nn.Module = wrap(nn.Linear(3, 3))
    for _ in range(around):
        model = nn.Sequential(nn.Linear(3, 3), model)
    path = r"\.".join(["model", *["1"] * around])
    where = f"{path} is a {kind}" if around else f"model={kind}"
    words = f"^{where}: pass the plain module inside it, {way}"
    with pytest.raises(af.errors.ModelError, match=words):
        af.TrainState.create(
            model=model if instance else lambda: model, optimizer=torch.optim.SGD
        )
    assert len([*model.parameters()]) == 2 * (around + 1)


@given(
    use=st.one_of(st.sampled_from(["copy", "pickle"]), st.sampled_from(OF_OPTIMIZERS)),
    updates=st.integers(0, 2),
)
def test_an_optimizer_that_was_given_raises(use: str, updates: int) -> None:
    """A5: a ready optimizer that a state was made of raises, whatever is asked of it."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained(af.TrainState.create(model=model, optimizer=optimizer), updates)
    with pytest.raises(
        af.errors.OptimizerError, match=r"passed this .* to TrainState.create"
    ):
        (USES[use] if use in USES else lambda each: getattr(each, use))(optimizer)
    assert "Adam given to the state 'state'" in repr(optimizer)


@given(kind=st.sampled_from(sorted(MODELS)))
def test_a_refused_model_is_as_it_was(kind: str) -> None:
    """A5: where create raises, model and optimizer are the caller's, bitwise and in their modes."""
    SHARED["gelu"] = nn.GELU()
    model = made(kind)
    before, modes = copy.deepcopy(model), [each.training for each in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = af.chain(af.schedule_free())  # refused for this optimizer, last of all
    with pytest.raises(af.errors.Error):
        af.TrainState.create(model=model, optimizer=optimizer, setup=late)
    assert modes == [each.training for each in model.modules()]
    found, expected = model.state_dict(), before.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    optimizer.step()
    af.TrainState.create(model=model, optimizer=optimizer)


@given(kind=st.sampled_from(sorted(MODELS)), ready=st.booleans())
def test_what_was_given_keeps_nothing_alive(kind: str, ready: bool) -> None:
    """A5: the given objects have let go of their tensors, which are the state's alone."""
    SHARED["gelu"] = nn.GELU()
    model = made(kind)
    held = [weakref.ref(each) for each in model.parameters()]
    make = functools.partial(torch.optim.Adam, lr=0.1)
    optimizer = make(model.parameters()) if ready else make
    state = af.TrainState.create(model=model, optimizer=optimizer)
    assert [each() for each in held] == [None] * len(held)
    assert repr(model) != repr(state)
