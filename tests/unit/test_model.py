# SPDX-License-Identifier: Apache-2.0
"""Models: what can be trained, what is refused, and what stays tied, frozen or unused."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's users know

import accelfn as af
from accelfn.testing import simulate
from tests.internals import materialize
from tests.states import bits

torch.set_num_threads(1)

X = torch.linspace(-1, 1, 24).reshape(8, 3)
SGD = partial(torch.optim.SGD, lr=0.1)


def mean_square(model, batch):
    return model(batch).square().mean()


STEP = af.make_step(mean_square)


def seeded(fn, seed=0):
    """Return what a factory draws from a seed, leaving torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return fn()


def train_by_hand(module, batches, loss_fn=mean_square, make=SGD):
    """Train as a hand-written loop does."""
    optimizer = make([(n, p) for n, p in module.named_parameters() if p.requires_grad])
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(module, batch).backward()
        optimizer.step()
    return module


def train(state, batches, loss_fn=mean_square):
    """Train as accelfn does."""
    step = af.make_step(loss_fn)
    for batch in batches:
        state, _ = step(state, batch)
    return state


class Tied(nn.Module):
    """An embedding whose weight is the head's, as in language models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


TOKENS = torch.tensor([0, 1, 2, 3, 4, 0])


def next_token(model, tokens):
    return F.cross_entropy(model(tokens), tokens.roll(1))


# What is refused.


def test_no_trainable_parameter():
    """A model with all parameters frozen is refused by name, with what to do."""
    frozen = nn.Linear(3, 1).requires_grad_(requires_grad=False)
    words = r"Linear has no trainable parameter \(2 .*requires_grad_\(True\)"
    with pytest.raises(af.errors.ModelError, match=words) as caught:
        af.TrainState.create(model=frozen, optimizer=SGD)
    assert isinstance(caught.value, ValueError)


def test_no_parameter_at_all():
    """A model without parameters is refused, before torch refuses the optimizer."""
    with pytest.raises(
        af.errors.ModelError, match=r"ReLU has no trainable parameter \(0"
    ):
        af.TrainState.create(model=nn.ReLU, optimizer=SGD)


def test_meta_tensors():
    """Tensors without values are refused by name, with what to do."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(
        af.errors.ModelError, match=r"meta device.*0\.weight.*import_model"
    ):
        af.TrainState.create(model=model, optimizer=SGD)


def test_meta_buffer():
    """A buffer without values is refused as well."""
    model = nn.BatchNorm1d(3)
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(af.errors.ModelError, match=r"meta device.*table"):
        af.TrainState.create(model=model, optimizer=SGD)


def test_lazy_parameters():
    """A lazy module has no shapes yet; it is refused with what to do."""
    with pytest.raises(af.errors.ModelError, match=r"(?i)lazy|uninitialized"):
        af.TrainState.create(model=partial(nn.LazyLinear, 1), optimizer=SGD)


@pytest.mark.parametrize("model", [lambda: None, lambda: [nn.Linear(3, 1)], 42, "net"])
def test_no_module(model):
    """What is no module, nor a factory of one, is refused."""
    with pytest.raises(af.errors.ModelError, match=r"torch\.nn\.Module"):
        af.TrainState.create(model=model, optimizer=SGD)


def test_module_with_computed_tensors():
    """A module that keeps a computed tensor in a plain attribute is refused with why."""
    model = nn.Linear(3, 1)
    model.computed = model.weight * 2
    with pytest.raises(
        af.errors.ModelError,
        match=r"cannot be copied because of its attribute 'computed'.*buffers",
    ):
        af.TrainState.create(model=model, optimizer=SGD)


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(kind):
    """A state trains copies, which would not call them: before they were lost in silence."""
    model = nn.Linear(3, 1)
    getattr(model.weight, f"register_{kind}")(lambda _: None)
    with pytest.raises(
        af.errors.ModelError, match=r"has parameters with hooks: weight\..*`grads`"
    ):
        af.TrainState.create(model=model, optimizer=SGD)
    model.weight._backward_hooks = None


@pytest.mark.parametrize("setup", [af.wrap_ddp(), af.wrap_fsdp()])
def test_hooks_of_modules_are_those_of_the_hand_written_loop(setup):
    """What modules' hooks do to a forward and a backward pass, a step does on 1 and 2 ranks."""

    def model():
        made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        made[0].register_forward_hook(lambda *each: each[2] * 2)
        made[2].register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        made[2].register_full_backward_hook(lambda _, given, __: (given[0] * 3,))
        return made

    rows = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3).cos()
    loss_fn = lambda model, batch: (model(batch) - batch).square().mean()  # noqa: E731
    before = []

    def trained(world):
        state = af.TrainState.create(
            model=model,
            optimizer=SGD,
            data=af.Data(rows, global_batch_size=4),
            setup=af.chain(af.shard_data(), setup),
            world=world,
        )
        before.append(af.full_params(state))
        step = af.make_step(loss_fn)
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)
        return af.full_params(state)

    found = [*simulate(1, trained), *simulate(2, trained)]
    plain = model()
    plain.load_state_dict(before[0])
    optimizer = SGD(plain.parameters())
    for batch in rows.split(4):
        optimizer.zero_grad()
        loss_fn(plain, batch).backward()
        optimizer.step()
    for params in found:
        torch.testing.assert_close(params, dict(plain.named_parameters()))


def test_factory_that_raises():
    """A factory's own error goes through, and torch's generator is as it was."""

    def broken():
        torch.randn(3)
        raise ZeroDivisionError

    random = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        af.TrainState.create(model=broken, optimizer=SGD)
    assert torch.equal(random, torch.get_rng_state())


# What is drawn and copied.


def test_factory_is_drawn_from_the_seed():
    """The same seed draws the same parameters, another other ones; torch's stays."""
    random = torch.get_rng_state()
    make = partial(af.TrainState.create, model=partial(nn.Linear, 3, 1), optimizer=SGD)
    assert bits(make(seed=1).params) == bits(make(seed=1).params)
    assert bits(make(seed=1).params) != bits(make(seed=2).params)
    assert torch.equal(random, torch.get_rng_state())


def test_tied_weight_is_one_entry():
    """A tied weight stands once in the state, under its first name."""
    state = af.TrainState.create(model=Tied, optimizer=SGD)
    assert list(state.params) == ["embed.weight", "body.weight", "body.bias"]


def test_what_is_shared_is_shared_on_any_device():
    """A parameter or buffer of two names is one there too, as `Module.to` does not leave it."""

    class Shared(nn.Sequential):
        def __init__(self):
            layers = nn.Linear(3, 3), nn.Linear(3, 3)
            super().__init__(*layers, nn.BatchNorm1d(3), nn.BatchNorm1d(3))
            self[1].weight = self[0].weight
            self[3].running_mean = self[2].running_mean

    meta = torch.device("meta")
    moved = materialize(Shared(), seed=0, name="model", device=meta)
    assert moved[1].weight is moved[0].weight
    assert moved[3].running_mean is moved[2].running_mean
    assert {each.device for each in moved.state_dict().values()} == {meta}
    assert moved[1].bias is not moved[0].bias


@pytest.mark.parametrize("make", [SGD, partial(torch.optim.AdamW, lr=0.1)])
def test_tied_weight_is_updated_once(make):
    """Training with a tie is bitwise the hand-written loop."""
    twin = seeded(Tied)
    state = af.TrainState.create(model=copy.deepcopy(twin), optimizer=make)
    state = train(state, [TOKENS] * 4, next_token)
    train_by_hand(twin, [TOKENS] * 4, next_token, make)
    assert bits(dict(twin.named_parameters())) == bits(state.params)


def test_tie_is_kept(tmp_path):
    """Modules of bind and frozen, and states copied or loaded, keep the tie."""
    state = train(af.TrainState.create(model=Tied, optimizer=SGD), [TOKENS], next_token)
    af.save(state, tmp_path / "saved")
    fresh = af.TrainState.create(model=Tied, optimizer=SGD, seed=9)
    for each in (state, state.copy(), af.load(fresh, tmp_path / "saved")):
        with af.borrow_model(each) as model:
            assert model.head.weight is model.embed.weight
        frozen = af.snapshot_model(each)
        assert frozen.head.weight is frozen.embed.weight
        after = train(each, [TOKENS], next_token)
        with af.borrow_model(after) as model:
            assert model.head.weight is model.embed.weight


def test_frozen_parameters_stay():
    """Parameters that require no gradient are bitwise as given, under weight decay too."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(requires_grad=False)
    decay = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    state = af.TrainState.create(model=model, optimizer=decay)
    before = bits(state.params)
    after = bits(train(state, [X] * 3).params)
    assert {"1.weight", "1.bias"} == {n for n in before if before[n] != after[n]}


def test_frozen_parameters_of_a_ready_optimizer_stay():
    """So are they where a ready optimizer was given them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    state = af.TrainState.create(model=model, optimizer=optimizer)
    before = bits(state.params)
    after = bits(train(state, [X] * 3).params)
    assert {"1.weight", "1.bias"} == {n for n in before if before[n] != after[n]}


class Branching(nn.Module):
    """A model that uses one of two layers, as the batch says."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, batch):
        return (self.left if batch.sum() > 0 else self.right)(batch)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    ],
)
def test_unused_parameters_are_skipped(make):
    """A parameter that takes no part in an update is left alone, as by hand."""
    parts = [X + 2, X - 2, X + 2, X + 3]
    twin = seeded(Branching)
    state = af.TrainState.create(model=copy.deepcopy(twin), optimizer=make)
    state = train(state, parts)
    train_by_hand(twin, parts, make=make)
    assert bits(dict(twin.named_parameters())) == bits(state.params)


def test_model_in_evaluation_mode_trains():
    """A model handed over in evaluation mode, as from_pretrained does, is trained."""
    twin = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    state = af.TrainState.create(model=copy.deepcopy(twin).eval(), optimizer=SGD)
    state = train(state, [X] * 2)
    train_by_hand(twin, [X] * 2)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)


def test_part_in_evaluation_mode_stays_so():
    """A part that was put in evaluation mode on purpose stays in it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].eval()
    state = af.TrainState.create(model=model, optimizer=SGD)
    before = bits(state.buffers)
    assert before == bits(train(state, [X] * 2).buffers)


def test_frozen_module_is_detached():
    """`frozen` gives an evaluation-mode module of its own, which no step changes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = af.TrainState.create(model=model, optimizer=SGD)
    teacher = af.snapshot_model(state)
    before = bits(teacher.state_dict())
    train(state, [X] * 2)
    assert before == bits(teacher.state_dict())
    assert not teacher.training
    assert not any(param.requires_grad for param in teacher.parameters())


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(wrap):
    """Parametrized layers train bitwise as by hand, and so do copies."""
    parametrize = getattr(nn.utils.parametrizations, wrap)
    twin = seeded(lambda: nn.Sequential(parametrize(nn.Linear(3, 3)), nn.Linear(3, 1)))
    state = af.TrainState.create(model=copy.deepcopy(twin), optimizer=SGD)
    state = train(train(state, [X] * 2).copy(), [X] * 2)
    train_by_hand(twin, [X] * 4)
    assert bits(dict(twin.named_parameters())) == bits(state.params)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)


# Buffers.


class Running(nn.Module):
    """A model with a running number, written in place or assigned."""

    def __init__(self, *, assign, when=lambda _: True):
        super().__init__()
        self.assign, self.when = assign, when
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.ones(3))

    def forward(self, batch):
        if self.when(batch):
            if self.assign:
                self.seen = self.seen + 1
            else:
                self.seen += 1
        return self.layer(batch * self.table) * (1 + self.seen)


class LateNorm(nn.Module):
    """A model whose batch norm takes part in some batches only."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, batch):
        hidden = self.layer(batch)
        return self.norm(hidden) if float(batch[0, 0]) > 0 else hidden


MODELS = {
    "late norm": LateNorm,
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    "cumulative": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None)
    ),
    "in place": lambda: Running(assign=False),
    "assigned": lambda: Running(assign=True),
    "now and then": lambda: Running(assign=False, when=lambda b: float(b[0, 0]) > 0),
    "assigned now and then": lambda: Running(
        assign=True, when=lambda b: float(b[0, 0]) > 0
    ),
}
BATCHES = [X, X + 2, X, X + 3, X + 4]


@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_those_of_the_hand_written_loop(name):
    """Buffers that a forward pass writes are bitwise those of the loop by hand."""
    twin = seeded(MODELS[name])
    state = af.TrainState.create(model=copy.deepcopy(twin), optimizer=SGD)
    state = train(state, BATCHES)
    train_by_hand(twin, BATCHES)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)
    assert bits(dict(twin.named_parameters())) == bits(state.params)


@pytest.mark.parametrize("name", MODELS)
def test_buffers_of_forks_are_apart(name):
    """Two forks stepped in turn each have the buffers of their own history."""
    twin = seeded(MODELS[name])
    state = af.TrainState.create(model=copy.deepcopy(twin), optimizer=SGD)
    fork = state.copy()
    for batch in BATCHES:
        state, _ = STEP(state, batch)
        fork, _ = STEP(fork, X + 1)
    train_by_hand(other := copy.deepcopy(twin), [X + 1] * len(BATCHES))
    train_by_hand(twin, BATCHES)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)
    assert bits(dict(other.named_buffers())) == bits(fork.buffers)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_alone_leave_the_buffers(name):
    """`value_and_grad` changes no buffer of the state, whenever one is first written."""
    state = af.TrainState.create(model=MODELS[name], optimizer=SGD)
    compute = af.value_and_grad(mean_square)
    before = bits(state.buffers)
    for batch in BATCHES:
        _, grads = compute(state, batch)
        assert before == bits(state.buffers)
    state, _ = STEP(state, BATCHES[0])
    before = bits(state.buffers)
    for batch in BATCHES:
        _, grads = compute(state, batch)
        assert before == bits(state.buffers)
    assert grads.buffers is not None


@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_those_of_the_pass_that_took_the_gradients(name):
    """Another pass between gradients and their update is nothing to what the update writes."""
    twin = seeded(MODELS[name])
    state = af.TrainState.create(model=copy.deepcopy(twin), optimizer=SGD)
    compute = af.value_and_grad(mean_square)
    for batch in BATCHES:
        _, grads = compute(state, batch)
        shown = bits(dict(grads.buffers))
        compute(state, X + 7)
        assert bits(dict(grads.buffers)) == shown
        state = af.apply_grads(state, grads)
    train_by_hand(twin, BATCHES)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)


@pytest.mark.parametrize("name", MODELS)
def test_step_that_raises_leaves_the_buffers(name):
    """A forward pass that wrote buffers and then raised leaves them as they were."""
    twin = seeded(MODELS[name])
    state = af.TrainState.create(model=copy.deepcopy(twin), optimizer=SGD)

    def late_error(model, batch):
        model(batch)
        raise ZeroDivisionError

    for batch in BATCHES:
        before = bits(state.buffers)
        for other in BATCHES:
            with pytest.raises(ZeroDivisionError):
                af.make_step(late_error)(state, other)
            assert before == bits(state.buffers)
        state, _ = STEP(state, batch)
    train_by_hand(twin, BATCHES)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)


def test_filler_is_not_counted_in_buffers():
    """An empty micro-batch runs on a stand-in, which no buffer counts."""
    data = af.Data(X[:2], global_batch_size=2)
    state = af.TrainState.create(
        model=partial(Running, assign=False),
        optimizer=SGD,
        data=data,
        setup=af.accumulate(num_micro_batches=4),
    )
    for batch in af.batches(state, until_epoch=1):
        assert batch.weights == (1, 1, 0, 0)
        state, _ = STEP(state, batch)
    assert float(state.buffers["seen"]) == 2.0


def test_buffers_over_micro_batches():
    """BatchNorm sees the micro-batches one after the other, as by hand."""
    twin = seeded(MODELS["batch norm"])
    state = af.TrainState.create(
        model=copy.deepcopy(twin),
        optimizer=SGD,
        setup=af.accumulate(num_micro_batches=2),
    )
    state, _ = STEP(state, [X[:4], X[4:]])
    with torch.no_grad():
        for part in (X[:4], X[4:]):
            twin(part)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "nested"])
def test_a_buffer_that_is_not_dense_is_refused(kind):
    """It is named where the model is given; of its indices and values one trains."""

    class Graph(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            edges = torch.eye(3)
            if kind == "nested":
                edges = torch.nested.as_nested_tensor([edges], layout=torch.jagged)
            else:
                edges = getattr(edges, kind)()
            self.register_buffer("edges", edges)

    class Made(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            edges = torch.eye(3).to_sparse()
            self.register_buffer("indices", edges.indices())
            self.register_buffer("values", edges.values())

        def forward(self, inputs):
            edges = torch.sparse_coo_tensor(
                self.indices, self.values, (3, 3), check_invariants=True
            )
            return super().forward((edges @ inputs.T).T)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, that it is new
        with pytest.raises(af.errors.ModelError, match="the buffer 'edges' is .*dense"):
            af.TrainState.create(model=Graph, optimizer=SGD)
    plain = af.TrainState.create(model=partial(nn.Linear, 3, 2), optimizer=SGD)
    state = af.TrainState.create(model=Made, optimizer=SGD)
    step = af.make_step(mean_square)
    assert bits(step(state, X)[0].params) == bits(step(plain, X)[0].params)


@pytest.mark.parametrize("part", [None, "1"])
def test_a_model_spread_over_devices_is_refused(part):
    """One that was loaded with a device_map of several devices would be gathered in silence."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    place = model if part is None else model[1]
    place.hf_device_map = {"0": "cpu", "1": 1}
    where = "the model" if part is None else "its submodule '1'"
    words = rf"^Sequential: {where} is spread over the devices \['1', 'cpu'\]"
    with pytest.raises(af.errors.ModelError, match=words):
        af.TrainState.create(model=model, optimizer=SGD)
    place.hf_device_map = {"0": "cpu", "1": "cpu"}
    af.TrainState.create(model=model, optimizer=SGD)


def test_a_parameter_that_was_kept_is_empty():
    """It would follow the training, and look like the first values."""
    model = nn.Linear(2, 1)
    kept, first = model.weight, model.weight.detach().clone()
    state = af.TrainState.create(
        model=model, optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    assert kept.numel() == 0
    assert torch.equal(state.params["weight"], first)
