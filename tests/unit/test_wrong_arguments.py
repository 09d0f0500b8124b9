# SPDX-License-Identifier: Apache-2.0
"""What a newcomer gives in a wrong place is named, with what was expected there."""

import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import testing
from accelfn.errors import (
    ArgumentError,
    BatchError,
    CallError,
    GradsError,
    LossError,
    ModelError,
    NonFiniteLossError,
    OptimizerError,
    RecordError,
    StateError,
    WorldError,
)
from accelfn.testing import simulate

X = torch.ones(8, 3)
sgd = partial(torch.optim.SGD, lr=0.1)


def loss_fn(net, batch):
    return net(batch).square().mean()


def create(setup=None, **changes):
    given = {
        "model": lambda: nn.Linear(3, 1),
        "optimizer": sgd,
        "data": af.Data(X, global_batch_size=4),
        "setup": setup,
        **changes,
    }
    if "world" not in given:
        given["world"] = af.World.single(device="cpu")
    return af.TrainState.create(**given)


step = af.make_step(loss_fn)
grads_of = af.value_and_grad(loss_fn)
TAKE_A_STATE = {
    "step": lambda value: step(value, X),
    "donate=False": lambda value: step(value, X, donate=False),
    "value_and_grad": lambda value: grads_of(value, X),
    "apply_grads": lambda value: af.apply_grads(value, None),
    "sync_grads": lambda value: af.sync_grads(value, None),
    "finalize": af.finalize,
    "build": af.prepare_engine,
    "release": af.release_engine,
    "batches": af.batches,
    "seek": lambda value: af.seek(value, 1),
    "eval_params": af.eval_params,
    "bind": lambda value: af.borrow_model(value).__enter__(),
    "frozen": af.snapshot_model,
    "rng": lambda value: af.fork_rng(value, "noise"),
    "save": lambda value: af.save(value, "nowhere"),
    "load": lambda value: af.load(value, "nowhere"),
    "evaluate": lambda value: af.evaluate(
        value, af.Data(X, global_batch_size=4), loss_fn
    ),
    "predict": lambda value: next(
        iter(af.predict(value, af.Data(X, global_batch_size=4), loss_fn))
    ),
}


@pytest.mark.parametrize("name", TAKE_A_STATE)
def test_what_takes_a_state_takes_nothing_else(name):
    """What a step returned, a batch, a function or a path is not taken for a state."""
    for value in (X, "state", step, None):
        shown = type(value).__name__
        with pytest.raises(ArgumentError, match=f"expected a TrainState, got {shown}"):
            TAKE_A_STATE[name](value)
    with pytest.raises(ArgumentError, match=r"state, metrics = step\(state, batch\)"):
        TAKE_A_STATE[name](step(create(), X))


class Wrapped(nn.parallel.DistributedDataParallel):
    """One without a group, which nobody asks it for."""

    def __init__(self):
        nn.Module.__init__(self)


def traced():
    """Return a model that torch.jit compiled, of which torch says that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return nn.Sequential(torch.jit.trace(nn.Linear(3, 1), X))


CREATE = {
    "a class": (
        {"model": nn.Linear},
        r"model=.*without arguments.*partial\(Linear, \.\.\.",
    ),
    "no list": (
        {"optimizer": lambda: None},
        r"optimizer=.*a list of \(name, parameter\)",
    ),
    "a scheduler's class": (
        {"schedule": torch.optim.lr_scheduler.StepLR},
        "expected a function of the update number.*from_torch",
    ),
    "a scheduler": (
        {"schedule": torch.optim.lr_scheduler.StepLR(sgd([nn.Parameter(X)]), 1)},
        r"from_torch\(factory\).*lr_scheduler\.StepLR",
    ),
    "a scheduler's factory": (
        {"schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
        r"from_torch\(factory\).*lr_scheduler\.StepLR",
    ),
    "a schedule of two arguments": (
        {"schedule": lambda update, warmup: update / warmup},
        r"schedule\(update\).*missing.*'warmup'.*partial",
    ),
    "two optimizers": (
        {"optimizer": [sgd([nn.Parameter(X)]), sgd([nn.Parameter(X)])]},
        r"optimizer=list.*af\.combine_optimizers",
    ),
    "wrapped by hand": (
        {"model": Wrapped},
        r"the plain module inside it.*af\.wrap_ddp",
    ),
    "compiled by torch.jit": (
        {"model": traced},
        r"model\.0 is a ScriptModule: pass the plain module.*torch\.jit.*af\.compile",
    ),
    "neighbours that there are not": (
        {"setup": af.local_sgd(sync_every=4, neighbours={2: 2})},
        r"local_sgd\(neighbours=\{2: 2\}\).*the 1 ranks .* cannot be divided",
    ),
    "a list": ({"setup": [af.ema(0.5)]}, r"af\.chain\(\*transforms\)"),
}


@pytest.mark.parametrize("case", CREATE)
def test_create_names_what_it_was_given(case):
    """Not what Python says of the call inside."""
    changes, said = CREATE[case]
    with pytest.raises(af.errors.Error, match=said):
        create(**changes)


def test_a_state_is_made_by_create():
    """Who calls the record itself is told so, and not its eight fields."""
    with pytest.raises(CallError, match=r"Write af\.TrainState\.create\(model=") as e:
        af.TrainState()
    assert "cursor=..." not in str(e.value)


def test_the_best_is_best_by_a_metric(tmp_path):
    """Without one nothing is kept for being best, whatever is said to be."""
    with pytest.raises(ArgumentError, match="no effect without keep_best="):
        af.CheckpointStore(tmp_path, best_is="max")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_best": 3}, r"keep_best=3\): expected the name of a metric"),
        (
            {"keep_best": ["loss"]},
            r"keep_best=\['loss'\]\): expected the name of a metric",
        ),
        ({"keep_best": "loss", "best_is": "low"}, r"best_is='low'.*\"min\" or \"max\""),
        (
            {"keep": 0},
            r"keep=0\): expected an integer of at least 1, or None to keep all",
        ),
        ({"every": timedelta()}, r"every=.*\): expected a number of updates, a timed"),
        ({"every": timedelta(seconds=-1)}, r"every=.*\): expected a number of updates"),
    ],
)
def test_what_a_store_cannot_follow_is_refused(tmp_path, options, said):
    """Before its directory is made, with the option and what it was given."""
    with pytest.raises(ArgumentError, match=said):
        af.CheckpointStore(tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_a_factory_of_a_model_is_none_of_an_optimizer():
    """What it raises says with what it was called."""
    with pytest.raises(AttributeError) as raised:
        create(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert "a list of (name, parameter)" in "\n".join(raised.value.__notes__)


def test_a_model_is_no_state():
    """Nor are its parameters, as others step them."""
    for value in (nn.Linear(3, 1), create().params):
        with pytest.raises(
            ArgumentError, match=r"Pass the state that TrainState\.create"
        ):
            step(value, X)


def test_a_batch_without_samples_is_named():
    with pytest.raises(NonFiniteLossError, match="for a batch without samples"):
        step(create(), X[:0])


def test_a_loop_that_loses_its_state_is_told_so():
    """It keeps the state that it had, which apply_grads did not get."""
    state = create()
    first, second = af.batches(state, until_epoch=1)
    grads_of(state, first)
    with pytest.raises(BatchError, match=r"state = af\.apply_grads\(state, grads\)"):
        grads_of(state, second)


def test_a_lent_module_is_not_frozen():
    """What is trained belongs to the state; a block may use it whole without gradients."""
    state = create()

    def freeze(*names, error=None):
        with af.borrow_model(state) as model:
            for name in names:
                model.get_parameter(name).requires_grad_(requires_grad=False)
            if error is not None:
                raise error

    with pytest.raises(StateError, match=r"requires_grad of bias.*with_trainable"):
        freeze("bias")
    freeze("bias", "weight")
    with pytest.raises(KeyError, match="mine"):
        freeze("bias", error=KeyError("mine"))


def test_a_transform_keeps_its_options():
    """It has no __init__ of its own, and what it remembers is its slot."""
    with pytest.raises(RecordError, match=r"cannot set its decay.*its slot"):
        af.ema(0.5).decay = 0.9
    body = {"__init__": lambda self, scale: setattr(self, "scale", scale)}
    with pytest.raises(
        ArgumentError, match=r"Scaled must not define __init__.*scale: float"
    ):
        af.transform(type("Scaled", (), body))


def test_what_ranks_call_takes_a_world():
    """A function without it is refused before a rank begins; a call that cannot be, too."""
    with pytest.raises(ArgumentError, match=r"fn\(world\).*too many"):
        simulate(2, lambda: 1)
    with pytest.raises(ArgumentError, match=r"check_step\(states=.*a function of a w"):
        testing.check_step(step, states=create_nothing)
    with pytest.raises(ArgumentError, match=r"check_resume\(make\).*a function of a w"):
        testing.check_resume(create_nothing, 2)
    with pytest.raises(CallError, match=r"Write testing\.check_step\(step, states="):
        testing.check_step(step)
    with pytest.raises(
        CallError, match="no argument schedules=; did you mean schedule="
    ):
        simulate(2, print, schedules=[0])


def create_nothing():
    """Take no world."""


def test_a_torch_scheduler_would_have_no_effect():
    """It would set the rate of an optimizer that trains no more."""
    net = nn.Linear(3, 1)
    optimizer = sgd(net.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(OptimizerError, match="from_torch"):
        create(model=net, optimizer=optimizer)


def test_a_schedule_needs_a_rate():
    class Rateless(torch.optim.Optimizer):
        def __init__(self, named):
            super().__init__(named, {"speed": 0.1})

        def step(self, closure=None):
            del closure

    with pytest.raises(OptimizerError, match="set 'lr', .* only 'speed'"):
        create(optimizer=Rateless, schedule=af.schedules.constant())


def transform_of(**methods):
    """Return a transform with methods that return something."""

    def returning(value):
        def method(self, *given):
            del self, given
            return value

        return method

    body = {name: returning(value) for name, value in methods.items()}
    return af.transform(type("Wrong", (), body))()


def a_round(state):
    """Use all of a setup."""
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)
        break
    af.eval_params(state)
    af.finalize(state)


@pytest.mark.parametrize("value", [None, "x", 3.5j, ("x", None)])
@pytest.mark.parametrize(
    "name",
    [
        *("data", "loss", "value_and_grad", "hyper", "eval_params"),
        *("module", "grads", "after_update", "finalize"),
    ],
)
def test_what_a_transform_returns_is_looked_at(name, value):
    """A method that forgot its return is named, with what it is to return."""
    wrong = transform_of(**{name: value})
    with pytest.raises(ArgumentError, match=rf"Wrong\(\)\.{name} returned .*expected"):
        a_round(create(wrong))


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), "x", None])
def test_a_rate_is_a_finite_number(rate):
    """One that is none would make the parameters what no later step can mend."""
    state = create(transform_of(hyper=({"lr": rate}, None)))
    before = state.params["weight"].clone()
    with pytest.raises(OptimizerError, match="for 'lr'; expected a finite number"):
        step(state, X)
    assert torch.equal(state.params["weight"], before)


@pytest.mark.parametrize("retain", [False, True])
def test_the_backward_pass_is_the_step_s(retain):
    """A loss function that runs one of its own would have its gradients counted twice."""

    def eager(net, batch):
        loss = loss_fn(net, batch)
        loss.backward(retain_graph=retain)
        return loss

    state = create()
    with pytest.raises(LossError, match=r"Remove loss\.backward\(\)"):
        af.make_step(eager)(state, X)
    after, _ = step(state, X)
    expected, _ = step(create(), X)
    assert torch.equal(after.params["weight"], expected.params["weight"])


def test_a_number_has_one_name():
    """What the loss reports is not overwritten by what a transform does."""
    state = create(af.clip_grad_norm(1.0))
    with pytest.raises(LossError, match="both report a metric 'grad_norm'"):
        af.make_step(lambda net, x: af.Loss(net(x).sum(), 8, grad_norm=3.0))(state, X)


def test_other_things_that_are_not_what_they_are_taken_for():
    with pytest.raises(ArgumentError, match="A setup takes a TrainState"):
        af.ema(0.9)(af.World.single(device="cpu"))
    with pytest.raises(ArgumentError, match="expected a class"):
        af.transform(loss_fn)
    with pytest.raises(ArgumentError, match=r"Metrics.*expected \(total, weight\)"):
        af.Metrics({"a": "x"})
    with pytest.raises(ArgumentError, match="the path of a directory"):
        af.save(create(), None)


def test_a_simulated_rank_has_its_world():
    """A test that forgets to pass it on would test nothing, and pass."""
    with pytest.raises(WorldError, match="Use the World that you"):
        simulate(2, lambda _: create(world=None))
    with pytest.raises(WorldError, match="Use the World that you"):
        simulate(2, lambda _: af.World.single())


def test_what_is_made_in_inference_mode_can_be_trained():
    """Slots and teachers are ordinary tensors, whatever the caller's mode."""
    with torch.inference_mode():
        state = create(af.ema(0.5))
        teacher = af.snapshot_model(state, at="eval")
    state, _ = step(state, X)
    af.make_step(lambda net, x: (net(x) * teacher(x)).mean())(state, X)


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_sparse_gradients_are_looked_at(value):
    """One rank may have them, and an update is skipped for their values as for others'."""
    state = create(
        af.skip_nonfinite(), model=lambda: nn.Embedding(4, 2, sparse=True), data=None
    )
    step = af.make_step(lambda net, ids: net(ids).sum() * value)
    state, metrics = step(state, torch.tensor([0, 0, 1]))
    is_finite = value == 1
    assert (state.step, state.num_skipped) == (is_finite, not is_finite)
    assert metrics["skipped"] == (not is_finite)


def test_sparse_gradients_are_refused_by_name():
    """They lie in no bucket, and in no flat vector."""
    ids = torch.tensor([0, 1])

    def train(world, *setup, by_hand=False):
        state = create(
            af.chain(*setup),
            model=lambda: nn.Embedding(4, 2, sparse=True),
            data=None,
            world=world,
        )
        compute = af.value_and_grad(lambda net, x: net(x).sum(1).mean())
        _, grads = compute(state, ids)
        if by_hand:
            af.sync_grads(state, grads)

    with pytest.raises(GradsError, match="weight are sparse"):
        simulate(2, partial(train, by_hand=True))
    setup = af.wrap_ddp(), af.compress_grads("fp16")
    with pytest.raises(ModelError, match="weight are sparse"):
        simulate(2, lambda world: train(world, *setup))


def test_a_refused_step_leaves_no_plan():
    """Under optimizer_in_backward a step that was refused does not train later."""
    state = create(af.optimizer_in_backward())
    batch = next(iter(af.batches(state)))
    state, _ = step(state, batch)
    with pytest.raises(BatchError):
        step(state, batch)
    before = state.params["weight"].clone()
    with pytest.raises(GradsError):
        grads_of(state, X)
    assert torch.equal(state.params["weight"], before)
