# SPDX-License-Identifier: Apache-2.0
"""Models: what can be trained, what is refused, and what stays tied, frozen or unused."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ModelError
from accelfn.testing import simulate
from tests.internals import materialize
from tests.states import bits

X = torch.linspace(-1, 1, 24).reshape(8, 3)
SGD = partial(torch.optim.SGD, lr=0.1)


def mean_square(model, batch):
    return model(batch).square().mean()


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


# What is refused.


def test_no_trainable_parameter():
    """A model with all parameters frozen is refused by name, with what to do."""
    frozen = nn.Linear(3, 1).requires_grad_(requires_grad=False)
    words = r"Linear has no trainable parameter \(2 .*requires_grad_\(True\)"
    with pytest.raises(ModelError, match=words) as caught:
        af.TrainState.create(model=frozen, optimizer=SGD)
    assert isinstance(caught.value, ValueError)


def test_no_parameter_at_all():
    """A model without parameters is refused, before torch refuses the optimizer."""
    with pytest.raises(ModelError, match=r"ReLU has no trainable parameter \(0"):
        af.TrainState.create(model=nn.ReLU, optimizer=SGD)


def test_meta_tensors():
    """Tensors without values are refused by name, with what to do."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ModelError, match=r"meta device.*0\.weight.*import_model"):
        af.TrainState.create(model=model, optimizer=SGD)


def test_meta_buffer():
    """A buffer without values is refused as well."""
    model = nn.BatchNorm1d(3)
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ModelError, match=r"meta device.*table"):
        af.TrainState.create(model=model, optimizer=SGD)


def test_lazy_parameters():
    """A lazy module has no shapes yet; it is refused with what to do."""
    with pytest.raises(ModelError, match=r"(?i)lazy|uninitialized"):
        af.TrainState.create(model=partial(nn.LazyLinear, 1), optimizer=SGD)


@pytest.mark.parametrize("model", [lambda: None, lambda: [nn.Linear(3, 1)], 42, "net"])
def test_no_module(model):
    """What is no module, nor a factory of one, is refused."""
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        af.TrainState.create(model=model, optimizer=SGD)


def test_module_with_computed_tensors():
    """A module that keeps a computed tensor in a plain attribute is refused with why."""
    model = nn.Linear(3, 1)
    model.computed = model.weight * 2
    with pytest.raises(
        ModelError,
        match=r"cannot be copied because of its attribute 'computed'.*buffers",
    ):
        af.TrainState.create(model=model, optimizer=SGD)


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(kind):
    """A state trains copies, which would not call them: before they were lost in silence."""
    model = nn.Linear(3, 1)
    getattr(model.weight, f"register_{kind}")(lambda _: None)
    with pytest.raises(
        ModelError, match=r"has parameters with hooks: weight\..*`grads`"
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
        with pytest.raises(ModelError, match="not dense tensors: edges"):
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
    with pytest.raises(ModelError, match=words):
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
