# SPDX-License-Identifier: Apache-2.0
"""`with_trainable` freezes and thaws in mid-run: what it shares, keeps and refuses."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn.errors import (
    AccelfnWarning,
    ArgumentError,
    GradsError,
    ModelError,
    OptimizerError,
    ReplicaMismatchError,
)
from accelfn.testing import simulate
from tests.states import bits, linear_state

X = torch.linspace(-1, 1, 24).reshape(8, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return self.head(self.norm(self.body(x)) * self.fixed)


ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
LOSS = lambda model, x: model(x).square().mean()  # noqa: E731
STEP = af.make_step(LOSS)
HEAD = ["head.weight", "head.bias"]


def in_head(name, _param):
    return name in HEAD


def not_fixed(name, _param):
    return name != "fixed"


def create(**options):
    return linear_state(**{"model": Net, "optimizer": ADAMW, **options})


def test_what_is_frozen_has_no_gradient():
    """Models that are lent and gradients are of what is trained; batch statistics move on."""
    state = create().with_trainable(in_head)
    assert state.with_trainable(in_head) is state
    with af.borrow_model(state) as net:
        assert [n for n, p in net.named_parameters() if p.requires_grad] == HEAD
    assert not any(p.requires_grad for p in af.snapshot_model(state).parameters())
    _, grads = af.value_and_grad(LOSS)(state, X)
    assert list(grads.tensors) == HEAD
    before = state.buffers["norm.running_mean"].clone()
    after = af.apply_grads(state, grads).buffers["norm.running_mean"]
    assert not torch.equal(before, after)


def test_gradients_of_another_set_are_refused():
    """Gradients taken when others were trained are neither added to nor applied."""
    state = create()
    compute = af.value_and_grad(LOSS)
    head = state.with_trainable(in_head)
    for one, two in ((state, head), (head, state)):
        _, grads = compute(one, X, sync=False)
        with pytest.raises(GradsError, match=r"body\.bias.*with_trainable"):
            compute(two, X, into=grads)
        with pytest.raises(GradsError, match=r"body\.bias.*with_trainable"):
            af.apply_grads(two, grads)
        af.apply_grads(one.copy(), grads)


def test_hashes_are_of_what_was_never_trained(tmp_path):
    """`frozen="hash"` writes what was trained before it was frozen, and it comes back."""
    state, _ = STEP(create(), X)
    state = state.with_trainable(in_head)
    af.save(state, tmp_path / "saved", frozen="hash")
    loaded = af.load(create(seed=1), tmp_path / "saved", allow=("trainable",))
    assert bits(state.params) == bits(loaded.params)


def test_a_resume_after_a_thaw_warns_with_the_code_to_write(tmp_path):
    """A run that froze at one update and resumes later trains another set: `load` warns."""
    state, _ = STEP(create(), X)
    state, _ = STEP(state.with_trainable(in_head), X)
    af.save(state, tmp_path / "saved")
    words = r"body\.bias: frozen, now trained(.*\n)*.*write state\.with_trainable\(predicate\)"
    with pytest.warns(AccelfnWarning, match=words):
        loaded = af.load(create(), tmp_path / "saved")
    af.save(create(), tmp_path / "other")
    with pytest.warns(AccelfnWarning, match=r"body\.bias: trained, now frozen"):
        af.load(create().with_trainable(in_head), tmp_path / "other")
    expected, resumed = (
        STEP(each, X)[0] for each in (state, loaded.with_trainable(in_head))
    )
    assert bits(expected.params) == bits(resumed.params)


def averaging(world, *, every, **options):
    return create(
        setup=af.chain(af.shard_data(), af.local_sgd(sync_every=every)),
        data=af.Data(X[:7], global_batch_size=7),
        world=world,
        **options,
    )


def test_local_sgd_averages_what_was_trained():
    """Averages move no parameter that was never trained, whatever the ranks' weights."""
    fixed = torch.full((4,), 0.1)

    def train(world):
        state = averaging(world, every=1)
        state = state.with_params({**state.params, "fixed": fixed})
        for batch in af.batches(state, until_epoch=3):
            state, _ = STEP(state, batch)
        return state.params["fixed"], af.eval_params(state)["fixed"]

    for found in simulate(2, train):
        assert all(torch.equal(each, fixed) for each in found)


def half_frozen():
    """Return a model of which a part is frozen, and an optimizer over all of it."""
    torch.manual_seed(0)
    model = Net()
    for name, param in model.named_parameters():
        param.requires_grad_(in_head(name, param))
    return {"model": model, "optimizer": ADAMW(model.parameters())}


@pytest.mark.parametrize(
    ("options", "at", "trained"), [(half_frozen, 2, not_fixed), (dict, 3, in_head)]
)
def test_local_sgd_averages_what_is_thawed(options, at, trained):
    """What ranks train apart agrees after an average, whenever it was thawed or frozen again."""

    def train(world):
        state, seen = averaging(world, every=2, **options()), []
        for batch in af.batches(state, until_epoch=6):
            state, _ = STEP(state, batch)
            state = state.with_trainable(trained) if state.step == at else state
            seen.append({n: p.clone() for n, p in state.params.items()})
        return seen

    one, two = simulate(2, train)
    for step, (mine, other) in enumerate(zip(one, two, strict=True), start=1):
        agree = {n: torch.equal(mine[n], other[n]) for n in mine}
        assert agree["fixed"]
        assert all(agree.values()) if step % 2 == 0 else not agree["head.weight"]
    assert not torch.equal(one[1]["body.weight"], one[5]["body.weight"])


def test_ranks_that_train_others():
    """Ranks whose predicates differ are told which parameter, before they communicate it."""

    def train(world):
        state = create(setup=af.wrap_ddp(), world=world)
        STEP(state.with_trainable(in_head if world.rank else not_fixed), X)

    with pytest.raises(ReplicaMismatchError, match=r"body\.weight.*, frozen"):
        simulate(2, train)


FROZEN = "parameters were frozen .*AdamW .*: fixed.*Create the state"


@pytest.mark.parametrize(
    ("predicate", "error", "why"),
    [
        (lambda *_: True, OptimizerError, FROZEN),
        (lambda *_: None, ModelError, "True for none of the"),
        ("head", ArgumentError, "'head'.*expected a function"),
    ],
)
def test_what_cannot_be_trained(predicate, error, why):
    """What the optimizer lacks, and nothing at all, cannot be trained."""
    with pytest.raises(error, match=why):
        create().with_trainable(predicate)


def test_hashes_of_parts(tmp_path):
    """D: where each rank has a part, `frozen="hash"` writes none of what was never trained."""

    def model():
        frozen = nn.Linear(3, 4).requires_grad_(requires_grad=False)
        return nn.Sequential(frozen, nn.Linear(4, 4))

    def trained(world, setup, *, load=False):
        state = linear_state(model=model, setup=setup, world=world)
        if load:
            return bits(af.full_params(af.load(state, tmp_path / "saved")))
        state, _ = STEP(state, X)
        af.save(state, tmp_path / "saved", frozen="hash")
        return bits(af.full_params(state))

    (saved, _) = simulate(2, partial(trained, setup=af.wrap_fsdp()))
    files = [load_file(path) for path in (tmp_path / "saved").glob("*.safetensors")]
    written = {name for file in files for name in file}
    assert written == {"params.1.weight", "params.1.bias"}
    for size, setup in ((1, af.wrap_ddp()), (2, af.wrap_ddp()), (3, af.wrap_fsdp())):
        loaded = simulate(size, partial(trained, setup=setup, load=True))
        assert list(loaded) == [saved] * size
