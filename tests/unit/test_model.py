# SPDX-License-Identifier: Apache-2.0
"""Models: what can be trained, what is refused, and what becomes of buffers and hooks."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import accelfn as af
from accelfn.errors import ModelError, OptimizerError
from accelfn.testing import simulate
from tests.internals import materialize
from tests.states import SGD, STEP, bits, create, square

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def seeded(fn):
    """Return what a factory draws from a seed, leaving torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fn()


def train_by_hand(module, batches, loss_fn=square):
    optimizer = SGD([p for p in module.parameters() if p.requires_grad])
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(module, batch).backward()
        optimizer.step()


def train(state, batches):
    for batch in batches:
        state, _ = STEP(state, batch)
    return state


# What is refused.


def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def with_buffer(make_buffer):
    """Return a factory of a layer with a buffer."""

    def model():
        layer = nn.Linear(3, 1)
        layer.register_buffer("table", make_buffer())
        return layer

    return model


def computed():
    layer = nn.Linear(3, 1)
    layer.computed = layer.weight * 2
    return layer


def hooked(kind):
    layer = nn.Linear(3, 1)
    getattr(layer.weight, f"register_{kind}")(lambda _: None)
    return layer


def two(tensor):
    """Return a tensor that keeps its values in two others."""
    return TwoTensor(tensor, tensor.clone())


class Wrapped(nn.Linear):
    """A layer with a weight of a tensor class of its own."""

    def __init__(self):
        super().__init__(2, 1)
        self.weight = nn.Parameter(two(torch.ones(1, 2)))


MODULE = r"torch\.nn\.Module"
NOT_DENSE = "not dense tensors: table"
HOOKS = r"has parameters with hooks: weight\..*`grads`"
REFUSED = [
    (
        nn.Linear(3, 1).requires_grad_(requires_grad=False),
        r"Linear has no trainable parameter \(2 .*requires_grad_\(True\)",
    ),
    (nn.ReLU, r"ReLU has no trainable parameter \(0"),
    (on_meta(), r"meta device.*0\.weight.*import_model"),
    (with_buffer(lambda: torch.empty(3, device="meta"))(), r"meta device.*table"),
    (partial(nn.LazyLinear, 1), r"(?i)lazy|uninitialized"),
    (lambda: None, MODULE),
    (lambda: [nn.Linear(3, 1)], MODULE),
    (42, MODULE),
    ("net", MODULE),
    (computed(), r"cannot be copied because of its attribute 'computed'.*buffers"),
    # a state trains copies, which would not call them
    (hooked("hook"), HOOKS),
    (hooked("post_accumulate_grad_hook"), HOOKS),
    (with_buffer(lambda: torch.eye(3).to_sparse()), NOT_DENSE),
    (with_buffer(lambda: torch.eye(3).to_sparse_csr()), NOT_DENSE),
    (
        with_buffer(
            lambda: torch.nested.as_nested_tensor([torch.eye(3)], layout=torch.jagged)
        ),
        NOT_DENSE,
    ),
    (Wrapped, r"weight is a TwoTensor.*cannot be saved in a checkpoint"),
]


@pytest.mark.filterwarnings("ignore:.*in (beta|prototype):UserWarning")
@pytest.mark.parametrize(("model", "words"), REFUSED)
def test_models_that_cannot_be_trained_are_refused(model, words):
    """By name, when a state is created, with what to do."""
    with pytest.raises(ModelError, match=words) as caught:
        create(model=model)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("part", [None, "1"])
def test_a_model_spread_over_devices_is_refused(part):
    """One that was loaded with a device_map of several devices would be gathered in silence."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    place = model if part is None else model[1]
    place.hf_device_map = {"0": "cpu", "1": 1}
    where = "the model" if part is None else "its submodule '1'"
    words = rf"^Sequential: {where} is spread over the devices \['1', 'cpu'\]"
    with pytest.raises(ModelError, match=words):
        create(model=model)
    place.hf_device_map = {"0": "cpu", "1": "cpu"}
    create(model=model)


def test_factory_that_raises():
    """A factory's own error goes through, and torch's generator is as it was."""

    def broken():
        torch.randn(3)
        raise ZeroDivisionError

    random = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        create(model=broken)
    assert torch.equal(random, torch.get_rng_state())


def test_a_model_belongs_to_one_state():
    """An instance, or a factory that gives the same modules again, is refused the second time."""
    net = nn.Linear(2, 1)
    with pytest.raises(OptimizerError):
        create(model=net, optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0))
    copied, weight = copy.deepcopy(net), net.weight
    create(model=net)  # an attempt that failed has not taken it
    with pytest.raises(ModelError, match="it already belongs to the state 'state'"):
        create(model=net)
    create(model=copied)
    copied = nn.Linear(2, 1)
    copied.weight = weight
    with pytest.raises(ModelError, match="already belong to another state: weight"):
        create(model=copied)
    shared = partial(nn.Sequential, nn.Linear(2, 1))
    with pytest.raises(ModelError, match="not a partial with modules"):
        simulate(2, lambda world: create(model=shared, world=world))


class Keeps(torch.optim.SGD):
    """An optimizer that keeps a tensor of a class of its own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("few_bits", two(torch.zeros(2)))
        return super().step(closure)


def test_an_entry_that_no_checkpoint_can_hold_is_rejected_at_the_first_update():
    """And not at the first save after a week."""
    state = create(model=lambda: nn.Linear(2, 1), optimizer=Keeps)
    words = r"Keeps keeps.*cannot be saved in a checkpoint"
    with pytest.raises(OptimizerError, match=words):
        STEP(state, torch.ones(1, 2))


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam4bit", "AdamWFp8"])
def test_torchao_s_optimizers_of_few_bits_are_rejected(name):
    """`create` rejects them; those with plain tensors pass."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is optional")
    with pytest.raises(OptimizerError, match=rf"{name}.*bitsandbytes"):
        create(model=lambda: nn.Linear(2, 1), optimizer=getattr(optim, name))
    create(model=lambda: nn.Linear(2, 1), optimizer=optim._AdamW)


# What is drawn and copied.


@pytest.mark.parametrize("setup", [af.wrap_ddp(), af.wrap_fsdp()])
def test_hooks_of_modules_are_those_of_the_hand_written_loop(setup):
    """What modules' hooks do to a forward and a backward pass, a step does on 1 and 2 ranks."""

    def model():
        made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        made[0].register_forward_hook(lambda *each: each[2] * 2)
        made[2].register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        made[2].register_full_backward_hook(lambda _, given, __: (given[0] * 3,))
        return made

    def loss_fn(model, batch):
        return (model(batch) - batch).square().mean()

    rows = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3).cos()
    before = []

    def trained(world):
        setups = af.chain(af.shard_data(), setup)
        data = af.Data(rows, global_batch_size=4)
        state = create(model=model, data=data, setup=setups, world=world)
        before.append(af.full_params(state))
        step = af.make_step(loss_fn)
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)
        return af.full_params(state)

    found = [*simulate(1, trained), *simulate(2, trained)]
    plain = model()
    plain.load_state_dict(before[0])
    train_by_hand(plain, rows.split(4), loss_fn)
    for params in found:
        torch.testing.assert_close(params, dict(plain.named_parameters()))


def test_what_is_shared_is_shared_on_any_device():
    """A parameter or buffer of two names is one there too, as `Module.to` does not leave it."""
    layers = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    layers[1].weight = layers[0].weight
    layers[3].running_mean = layers[2].running_mean
    meta = torch.device("meta")
    moved = materialize(nn.Sequential(*layers), seed=0, name="model", device=meta)
    assert moved[1].weight is moved[0].weight
    assert moved[3].running_mean is moved[2].running_mean
    assert {each.device for each in moved.state_dict().values()} == {meta}
    assert moved[1].bias is not moved[0].bias


def test_model_in_evaluation_mode_trains():
    """As from_pretrained hands it over; but a part that was put in that mode stays so."""
    twin = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    state = train(create(model=copy.deepcopy(twin).eval()), [X] * 2)
    model = copy.deepcopy(twin)
    model[1].eval()
    still = train(create(model=model), [X] * 2)
    assert bits(dict(twin.named_buffers())) == bits(still.buffers)
    train_by_hand(twin, [X] * 2)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(wrap):
    """Parametrized layers train bitwise as by hand, and so do copies."""
    parametrize = getattr(nn.utils.parametrizations, wrap)
    twin = seeded(lambda: nn.Sequential(parametrize(nn.Linear(3, 3)), nn.Linear(3, 1)))
    state = train(create(model=copy.deepcopy(twin)), [X] * 2)
    state = train(state.copy(), [X] * 2)
    train_by_hand(twin, [X] * 4)
    assert bits(dict(twin.named_parameters())) == bits(state.params)
    assert bits(dict(twin.named_buffers())) == bits(state.buffers)


def test_a_parameter_that_was_kept_is_empty():
    """It would follow the training, and look like the first values."""
    model = nn.Linear(2, 1)
    kept, first = model.weight, model.weight.detach().clone()
    state = create(model=model)
    assert kept.numel() == 0
    assert torch.equal(state.params["weight"], first)


# Buffers that a forward pass writes in ways that leave no trace, or may not write.


class Table(nn.Module):
    """A layer and buffers, and what its forward does to them."""

    def __init__(self, act):
        super().__init__()
        self.layer, self.act = nn.Linear(3, 1), act
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("none", None)
        self.register_buffer("twin", self.table)

    def forward(self, x):
        self.act(self)
        return self.layer(x)


class Bare(nn.Linear):
    def forward(self, x):
        self.register_buffer("later", torch.ones(()))
        return super().forward(x)


WRITES = [
    (lambda m: setattr(m, "none", torch.ones(())), "'none' was None, and was"),
    (lambda m: setattr(m, "count", None), "'count' was set to None"),
    (
        lambda m: setattr(m, "count", m.count + 0.5),
        "'count' changed its dtype from torch.int64 to torch.float32",
    ),
    (
        lambda m: setattr(m.table, "data", m.table.double()),
        "'table' changed its dtype from torch.float32 to torch.float64",
    ),
    (lambda m: m.register_buffer("later", torch.ones(())), "'later' was registered"),
    (lambda m: delattr(m, "count"), "'count' was removed"),
    (
        lambda m: setattr(m, "twin", m.twin + 1),
        "'twin' is shared, and was replaced under one of its names",
    ),
]


@pytest.mark.parametrize(("write", "words"), WRITES)
def test_what_the_state_would_not_have(write, words):
    """A buffer that a pass makes, removes or makes another is named; the state is whole."""
    acts = [write, write, lambda _: None]

    def act(model):
        acts.pop(0)(model)

    state = create(model=lambda: Table(act))
    params = {name: param.clone() for name, param in state.params.items()}
    for _ in range(2):
        with pytest.raises(ModelError, match=words):
            STEP(state, X)
    assert all(torch.equal(params[name], state.params[name]) for name in params)
    assert state.buffers["table"].tolist() == [1, 1, 1]
    assert STEP(state, X)[0].step == 1


def test_no_buffer_at_all():
    """A model without any is refused one, too."""
    with pytest.raises(ModelError, match="'later' was registered"):
        STEP(create(model=lambda: Bare(3, 1)), X)
