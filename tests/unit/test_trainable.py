# SPDX-License-Identifier: Apache-2.0
"""`with_trainable` freezes and thaws in mid-run: what it shares, keeps and refuses."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim

import accelfn as af
from accelfn.testing import simulate
from tests.states import bits

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


ADAMW = partial(optim.AdamW, lr=0.1, weight_decay=0.5)
LOSS = lambda model, x: model(x).square().mean()  # noqa: E731
STEP = af.make_step(LOSS)


def in_head(name, _param):
    return name.startswith("head.")


def not_fixed(name, _param):
    return name != "fixed"


def create(**options):
    return af.TrainState.create(**{"model": Net, "optimizer": ADAMW, **options})


def test_the_same_set_is_the_same_state():
    """Where nothing changes no engine is lost."""
    state = create().with_trainable(in_head)
    assert state.with_trainable(in_head) is state


def test_lent_modules_say_what_is_trained():
    """A module lent from the state requires gradients where it is trained; a frozen one none."""
    state = create().with_trainable(in_head)
    with af.borrow_model(state) as net:
        wanted = [n for n, p in net.named_parameters() if p.requires_grad]
    assert wanted == ["head.weight", "head.bias"]
    assert not any(p.requires_grad for p in af.snapshot_model(state).parameters())


def test_no_gradient_is_taken_of_the_frozen():
    """Gradients are those of what is trained; batch statistics go on moving."""
    state = create().with_trainable(in_head)
    _, grads = af.value_and_grad(LOSS)(state, X)
    assert list(grads.tensors) == ["head.weight", "head.bias"]
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
        for use in (
            lambda g=grads, s=two: compute(s, X, into=g),
            lambda g=grads, s=two: af.apply_grads(s, g),
        ):
            with pytest.raises(
                af.errors.GradsError, match=r"body\.bias.*with_trainable"
            ):
                use()
        af.apply_grads(one.copy(), grads)


def test_hashes_are_of_what_was_never_trained(tmp_path):
    """`frozen="hash"` writes what was trained before it was frozen, and it comes back."""
    state, _ = STEP(create(), X)
    state = state.with_trainable(in_head)
    af.save(state, tmp_path / "saved", frozen="hash")
    loaded = af.load(create(seed=1), tmp_path / "saved", allow=("trainable",))
    for name, param in state.params.items():
        assert torch.equal(param, loaded.params[name])


def test_a_resume_after_a_thaw_warns_with_the_code_to_write(tmp_path):
    """A run that froze at one update and resumes later trains another set: `load` warns."""

    def train(state, updates):
        while state.step < updates:
            if state.step == 1:
                state = state.with_trainable(in_head)
            state, _ = STEP(state, X)
        return state

    state = train(create(), 2)
    af.save(state, tmp_path / "saved")
    words = r"body\.bias: frozen, now trained(.*\n)*.*write state\.with_trainable\(predicate\)"
    with pytest.warns(af.errors.AccelfnWarning, match=words):
        loaded = af.load(create(), tmp_path / "saved")
    af.save(create(), tmp_path / "other")
    with pytest.warns(
        af.errors.AccelfnWarning, match=r"body\.bias: trained, now frozen"
    ):
        af.load(create().with_trainable(in_head), tmp_path / "other")
    expected, resumed = (
        train(each, 4) for each in (state, loaded.with_trainable(in_head))
    )
    for name, param in expected.params.items():
        assert torch.equal(param, resumed.params[name])


def test_local_sgd_averages_what_was_trained():
    """Averages move no parameter that was never trained, whatever the ranks' weights."""

    def train(world):
        state = create(
            setup=af.chain(af.shard_data(), af.local_sgd(sync_every=1)),
            data=af.Data(X[:7], global_batch_size=7),
            world=world,
        )
        state = state.with_params({**state.params, "fixed": torch.full((4,), 0.1)})
        for batch in af.batches(state, until_epoch=3):
            state, _ = STEP(state, batch)
        return state.params["fixed"], af.eval_params(state)["fixed"]

    for found in simulate(2, train):
        assert all(torch.equal(each, torch.full((4,), 0.1)) for each in found)


def half_frozen():
    """Return a model of which a part is frozen, and an optimizer over all of it."""
    torch.manual_seed(0)
    model = Net()
    for name, param in model.named_parameters():
        param.requires_grad_(in_head(name, param))
    return {"model": model, "optimizer": ADAMW(model.parameters())}


@pytest.mark.parametrize("thawed", [True, False])
def test_local_sgd_averages_what_is_thawed(thawed):
    """What ranks train apart agrees after an average, whenever it was thawed or frozen again."""

    def train(world):
        state = create(
            setup=af.chain(af.shard_data(), af.local_sgd(sync_every=2)),
            data=af.Data(X[:7], global_batch_size=7),
            world=world,
            **(half_frozen() if thawed else {}),
        )
        seen = []
        for batch in af.batches(state, until_epoch=6):
            state, _ = STEP(state, batch)
            if thawed and state.step == 2:
                state = state.with_trainable(not_fixed)
            if not thawed and state.step == 3:
                state = state.with_trainable(in_head)
            seen.append({n: p.clone() for n, p in state.params.items()})
        return seen

    one, two = simulate(2, train)
    for step, (mine, other) in enumerate(zip(one, two, strict=True), start=1):
        agree = {n: torch.equal(mine[n], other[n]) for n in mine}
        assert agree["fixed"]
        if step % 2 == 0:
            assert all(agree.values())
        else:
            assert not agree["head.weight"]
    assert not torch.equal(one[1]["body.weight"], one[5]["body.weight"])


# What is refused.


def test_ranks_that_train_others():
    """Ranks whose predicates differ are told which parameter, before they communicate it."""

    def train(world):
        state = create(setup=af.wrap_ddp(), world=world)
        state = state.with_trainable(in_head if world.rank else not_fixed)
        STEP(state, X)

    with pytest.raises(af.errors.ReplicaMismatchError, match=r"body\.weight.*, frozen"):
        simulate(2, train)


@pytest.mark.parametrize(
    ("predicate", "error", "why"),
    [
        (
            lambda *_: True,
            af.errors.OptimizerError,
            "parameters were frozen .*AdamW .*: fixed.*Create the state",
        ),
        (lambda *_: None, af.errors.ModelError, "True for none of the"),
        ("head", af.errors.ArgumentError, "'head'.*expected a function"),
    ],
)
def test_what_cannot_be_trained(predicate, error, why):
    """What the optimizer lacks, and nothing at all, cannot be trained."""
    with pytest.raises(error, match=why):
        create().with_trainable(predicate)


def test_hashes_of_parts(tmp_path):
    """D: where each rank has a part, `frozen="hash"` writes none of what was never trained."""

    def model():
        made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        made[0].requires_grad_(requires_grad=False)
        return made

    def trained(world, setup, *, load=False):
        state = af.TrainState.create(
            model=model,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=af.Data(X, global_batch_size=8),
            setup=af.chain(af.shard_data(), setup),
            world=world,
        )
        if load:
            return af.full_params(af.load(state, tmp_path / "saved"))
        state, _ = STEP(state, next(iter(af.batches(state))))
        af.save(state, tmp_path / "saved", frozen="hash")
        return af.full_params(state)

    (saved, _) = simulate(2, partial(trained, setup=af.wrap_fsdp()))
    files = [load_file(path) for path in (tmp_path / "saved").glob("*.safetensors")]
    assert {name for file in files for name in file} == {
        "params.1.weight",
        "params.1.bias",
    }
    for size, setup in ((1, af.wrap_ddp()), (2, af.wrap_ddp()), (3, af.wrap_fsdp())):
        for loaded in simulate(size, partial(trained, setup=setup, load=True)):
            assert bits(saved) == bits(loaded)
