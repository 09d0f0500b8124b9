# SPDX-License-Identifier: Apache-2.0
"""Transforms: values that are compared, printed, composed and refused; modules and slots."""

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, CompositionError, ModelError
from accelfn.testing import simulate
from tests.states import STEP, create, linear_state

ALL = (
    af.shard_data(),
    af.wrap_ddp(),
    af.autocast("bf16"),
    af.accumulate(num_micro_batches=4),
    af.clip_grad_norm(1.0, norm_type=1.0),
    af.clip_grad_value(0.5),
    af.ema(0.9),
    af.identity(),
)


NONE = [
    (af.shard_data, r"argument 1 .*Write"),
    (af.ema, r"argument 1 .*Write"),
    (af.chain, r"argument 1 .*Write"),
    ("autocast", r"argument 1 .*not a transform"),
    (3, r"argument 1 .*not a transform"),
    ([af.identity()], r"argument 1 .*not a transform"),
    (lambda state: state, r"argument 1 .*not a transform"),
]


@pytest.mark.parametrize(("given", "words"), NONE)
def test_no_transform(given, words):
    """A class, or anything else, in place of a value is refused with its position."""
    with pytest.raises(CompositionError, match=words):
        af.chain(af.identity(), given)
    with pytest.raises(CompositionError, match="not a transform"):
        linear_state(setup=given)


def test_two_of_one_kind():
    """Under names of their own they are fine, but for engines and ways to reduce."""
    assert len(af.chain(af.ema(0.9), af.ema(0.99, name="slow"))) == 2
    with pytest.raises(CompositionError, match=r"two engines.*wrap_ddp.*Keep one") as e:
        af.chain(af.wrap_ddp(), af.wrap_ddp(name="other"))
    assert isinstance(e.value, ValueError)
    with pytest.raises(CompositionError, match="two ways to reduce"):
        af.chain(af.local_sgd(sync_every=2), af.local_sgd(sync_every=3, name="b"))


CLASSES = [
    ({"__init__": lambda self, scale: setattr(self, "scale", scale)}, "__init__"),
    ({"grad": lambda _, grads, slot: (grads, slot)}, r"\.grad .*Did you mean 'grads'"),
    ({"grads": lambda _, grads: grads}, r"\.grads.*grads, slot, update"),
]


@pytest.mark.parametrize(("body", "words"), CLASSES)
def test_a_class_that_is_refused_stays_as_it_was(body, words):
    """What is wrong with it is found before anything of it is changed; helpers have a _."""
    cls = type("Scaled", (), body)
    before = dict(vars(cls))
    with pytest.raises(ArgumentError, match=f"Scaled.*{words}"):
        af.transform(cls)
    assert before == dict(vars(cls))
    af.transform(type("Scaled", (), {f"_{name}": each for name, each in body.items()}))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", 3, None])
def test_name_of_a_transform(name):
    """A name that cannot name a slot in a checkpoint is refused."""
    with pytest.raises(ArgumentError, match=r"name=.*letters"):
        af.identity(name=name)


def test_explain_prints_the_nested_calls(capsys):
    """`explain` shows the calls of a step, with each transform at its place in them."""
    af.chain(*ALL).explain()
    assert (
        capsys.readouterr().out
        == """\
step(state, batch):
    plan = accumulate.data(shard_data.data(plan))  # who takes which samples
    metrics, grads = accumulate.value_and_grad(value_and_grad(autocast.loss(loss_fn)))(state, batch)
    # engine: wrap_ddp; gradients averaged over ranks
    grads = clip_grad_value.grads(clip_grad_norm.grads(grads / weight))
    hyper = schedule(state.step)
    state = optimizer(state, grads, hyper)
    state = ema.after_update(state)
"""
    )


@af.transform
class Adds:
    def reduce(self, grads, slot, update):
        return grads, slot


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (af.chain(), "not reduced over ranks"),
        (af.wrap_ddp(), "averaged over ranks"),
        (af.local_sgd(sync_every=2), "not reduced over ranks: local_sgd"),
        (Adds(), "reduced over ranks: adds"),
    ],
)
def test_explain_says_how_gradients_cross(setup, words, capsys):
    """By whom they are reduced, or that they stay each rank's own."""
    af.chain(setup).explain()
    assert f"; gradients {words}\n" in capsys.readouterr().out


def test_a_class_may_say_what_its_slot_is_called():
    """A default of `name` in its body holds; of a class made of it, that class's own name."""

    @af.transform
    class Counting:
        step: int = 1
        name: str = "count"

    @af.transform
    class CountingTwice(Counting):
        more: int = 2

    assert [Counting().name, Counting(2).name, Counting(name="a").name] == [
        "count",
        "count",
        "a",
    ]
    assert repr(Counting(2)) == "Counting(2)"
    assert CountingTwice().name == "counting_twice"
    with pytest.raises(ArgumentError, match="'no slot'"):
        af.transform(
            type("Bad", (), {"__annotations__": {"name": str}, "name": "no slot"})
        )()


def trained(setup: Any, size: int) -> list[dict[str, torch.Tensor]]:
    """Return each rank's parameters and running statistics after two updates."""
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def rank(world):
        model = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # noqa: E731
        setups = af.chain(af.shard_data(), af.wrap_ddp(), setup)
        data = af.Data(rows, global_batch_size=8)
        state = create(model=model, data=data, setup=setups, world=world)
        for batch in af.batches(state, until_epoch=2):
            state, _ = STEP(state, batch)
        return {**state.params, **state.buffers}

    return list(simulate(size, rank))


def test_a_module_may_be_put_around_one():
    """What the loss is given is what the last transform returned."""
    seen = []

    @af.transform
    class Named:
        word: str

        def module(self, module, state):
            module.register_forward_pre_hook(lambda *_: seen.append(self.word))
            return module

    trained(af.chain(Named("first", name="one"), Named("second", name="two")), 1)
    assert seen == ["first", "second"] * 2


def copied(module):
    return copy.deepcopy(module)


def with_buffer(module):
    module.register_buffer("extra", torch.zeros(1))
    return module


def with_parameter(module):
    module.extra = nn.Parameter(torch.ones(1))
    return module


@pytest.mark.parametrize("act", [copied, with_buffer, with_parameter])
def test_another_module_is_refused(act):
    """The optimizer steps the parameters that the engine has; what is added nobody saves."""

    @af.transform
    class Changes:
        def module(self, module, state):
            return act(module)

    said = "returned a module with other" if act is copied else ".*these: extra"
    with pytest.raises(ModelError, match=rf"Changes\(\).module {said}"):
        trained(Changes(), 1)


@af.transform
class Keeps:
    """Keeps in its slot what a state holds, as one field sees it from some call on."""

    field: str
    part: str
    first: int
    is_copied: bool

    def init(self, state):
        return self._slot("init", state, {"calls": -1})

    def grads(self, grads, slot, update):
        return grads, self._slot("grads", update.state, slot)

    def hyper(self, hyper, slot, update):
        return {}, self._slot("hyper", update.state, slot)

    def after_update(self, state, slot, update):
        return state, self._slot("after_update", state, slot)

    def finalize(self, state, slot, update):
        return state, self._slot("finalize", state, slot)

    def _slot(self, field, state, slot):
        if field not in (self.field, "init"):
            return slot
        calls, held = slot["calls"] + 1, {}
        if field == self.field and (field == "init" or calls >= self.first):
            held = {
                n: self._kept(each) for n, each in getattr(state, self.part).items()
            }
        return {"calls": calls, "held": held}

    def _kept(self, each):
        if not isinstance(each, torch.Tensor):
            return {name: self._kept(inner) for name, inner in each.items()}
        return each.clone() if self.is_copied else each


@given(
    field=st.sampled_from(["init", "grads", "hyper", "after_update", "finalize"]),
    part=st.sampled_from(["params", "buffers", "opt_state"]),
    first=st.integers(1, 3),
    is_copied=st.booleans(),
)
def test_a_slot_of_the_state_s_own_tensors_is_refused(field, part, first, is_copied):
    """The update after it would change what the slot is to remember; copies are as they were."""
    keeps = Keeps(field, part=part, first=first, is_copied=is_copied)
    own = part != "opt_state" or field != "init"  # no optimizer has any yet

    def train():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
        state = create(model=model, optimizer=momentum, setup=keeps)
        for _ in range(6):
            state, _ = STEP(state, torch.randn(4, 2))
        for _ in range(4):
            state = af.finalize(state)

    if is_copied or not own:
        train()
    else:
        with pytest.raises(af.errors.StateError, match=r"Keeps\(.*itself, not a copy"):
            train()


def test_a_slot_may_have_what_no_update_writes():
    """A frozen parameter is the same ever after."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)

    @af.transform
    class Frozen:
        def init(self, state):
            return {"0.weight": state.params["0.weight"]}

    create(model=model, setup=Frozen())


WRITTEN = """
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
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
    return torch.nn.Linear(2, 1, bias=False)


def optimizer(params: Absent) -> Absent:
    return Descent(params, lr=0.5)


def loss_fn(model: Absent, batch: Absent) -> Absent:
    return model(batch).sum()


def kept(name: Absent, parameter: Absent) -> Absent:
    return True


def train() -> Absent:
    schedule = af.schedules.from_torch(partial(Slower, step_size=1))
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
    """Functions and methods do what they say; options are shown, and wrong methods named."""
    assert written["train"]().tolist() == [[1.0, 1.0]]
    scale = written["Scale"]
    assert repr(scale(2, offset=1, name="other")) == (
        "Scale(2, offset=1, name='other')"
    )
    with pytest.raises(af.errors.CallError, match="no argument rows="):
        scale(2, rows=1)
    with pytest.raises(af.errors.ArgumentError, match="Wrong.grads: accelfn calls"):
        exec(written["wrong"], written)  # noqa: S102


def test_a_class_of_transforms_prints_its_name():
    """Hypothesis prints the class, where a test draws classes, and the transform as code."""
    assert pretty(af.ema) == "ema"
    assert pretty(af.ema(0.9)) == "af.ema(0.9)"
