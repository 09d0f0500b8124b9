# SPDX-License-Identifier: Apache-2.0
"""What `compile` compiles, when it says that it does so again, and what it refuses."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.nn.functional import cross_entropy

import accelfn as af
from accelfn.errors import LossError, NonFiniteLossError
from accelfn.testing import simulate
from tests.states import recorded_warnings
from tests.strategies import differences, tensors

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
quick = functools.partial(af.compile, backend="aot_eager")


def net():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


class Block(nn.Module):
    """Half of what it is given, and a layer of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x / 2 + self.drop(self.layer(x).relu())


def blocks():
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(6, 4))


def rows(count=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, torch.randint(4, (count,), generator=generator)


def loss_fn(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def begun(*setup, model=net, world=None):
    chain = af.chain(*setup)
    return af.TrainState.create(model=model, optimizer=SGD, setup=chain, world=world)


def trained(*setup, model=net, loss=loss_fn, batches=None):
    state, step = begun(*setup, model=model), af.make_step(loss)
    for batch in batches or [rows(seed=i) for i in range(3)]:
        state, _ = step(state, batch)
    return state


def num_graphs():
    return counters["stats"]["unique_graphs"]


def close(one, two):
    return differences(tensors(one), tensors(two), within=1e-5) == []


@pytest.mark.slow
def test_inductor_gives_the_same_numbers():
    """The default backend trains what the plain step trains, with one graph compiled."""
    before = num_graphs()
    found = trained(af.compile(), af.clip_grad_norm(0.1))
    assert num_graphs() == before + 1
    assert close(trained(af.clip_grad_norm(0.1)), found)


@pytest.mark.slow
def test_draws_are_the_states_own():
    """Under inductor a step is a function of its state, and another step draws anew."""
    state, step = begun(af.compile(), model=blocks), af.make_step(loss_fn)
    torch.randn(3)  # what others drew does not matter
    one, first = step(state, rows(), donate=False)
    torch.randn(5)
    two, again = step(state, rows(), donate=False)
    assert differences(tensors(one), tensors(two)) == []
    assert torch.equal(first["loss"], again["loss"])
    still = state.with_params(one.params)
    _, before = step(still, rows(), donate=False)
    _, after = step(one, rows())
    assert not torch.equal(before["loss"], after["loss"])


class Equal(nn.Module):
    """Parameters whose gradients are equal, are the batch itself, or are the loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
        self.c = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x: (m.a * x).sum() + (m.b * x).sum() + m.c.exp(),
        lambda m, x: m.a @ x if x.ndim == 1 else (m.a * x).sum(),
        lambda m, x: m.a @ m.b if x.ndim == 1 else (m.a * x).sum(),
        lambda m, _: m.c.exp(),
    ],
    ids=["each other", "inputs", "parameters", "loss"],
)
def test_a_gradient_lies_in_memory_of_its_own(loss):
    """Scaling gradients in place changes neither each other, nor the batch, nor the loss."""
    clip, x = af.clip_grad_norm(0.1), torch.arange(6.0)
    plain, step = begun(clip, model=Equal), af.make_step(loss)
    compiled = begun(af.compile(), clip, model=Equal)
    for batch in (x, x, torch.ones(2, 6), x):
        plain, expected = step(plain, batch)
        with warnings.catch_warnings(action="ignore"):
            compiled, told = step(compiled, batch)
        assert torch.allclose(expected["loss"], told["loss"])
    assert torch.equal(x, torch.arange(6.0))
    assert close(plain, compiled)


def test_other_states_are_not_compiled_for():
    """Forks, copies and states with other tensors run what was compiled for the first."""
    state, step = begun(quick()), af.make_step(loss_fn)
    state, _ = step(state, rows())
    before = num_graphs()
    fork = state.copy()
    one, _ = step(state, rows(seed=1))
    two, _ = step(fork.with_params(fork.params), rows(seed=1))
    assert differences(tensors(one), tensors(two)) == []
    assert num_graphs() == before


def test_compiling_again_is_told():
    """The warning says what was compiled, at which update, how often and why."""
    torch._dynamo.reset()  # of other tests' sizes
    state, step = begun(quick()), af.make_step(loss_fn)
    state, _ = step(state, rows(8))
    state, _ = step(state, rows(8))
    with recorded_warnings() as told:
        step(state, rows(5), donate=False)
    (message,) = (str(each.message) for each in told)
    assert "loss_fn was compiled again at update 2 (so far 1 times)" in message
    assert "expected 8, actual 5" in message
    assert "dynamic=True" in message
    for size in (6, 7, 8):  # sizes are symbols now
        state, _ = step(state, rows(size))


def test_numbers_that_change_are_told():
    """An extra that is another number each time is named, and a region by its class."""
    step = af.make_step(lambda model, batch, by: loss_fn(model, batch) * by)
    state, _ = step(begun(quick()), rows(), 1.0)
    with pytest.warns(af.errors.RecompilationWarning, match=r"extras\[0\]"):
        step(state, rows(), 2.0)
    state, step = begun(quick(regions=Block), model=blocks), af.make_step(loss_fn)
    state, _ = step(state, rows(8))
    with pytest.warns(af.errors.RecompilationWarning, match="Block was compiled again"):
        step(state, rows(5))


def test_new_functions_are_told():
    """Who makes a loss function anew at each update is told."""
    state = begun(quick())

    def train():
        for i in range(8):
            step = af.make_step(lambda model, batch, by=i: loss_fn(model, batch) + by)
            step(state, rows(), donate=False)

    with pytest.warns(af.errors.RecompilationWarning, match="8 loss functions"):
        train()


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_regions_are_compiled_once(backend):
    """Blocks that are alike share a graph, but for the first one's input without a gradient."""
    before = num_graphs()
    found = trained(af.compile(backend=backend, regions=Block), model=blocks)
    assert num_graphs() == before + 2
    assert close(trained(model=blocks), found)
    named = af.compile(backend=backend, regions=lambda name, _: name in {"1", "2"})
    assert close(trained(model=blocks), trained(named, model=blocks))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        (quick(regions=Block),),
        (quick(fullgraph=False),),
        (af.checkpoint_activations(Block), quick(regions=Block)),
        (quick(regions=Block), af.checkpoint_activations(Block)),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::accelfn.errors.RecompilationWarning")
def test_units_are_compiled_where_they_are_gathered(setup):
    """Under wrap_fsdp regions are compiled inside the hooks that gather them."""
    # simulated ranks share the compiler's cache, so their turns decide which of them compiles

    def train(world, *compiled):
        wrap = af.wrap_fsdp(Block)
        state = begun(wrap, *compiled, model=blocks, world=world)
        step = af.make_step(loss_fn)
        for i in range(3):
            state, _ = step(state, rows(seed=i + world.rank))
        return tensors(state)

    before = num_graphs()
    found = simulate(2, lambda world: train(world, *setup)).results
    assert num_graphs() > before
    for one, other in zip(simulate(2, train), found, strict=True):
        assert differences(one, other, within=1e-6) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        (af.wrap_ddp(),),
        (af.wrap_ddp(static_graph=True),),
        (af.wrap_ddp(find_unused_parameters=True), af.checkpoint_activations(Block)),
        (af.local_sgd(sync_every=2),),
    ],
    ids=repr,
)
def test_on_ranks(how):
    """Ranks with uneven shares train what they train without it, and agree."""

    def train(world, *more):
        state = begun(*how, *more, model=blocks, world=world)
        step = af.make_step(loss_fn)
        for i in range(2):
            state, _ = step(state, rows(4 + world.rank, seed=2 * i + world.rank))
        return tensors(state)

    plain = simulate(2, train).results
    found = simulate(2, lambda world: train(world, quick(dynamic=True))).results
    for one, two in zip(plain, found, strict=True):
        assert differences(one, two, within=1e-5) == []


def test_micro_batches_communicate_once():
    """Under DDP only the last micro-batch reduces, forward and backward being compiled."""

    def reduced(setup):
        def train(world):
            state = begun(af.wrap_ddp(), setup, world=world)
            grads = af.value_and_grad(loss_fn)
            _, into = grads(state, rows(), sync=False)
            _, into = grads(state, rows(), into=into)
            af.apply_grads(state, into)

        log = simulate(2, train).log
        return [(each.op, each.num_bytes) for each in log if each.kind == "all_reduce"]

    assert reduced(quick()) == reduced(None) != []


def test_breaks_in_the_graph():
    """Code that cannot be traced is refused, or with fullgraph=False run between graphs."""

    def breaking(model, batch):
        out = model(batch[0])
        torch._dynamo.graph_break()
        return cross_entropy(out, batch[1])

    with pytest.raises(
        af.errors.CompileError, match=r"breaking cannot be .*\n[^$]*fullgraph"
    ):
        trained(quick(), loss=breaking)
    found = trained(quick(fullgraph=False), loss=breaking)
    assert close(trained(loss=breaking), found)


class Penalty:
    """A mean, or a total, with a penalty on the gradient of what the model was given."""

    def __init__(self, *, is_total):
        self.is_total = is_total

    def __call__(self, model, batch):
        inputs = batch[0].clone().requires_grad_()
        out = model(inputs)
        (grad,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        norms = grad.square().sum(1)
        losses = cross_entropy(out, batch[1], reduction="none") + norms
        if self.is_total:
            return af.Loss(losses.sum(), len(losses), norm=norms.detach().sum())
        return losses.mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_total", "beside"), [(False, ()), (True, (af.accumulate(num_micro_batches=2),))]
)
def test_a_double_backward_is_compiled_on_any_number_of_ranks(is_total, beside):
    """A gradient penalty trains under wrap_ddp what it trains plainly, on one rank and two."""
    data = af.Data(torch.utils.data.TensorDataset(*rows(24)), global_batch_size=8)

    def fn(world, *compiled):
        chain = af.chain(af.shard_data(), af.wrap_ddp(), *beside, *compiled)
        state = af.TrainState.create(
            model=net, optimizer=SGD, setup=chain, data=data, world=world
        )
        step, losses = af.make_step(Penalty(is_total=is_total)), []
        for batch in af.batches(state, until_epoch=1):
            state, metrics = step(state, batch)
            losses.append(metrics.all_reduce_mean(world))
        return tensors(state), losses

    (expected, losses), *_ = simulate(1, fn)
    for size in (1, 2):
        for found, seen in simulate(size, lambda world: fn(world, quick())):
            assert differences(expected, found, within=1e-5) == []
            assert [pytest.approx(each, abs=1e-5) for each in losses] == seen


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "setup", [(af.compile(backend="eager"),), (af.autocast("fp16"), quick())]
)
def test_a_double_backward_that_torch_cannot_compile_is_named(setup, size):
    """On any number of ranks, with what to leave out."""

    def fn(world):
        state = begun(af.wrap_ddp(), *setup, world=world)
        af.make_step(Penalty(is_total=False))(state, rows())

    with pytest.raises(af.errors.CompileError, match="double backward.*Leave out"):
        simulate(size, fn)


@pytest.mark.parametrize("apart", [False, True])
def test_wrong_losses_are_refused_as_ever(apart):
    """What is wrong without compiling too is told in the same words; the state stays."""
    norm = functools.partial(nn.Sequential, nn.Linear(6, 4), nn.BatchNorm1d(4))
    state = begun(quick(fullgraph=not apart), model=norm)
    before = tensors(state)

    def raising(model, batch):
        model(batch[0])
        raise ValueError("mine")

    for loss, error, words in (
        (lambda net, batch: net(batch[0]), LossError, "expected a scalar"),
        (lambda *_: "three", LossError, "returned a str"),
        (lambda net, batch: net(batch[0]).sum().detach(), LossError, "has no gradient"),
        (lambda net, batch: net(batch[0]).sum() / 0, NonFiniteLossError, None),
        (lambda net, b: af.Loss(net(b[0]).sum(), -1), LossError, "0 or more"),
        (raising, ValueError, "mine"),
    ):
        with pytest.raises(error, match=words):
            af.make_step(loss)(state, rows())
    assert differences(before, tensors(state)) == []


def test_no_compiler_is_named(monkeypatch, tmp_path):
    """Where there is no C++ compiler, the error says that one is needed."""
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "fx_graph_cache", False)
    with pytest.raises(af.errors.CompileError, match="needs a C.. compiler"):
        trained(af.compile(), loss=lambda m, batch: m(batch[0]).square().sin().mean())


@pytest.mark.parametrize(
    "others",
    [
        (af.autocast("bf16"), quick(), af.ema(0.5)),
        (quick(), af.autocast("fp16"), af.clip_grad_value(0.1)),
        (af.checkpoint_activations(Block), af.skip_nonfinite(), quick()),
    ],
    ids=repr,
)
def test_it_stands_anywhere(others):
    """Wherever it stands in a chain, all of the loss is compiled."""
    plain = [each for each in others if not isinstance(each, af.compile)]
    assert close(trained(*plain, model=blocks), trained(*others, model=blocks))


def test_what_is_not_compiled():
    """Evaluation runs the plain function; and what torch's compilers warn of is not told."""
    state = begun(quick())
    before = num_graphs()
    data = af.Data(torch.utils.data.TensorDataset(*rows()), global_batch_size=4)
    af.evaluate(state, data, loss_fn)
    assert num_graphs() == before
    with warnings.catch_warnings(action="error"):
        trained(quick(regions=Block), model=blocks)


def test_what_cannot_stand_together():
    """Two of them, an interpreter beside recomputation, and tiny buckets are refused."""
    for chain, words in (
        ((quick(), af.compile(name="other")), "both compile"),
        (
            (af.compile(backend="eager"), af.checkpoint_activations()),
            "different random numbers",
        ),
        ((af.wrap_ddp(bucket_cap_mb=0.5), af.compile()), "bucket_cap_mb"),
    ):
        with pytest.raises(af.errors.CompositionError, match=words):
            af.chain(*chain)
    state = begun(af.compile(regions=nn.Conv2d))
    with pytest.raises(af.errors.ModelError, match=r"Linear, ReLU, Sequential\."):
        af.prepare_engine(state)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": "none"}, "inductor"),
        ({"mode": "fastest"}, "max-autotune"),
        ({"mode": "default", "options": {}}, "pass either mode= or options="),
        ({"mode": "default", "backend": "aot_eager"}, "would ignore them"),
        ({"dynamic": "yes"}, "True or False"),
        ({"fullgraph": None}, "True or False"),
        ({"regions": "Block"}, "module class"),
        ({"regions": ()}, "module class"),
        ({"regions": int}, "module class"),
    ],
)
def test_bad_options(options, says):
    """What torch would not take, or not read, is refused when the transform is made."""
    with pytest.raises(af.errors.ArgumentError, match=says):
        af.compile(**options)
