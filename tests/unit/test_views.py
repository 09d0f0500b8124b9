# SPDX-License-Identifier: Apache-2.0
"""`bind`, `frozen`, `eval_params` and `rng`: what a state lends."""

import math
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import accelfn as af
from accelfn.errors import ArgumentError, CallError, LossError, StateError
from accelfn.testing import simulate
from tests.states import bits

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


STEP = af.make_step(lambda model, batch: model(batch).square().mean())


def make(**options):
    """Return a state one update old."""
    state = af.TrainState.create(
        model=net, optimizer=partial(torch.optim.SGD, lr=0.1), **options
    )
    return STEP(state, X)[0]


def test_bound_module_holds_the_state():
    """A lent module has the state's tensors, in training mode, with gradients."""
    state = make()
    with af.borrow_model(state) as model:
        assert bits(state.params) == bits(dict(model.named_parameters()))
        assert bits(state.buffers) == bits(dict(model.named_buffers()))
        assert model.training
        assert all(param.requires_grad for param in model.parameters())


def test_bound_module_is_never_the_engines():
    """Hooks and modes set on a lent module do not reach a step."""
    state, witness = make(), make()
    with af.borrow_model(state) as model:
        model.eval().requires_grad_(requires_grad=False)
        model[0].register_forward_hook(lambda *_: torch.zeros(8, 4))
    assert bits(STEP(witness, X)[0].params) == bits(STEP(state, X)[0].params)


def test_written_into_a_bound_module():
    """What is written into a lent parameter is written into the state."""
    state = make()
    with af.borrow_model(state) as model, torch.no_grad():
        model[0].bias.fill_(3.0)
    assert state.params["0.bias"].tolist() == [3.0] * 4


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_after_the_block_it_is_empty(error):
    """After the block the module holds nothing, and the state all it had."""
    state = make()
    before = bits(state.params), bits(state.buffers)
    with suppress(ZeroDivisionError), af.borrow_model(state) as model:
        if error:
            raise error
    left = [*model.parameters(), *model.buffers()]
    assert {(0, 0)} == {(t.numel(), t.untyped_storage().nbytes()) for t in left}
    assert before == (bits(state.params), bits(state.buffers))


def test_evaluated_parameters():
    """`eval_params` are the average under `ema`, and the state's own without."""
    state = make(setup=af.ema(0.5))
    average = bits(af.eval_params(state))
    assert bits(state.slots["ema"]) == average != bits(state.params)
    with af.borrow_model(state, at="eval") as model:
        assert average == bits(dict(model.named_parameters()))
    assert average == bits(dict(af.snapshot_model(state, at="eval").named_parameters()))
    raw = af.snapshot_model(state, at="train")
    assert bits(state.params) == bits(dict(raw.named_parameters()))
    plain = make()
    assert bits(plain.params) == bits(af.eval_params(plain))


SPLITS = {
    "dp_shard": af.wrap_fsdp(),
    "tp": af.tensor_parallel({"0": "column", "1": "row"}),
    "cp": af.context_parallel(seq_dim=1),
}


@pytest.mark.parametrize(
    "axes",
    [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 2}],
)
@pytest.mark.parametrize("shared", [False, True])
def test_rng_is_that_of_whose_batch_it_is(axes, shared):
    """Ranks that share a batch draw alike, others apart, unless all share what is drawn."""
    setup = af.chain(af.shard_data(), *(SPLITS[axis] for axis in axes))

    def draw(world):
        state = af.TrainState.create(
            model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            optimizer=torch.optim.SGD,
            world=world,
            setup=setup,
        )
        with af.fork_rng(state, "latents", shared=shared):
            return world.batch.rank, torch.rand(2).tolist()

    size = math.prod(axes.values())
    found = simulate(size, draw, axes=axes).results
    for batch, drawn in found:
        for other, others in found:
            assert (drawn == others) == (shared or batch == other)


@pytest.mark.parametrize("purpose", ["", None])
def test_rng_has_a_purpose(purpose):
    """What the draws are for is a word."""
    with pytest.raises(ArgumentError, match=r"purpose.*non-empty string"):
        af.fork_rng(make(), purpose)


def test_which_parameters_is_asked_where_they_differ():
    """Under `ema` nothing guesses which ones a lent module is to hold."""
    state = make(setup=af.ema(0.5))
    with pytest.raises(
        ArgumentError, match=r"ema\(0.5\) the parameters for evaluation differ"
    ):
        af.borrow_model(state).__enter__()
    for at, params in (("train", state.params), ("eval", af.eval_params(state))):
        with af.borrow_model(state, at=at) as model:
            assert bits(params) == bits(dict(model.named_parameters()))
    plain = make()
    with af.borrow_model(plain) as model:
        assert bits(plain.params) == bits(dict(model.named_parameters()))


@pytest.mark.parametrize(
    "call",
    [
        lambda state, **given: af.borrow_model(state, **given).__enter__(),
        af.snapshot_model,
        af.full_params,
        lambda state, **given: af.export_model(state, "nowhere", **given),
    ],
    ids=["bind", "frozen", "full_params", "export_model"],
)
def test_where_parameters_are_taken_is_one_word(call):
    """Another word, and the one of before, are refused with what to write."""
    with pytest.raises(ArgumentError, match=r'expected "train" or "eval"'):
        call(make(), at="raw")
    with pytest.raises(CallError, match='at="train" instead of raw=True'):
        call(make(), raw=True)


@pytest.mark.parametrize("part", [0, 1, 2, slice(None)])
def test_a_module_is_called_in_its_block(part):
    """Behind it the module, and each part that had tensors, says what to write."""
    state = make()
    with af.borrow_model(state) as model:
        pass
    called = model if isinstance(part, slice) else model[part]
    with pytest.raises(StateError, match=r"comes from af\.borrow_model.*has ended"):
        called(X)


def test_a_module_that_judges_in_a_loss_stays_until_the_backward_pass():
    """One that was lent for less is refused; a frozen one judges."""
    state, other = make(), make(seed=1)

    def judged(model, batch):
        with af.borrow_model(other) as judge:
            return (model(batch) * judge(batch)).mean()

    with pytest.raises(
        LossError, match=r"ended before the backward.*af\.snapshot_model"
    ):
        af.make_step(judged)(state, X)
    _, metrics = af.make_step(
        lambda model, batch: (model(batch) * af.snapshot_model(other)(batch)).mean()
    )(state, X)
    assert math.isfinite(metrics["loss"])


@pytest.mark.parametrize("name", ["table", "twin"])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_shared_tensor_is_not_replaced_under_either_name(kind, name):
    """A block that gives a lent tensor's place to another is refused by its further name, too."""

    class Shared(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            if kind == "parameter":
                self.table = self.twin = nn.Parameter(torch.ones(2))
            else:
                self.register_buffer("table", torch.ones(2))
                self.register_buffer("twin", self.table)

    state = af.TrainState.create(model=Shared, optimizer=torch.optim.SGD)
    new = torch.zeros(2)
    words = rf"replaced the tensors {name}, but the state keeps"
    with pytest.raises(StateError, match=words), af.borrow_model(state) as model:
        setattr(model, name, nn.Parameter(new) if kind == "parameter" else new)


def test_params_go_into_torch_func():
    """`torch.func.grad` and `tree_map` take the mapping, and give the gradients of a step."""
    inputs, module = torch.eye(2), nn.Linear(2, 2)
    state = af.TrainState.create(
        model=lambda: nn.Linear(2, 2), optimizer=partial(torch.optim.SGD, lr=0.1)
    )

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).square().mean()

    found = torch.func.grad(loss)(state.params, inputs)
    compute = af.value_and_grad(lambda model, x: model(x).square().mean())
    _, grads = compute(state, inputs)
    assert found.keys() == grads.tensors.keys()
    for name, tensor in grads.tensors.items():
        torch.testing.assert_close(found[name], tensor)
    doubled = tree_map(lambda p: 2 * p, state.params)
    assert type(doubled) is dict
    assert all(torch.equal(doubled[n], 2 * p) for n, p in state.params.items())
    af.apply_grads(state, grads)
