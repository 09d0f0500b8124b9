# SPDX-License-Identifier: Apache-2.0
"""What a newcomer gives in a wrong place is rejected, with what was expected there."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import accelfn as af
from accelfn import errors, testing
from accelfn.errors import ArgumentError, CallError
from accelfn.testing import simulate
from tests.laws.worlds import single
from tests.states import SGD, STEP, square
from tests.states import create as create_state

X = torch.ones(8, 3)
DATA = af.Data(X, global_batch_size=4)
GRADS_OF = af.value_and_grad(square)


def create(setup=None, **changes):
    given = {"model": lambda: nn.Linear(3, 1), "data": DATA}
    return create_state(setup=setup, **{**given, **changes})


TAKE_A_STATE = {
    "step": lambda value: STEP(value, X),
    "donate=False": lambda value: STEP(value, X, donate=False),
    "value_and_grad": lambda value: GRADS_OF(value, X),
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
    "evaluate": lambda value: af.evaluate(value, DATA, square),
    "predict": lambda value: next(iter(af.predict(value, DATA, square))),
    "agree": af.assert_replicas_agree,
}


@pytest.mark.parametrize("name", TAKE_A_STATE)
def test_what_takes_a_state_takes_nothing_else(name):
    """What a step returned, a batch, a function, a module or a path is not taken for a state."""
    for value in (X, "state", STEP, None, nn.Linear(1, 1)):
        words = f"expected a TrainState, got {type(value).__name__}"
        with pytest.raises(ArgumentError, match=words):
            TAKE_A_STATE[name](value)
    with pytest.raises(ArgumentError, match=r"state, metrics = step\(state, batch\)"):
        TAKE_A_STATE[name](STEP(create(), X))


class Wrapped(nn.parallel.DistributedDataParallel):
    """One without a group, which nobody asks it for."""

    def __init__(self):
        nn.Module.__init__(self)


def traced():
    """Return a model that torch.jit compiled, of which torch says that it is deprecated."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return nn.Sequential(torch.jit.trace(nn.Linear(3, 1), X))


class Rateless(torch.optim.Optimizer):
    def __init__(self, named):
        super().__init__(named, {"speed": 0.1})

    def step(self, closure=None):
        del closure


def scheduled():
    """Return an instance of an optimizer for which torch's scheduler was created."""
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters())
    StepLR(optimizer, 1)
    return {"model": model, "optimizer": optimizer}


STEP_LR = r"from_torch\(factory\).*lr_scheduler\.StepLR"
INTEGER = "seed=.*integer"
CREATE = [
    ({"model": nn.Linear}, r"model=.*without arguments.*partial\(Linear, \.\.\."),
    ({"optimizer": lambda: None}, r"optimizer=.*a list of \(name, parameter\)"),
    ({"schedule": StepLR}, "expected a function of the update number.*from_torch"),
    ({"schedule": StepLR(SGD([nn.Parameter(X)]), 1)}, STEP_LR),
    ({"schedule": partial(StepLR, step_size=1)}, STEP_LR),
    (
        {"schedule": lambda update, warmup: update / warmup},
        r"schedule\(update\).*missing.*'warmup'.*partial",
    ),
    (
        {"optimizer": [SGD([nn.Parameter(X)]), SGD([nn.Parameter(X)])]},
        r"optimizer=list.*af\.combine_optimizers",
    ),
    ({"model": Wrapped}, r"the plain module inside it.*af\.wrap_ddp"),
    (
        {"model": traced},
        r"model\.0 is a ScriptModule: pass the plain module.*torch\.jit.*af\.compile",
    ),
    (
        {"setup": af.local_sgd(sync_every=4, neighbours={2: 2})},
        r"local_sgd\(neighbours=\{2: 2\}\).*the 1 ranks .* cannot be divided",
    ),
    ({"setup": [af.ema(0.5)]}, r"af\.chain\(\*transforms\)"),
    (scheduled(), "from_torch"),
    (
        {"optimizer": Rateless, "schedule": af.schedules.constant()},
        "set 'lr', .* only 'speed'",
    ),
    ({"seed": "0"}, INTEGER),
    ({"seed": 1.0}, INTEGER),
    ({"seed": True}, INTEGER),
    ({"seed": None}, INTEGER),
    ({"schedule": "cosine"}, r"schedule='cosine'.*af\.schedules"),
    ({"data": [X]}, r"data=list.*af\.Data"),
    ({"data": X}, r"data=Tensor.*af\.Data"),
    ({"world": 2}, "world=2"),
]


@pytest.mark.parametrize(("changes", "words"), CREATE)
def test_create_names_what_it_was_given(changes, words):
    """Not what Python says of the call inside."""
    with pytest.raises(errors.Error, match=words):
        create(**changes)


STATE = r"Pass the state that TrainState\.create"
WORLD = "Use the World that you"
REJECTED = {
    ArgumentError: [
        (lambda: STEP(nn.Linear(3, 1), X), STATE),
        (lambda: STEP(create().params, X), STATE),
        (
            lambda: af.transform(OwnInit),
            r"OwnInit must not define __init__.*scale: float",
        ),
        (lambda: simulate(2, lambda: 1), r"fn\(world\).*too many"),
        (
            lambda: testing.check_step(STEP, states=create_nothing),
            r"check_step\(states=.*a function of a w",
        ),
        (
            lambda: testing.check_resume(create_nothing, 2),
            r"check_resume\(make\).*a function of a w",
        ),
        (lambda: af.ema(0.9)(single()), "A setup takes a TrainState"),
        (lambda: af.transform(square), "expected a class"),
        (lambda: af.save(create(), None), "the path of a directory"),
        (lambda: af.make_step(nn.CrossEntropyLoss), "a loss function of torch"),
        (lambda: af.make_step(3), "model, batch"),
        (lambda: af.value_and_grad(3), "model, batch"),
    ],
    CallError: [
        (lambda: testing.check_step(STEP), r"Write testing\.check_step\(step, states="),
        (
            lambda: simulate(2, print, schedules=[0]),
            "no argument schedules=; did you mean schedule=",
        ),
    ],
    errors.LossError: [
        (
            lambda: af.make_step(reports_norm)(create(af.clip_grad_norm(1.0)), X),
            "both report a metric 'grad_norm'",
        )
    ],
    errors.WorldError: [  # a test that forgets to pass its world on would test nothing
        (lambda: simulate(2, lambda _: create(world=None)), WORLD),
        (lambda: simulate(2, lambda _: af.World.single()), WORLD),
    ],
    errors.NonFiniteLossError: [
        (lambda: STEP(create(), X[:0]), "for a batch without samples")
    ],
    errors.RecordError: [
        (lambda: setattr(af.ema(0.5), "decay", 0.9), r"cannot set its decay.*its slot")
    ],
    errors.StateError: [
        (lambda: af.borrow_model(create())(X), "Write `with af.borrow_model")
    ],
    errors.DataError: [
        (
            lambda: af.Data((X.tolist(), [0] * 8), global_batch_size=4),
            r"torch\.tensor\(inputs\)",
        )
    ],
    errors.Error: [
        (lambda: create().with_slot(3, 1), "with_slot"),
        (lambda: create().with_slot(None, 1), "with_slot"),
    ],
}


class OwnInit:
    def __init__(self, scale):
        self.scale = scale


def reports_norm(net, x):
    return af.Loss(net(x).sum(), 8, grad_norm=3.0)


def create_nothing():
    """Take no world."""


@pytest.mark.parametrize("error", REJECTED)
def test_wrong_arguments_are_rejected(error):
    """By the function that was called, before anything is computed."""
    for call, words in REJECTED[error]:
        with pytest.raises(error, match=words):
            call()


def test_a_factory_of_a_model_is_none_of_an_optimizer():
    """What it raises says with what it was called."""
    with pytest.raises(AttributeError) as raised:
        create(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert "a list of (name, parameter)" in "\n".join(raised.value.__notes__)


def test_a_loop_that_loses_its_state_is_told_so():
    """It keeps the state that it had, which apply_grads did not get."""
    state = create()
    first, second = af.batches(state, until_epoch=1)
    GRADS_OF(state, first)
    words = r"state = af\.apply_grads\(state, grads\)"
    with pytest.raises(errors.BatchError, match=words):
        GRADS_OF(state, second)


def test_a_lent_module_is_not_frozen():
    """What is trained belongs to the state; a block may use it whole without gradients."""
    state = create()

    def freeze(*names, error=None):
        with af.borrow_model(state) as model:
            for name in names:
                model.get_parameter(name).requires_grad_(requires_grad=False)
            if error is not None:
                raise error

    with pytest.raises(
        errors.StateError, match=r"requires_grad of bias.*with_trainable"
    ):
        freeze("bias")
    freeze("bias", "weight")
    with pytest.raises(KeyError, match="mine"):
        freeze("bias", error=KeyError("mine"))


def transform_of(**methods):
    body = {name: lambda *_, found=found: found for name, found in methods.items()}
    return af.transform(type("Wrong", (), body))()


FIELDS = (
    *("data", "loss", "value_and_grad", "hyper", "eval_params"),
    *("module", "grads", "after_update", "finalize"),
)


@pytest.mark.parametrize("value", [None, "x", 3.5j, ("x", None)])
@pytest.mark.parametrize("name", FIELDS)
def test_what_a_transform_returns_is_looked_at(name, value):
    """A method that forgot its return is named, with what it is to return."""

    def train():
        state = create(transform_of(**{name: value}))
        state, _ = STEP(state, next(iter(af.batches(state))))
        af.eval_params(state)
        af.finalize(state)

    with pytest.raises(ArgumentError, match=rf"Wrong\(\)\.{name} returned .*expected"):
        train()


@pytest.mark.parametrize("rate", [math.nan, math.inf, "x", None])
def test_a_rate_is_a_finite_number(rate):
    """One that is none would make the parameters what no later step can mend."""
    state = create(transform_of(hyper=({"lr": rate}, None)))
    before = state.params["weight"].clone()
    words = "for 'lr'; expected a finite number"
    with pytest.raises(errors.OptimizerError, match=words):
        STEP(state, X)
    assert torch.equal(state.params["weight"], before)


@pytest.mark.parametrize("rate", [math.nan, math.inf, torch.tensor(math.nan)])
@pytest.mark.parametrize("first", [True, False])
def test_a_rate_that_is_no_number_is_refused(rate, first):
    """In any group, also of one part of several optimizers."""

    def groups(named):
        rates = (rate, 0.1) if first else (0.1, rate)
        pairs = zip(named, rates, strict=True)
        return torch.optim.Adam([{"params": [p], "lr": lr} for (_, p), lr in pairs])

    for optimizer in (groups, af.combine_optimizers((lambda *_: True, groups))):
        words = r"lr=(nan|inf) in parameter group"
        with pytest.raises(errors.OptimizerError, match=words):
            create(optimizer=optimizer)


@pytest.mark.parametrize("retain", [False, True])
def test_the_backward_pass_is_the_step_s(retain):
    """A loss function that runs one of its own would have its gradients counted twice."""

    def eager(net, batch):
        loss = square(net, batch)
        loss.backward(retain_graph=retain)
        return loss

    state = create()
    with pytest.raises(errors.LossError, match=r"Remove loss\.backward\(\)"):
        af.make_step(eager)(state, X)
    after, _ = STEP(state, X)
    expected, _ = STEP(create(), X)
    assert torch.equal(after.params["weight"], expected.params["weight"])


def test_what_is_made_in_inference_mode_can_be_trained():
    """Slots and teachers are ordinary tensors, whatever the caller's mode."""
    with torch.inference_mode():
        state = create(af.ema(0.5))
        teacher = af.snapshot_model(state, at="eval")
    state, _ = STEP(state, X)
    af.make_step(lambda net, x: (net(x) * teacher(x)).mean())(state, X)


EMBEDDING = {"model": partial(nn.Embedding, 4, 2, sparse=True), "data": None}


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_sparse_gradients_are_looked_at(value):
    """One rank may have them, and an update is skipped for their values as for others'."""
    state = create(af.skip_nonfinite(), **EMBEDDING)
    step = af.make_step(lambda net, ids: net(ids).sum() * value)
    state, metrics = step(state, torch.tensor([0, 0, 1]))
    is_finite = value == 1
    assert (state.step, state.num_skipped) == (is_finite, not is_finite)
    assert metrics["skipped"] == (not is_finite)


def test_sparse_gradients_are_refused_by_name():
    """They lie in no bucket, and in no flat vector."""

    def train(world, *setup, by_hand=False):
        state = create(af.chain(*setup), **EMBEDDING, world=world)
        compute = af.value_and_grad(lambda net, x: net(x).sum(1).mean())
        _, grads = compute(state, torch.tensor([0, 1]))
        if by_hand:
            af.sync_grads(state, grads)

    with pytest.raises(errors.GradsError, match="weight are sparse"):
        simulate(2, partial(train, by_hand=True))
    with pytest.raises(errors.ModelError, match="weight are sparse"):
        simulate(
            2, lambda world: train(world, af.wrap_ddp(), af.compress_grads("fp16"))
        )


def test_a_refused_step_leaves_no_plan():
    """Under optimizer_in_backward a step that was refused does not train later."""
    state = create(af.optimizer_in_backward())
    batch = next(iter(af.batches(state)))
    state, _ = STEP(state, batch)
    with pytest.raises(errors.BatchError):
        STEP(state, batch)
    before = state.params["weight"].clone()
    with pytest.raises(errors.GradsError):
        GRADS_OF(state, X)
    assert torch.equal(state.params["weight"], before)


def test_inputs_and_targets_are_no_two_micro_batches():
    """A list of both, as torch's DataLoader gives it, is told from a list of two batches."""
    inputs = torch.ones(4, 3)
    state = create(af.accumulate(num_micro_batches=2))
    for targets in (torch.ones(4), torch.ones(4, 1, dtype=torch.int64)):
        with pytest.raises(errors.BatchError, match=r"of different kinds.*\(4, 3\)"):
            STEP(state, [inputs, targets])
    STEP(state, [inputs, inputs[:1]])


def test_a_schedule_below_zero_is_refused():
    """It would climb, where it goes on behind its end."""
    state = create(schedule=lambda update: 1 - update / 2)
    for _ in range(3):
        state, _ = STEP(state, X)
    with pytest.raises(
        ArgumentError, match=r"returned -0\.5 for update 3\. .* 0 or more"
    ):
        STEP(state, X)


def test_a_barrier_in_main_first_does_not_let_the_others_in():
    """The others wait for the end of the block, and another call is another."""

    def fn(world):
        with af.main_first(world):
            af.barrier(world)

    with pytest.raises(errors.CollectiveMismatchError, match="main_first"):
        simulate(2, fn)


@pytest.mark.parametrize("sizes", [2, [], [0], "12", [True]])
def test_numbers_of_ranks_are_asked_for(sizes):
    """Wherever a law is tried in worlds of several sizes."""

    def make(world):
        return create(world=world), lambda state, _: (state, {})

    tried = (
        lambda: testing.check_resume(make, 1, sizes=sizes),
        lambda: testing.check_transform(af.ema(0.5), sizes=sizes),
        lambda: testing.check_step(make, states=lambda w: make(w)[0], sizes=sizes),
        lambda: testing.assert_equivalent(af.ema(0.5), af.ema(0.5), sizes=sizes),
    )
    for call in tried:
        with pytest.raises(ArgumentError, match="expected numbers of ranks"):
            call()


def test_directories_by_rank_are_refused_at_once(tmp_path):
    """By a store that writes behind the training's back, too, where ranks agree by files."""

    def fn(world):
        store = af.CheckpointStore(tmp_path / f"rank{world.rank}")
        store.save(create(world=world, setup=af.shard_data()))

    words = r"does not exist on this rank.* Use one"
    with pytest.raises(errors.CheckpointWriteError, match=words):
        simulate(2, fn)


def test_a_step_is_saved_once(tmp_path):
    """A store says that it has it, and nothing of a directory of another name."""
    with af.CheckpointStore(tmp_path) as store:
        store.save(create())
        words = "has a checkpoint of this step"
        with pytest.raises(errors.CheckpointWriteError, match=words):
            store.save(create())
        assert store.steps == (0,)
