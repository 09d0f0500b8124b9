# SPDX-License-Identifier: Apache-2.0
"""What `wrap_fsdp` refuses, and what of a split model is seen by others."""

import math
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import local

adamw = partial(torch.optim.AdamW, lr=0.1)


@af.transform
class Drift:
    """Lets each rank do as it likes."""

    gives_up: ClassVar[Mapping[str, str]] = {"replicas_agree": "each does as it likes"}

    def after_update(
        self, state: af.TrainState, slot: Any, update: Any
    ) -> tuple[af.TrainState, Any]:
        return state, slot


class Block(nn.Module):
    """A layer that is called, or asked for its score."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square()


class Net(nn.Module):
    """Blocks, of which each batch needs one more."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor, most: int | None = None) -> torch.Tensor:
        for block in self.blocks[:most]:
            x = block(x)
        return x


def rows(world: af.World) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.rank)
    return torch.randn(3, 4, generator=generator)


def loss_fn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def begun(
    world: af.World, *setup: object, model: Any = Net, **kw: Any
) -> af.TrainState:
    setup = setup or (af.wrap_fsdp(),)
    return af.TrainState.create(
        model=model,
        optimizer=kw.pop("optimizer", adamw),
        setup=af.chain(*setup),
        world=world,
        **kw,
    )


def in_two(fn: Any, *args: Any, **kw: Any) -> Any:
    return simulate(2, lambda world: fn(world, *args, **kw))


def tied() -> nn.Module:
    net = Net()
    net.blocks[1].layer.weight = net.blocks[0].layer.weight
    return net


def of_two_dtypes() -> nn.Module:
    net = Net()
    net.blocks[0].layer.bias = nn.Parameter(net.blocks[0].layer.bias.double())
    return net


def of_complex_numbers() -> nn.Module:
    return nn.Linear(3, 2, dtype=torch.complex64)


def of_sparse_gradients() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True))


UNSPLITTABLE = {
    "sparse gradients": (of_sparse_gradients, "'0.weight' is sparse.*sparse=False"),
    "tied": (tied, "is shared by two places of the model, unit 'blocks.0'"),
    "two dtypes": (of_two_dtypes, "unit 'blocks.0' has parameters of several dtypes"),
    "complex": (of_complex_numbers, "is complex"),
}


@pytest.mark.parametrize("case", UNSPLITTABLE)
def test_what_cannot_be_split_is_refused(case):
    """When the state is made, with the parameters' names."""
    model, words = UNSPLITTABLE[case]
    with pytest.raises(af.errors.ModelError, match=words):
        in_two(begun, model=model)


def test_rows_that_are_not_trained_are_split():
    """Sparse is what a gradient is, and a frozen layer has none."""

    def model():
        net = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
        net[0].requires_grad_(requires_grad=False)
        return net

    def fn(world):
        state = begun(world, model=model)
        return af.make_step(loss_fn)(state, torch.arange(4))[0].step

    assert [*in_two(fn)] == [1, 1]


def test_units_that_match_nothing_are_refused():
    """The classes that there are are named."""
    with pytest.raises(af.errors.ModelError, match="have the classes Block, Linear"):
        in_two(begun, af.wrap_fsdp(nn.Conv2d))


class Containers(nn.Module):
    """Layers in containers that have no forward, one of which is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(4, 4)}), nn.Linear(4, 4)]
        )
        self.scales = nn.ParameterList([torch.ones(4)])
        self.plain = nn.Module()
        self.plain.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[1](self.parts[0]["up"](x)) * self.scales[0]
        return self.plain.layer(torch.tanh(x))


CONTAINERS = {
    "list": (nn.ModuleList, "'parts', a ModuleList.*Linear, ModuleDict"),
    "dict": (nn.ModuleDict, "'parts.0', a ModuleDict.*class: Linear"),
    "parameters": (nn.ParameterList, "'scales', a ParameterList.*that uses it"),
    "by name": (lambda name, _: name == "plain", "'plain', a Module.*class: Linear"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", CONTAINERS)
@pytest.mark.parametrize(
    "transform",
    [
        af.wrap_fsdp,
        af.checkpoint_activations,
        lambda chosen: af.compile(backend="eager", regions=chosen),
    ],
)
def test_what_has_no_forward_is_no_unit(transform, case, size):
    """On any number of ranks containers are rejected, with the classes to choose."""
    chosen, words = CONTAINERS[case]

    def fn(world):
        af.prepare_engine(begun(world, transform(chosen), model=Containers))

    with pytest.raises(af.errors.ModelError, match=words):
        simulate(size, fn)


def test_units_by_default_have_a_forward():
    """Of a container in a list its members are units, and the model trains as on one rank."""

    def fn(world):
        state = begun(world, model=Containers)
        state, _ = af.make_step(loss_fn)(state, torch.eye(4))
        return af.full_params(state)

    (alone,) = simulate(1, fn)
    run = in_two(fn)
    assert all(torch.allclose(run.results[0][n], p) for n, p in alone.items())
    gathers = [entry for entry in run.log if entry.kind == "all_gather_single"]
    assert len(gathers) == 2 * 2 + 1


def test_units_are_of_the_outermost_list():
    """What a block has in a list of its own is gathered with it."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    def model():
        net = Net()
        net.blocks[0] = Nested()
        return net

    def fn(world):
        af.make_step(loss_fn)(begun(world, model=model), rows(world))

    log = in_two(fn).log
    gathers = [entry for entry in log if entry.kind == "all_gather_single"]
    assert len(gathers) == 2 * 2


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_that_couples_elements_is_refused(name):
    """It is tried, whole and in parts; one that goes element by element is not named."""
    optimizer = partial(getattr(torch.optim, name), lr=0.1)
    model = partial(nn.Linear, 4, 4, bias=False)
    with pytest.raises(af.errors.OptimizerError, match=f"{name} does not update"):
        in_two(begun, model=model, optimizer=optimizer)


CAPTURED = [
    kind
    for kind in vars(torch.optim).values()
    if "capturable" in getattr(getattr(kind, "__init__", None), "__annotations__", {})
]


@pytest.mark.parametrize("kind", CAPTURED)
def test_an_optimizer_that_is_for_accelerators_alone_is_tried(kind):
    """On the host, where torch captures nothing."""
    in_two(begun, optimizer=partial(kind, lr=0.1, capturable=True))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"dp_shard": 2, "tp": 2}, "no transform splits the work along 'tp'"),
        ({"dp_replicate": 4}, "that axis is missing or has one rank"),
    ],
)
def test_worlds_that_are_not_split_are_refused(axes, words):
    """When the state is made."""
    with pytest.raises(af.errors.WorldError, match=words):
        simulate(4, begun, axes=axes)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (af.wrap_ddp(), "wrap_ddp"),
        (Drift(), "splits one model over the ranks"),
        (af.optimizer_in_backward(), "reduces the gradients of a unit together"),
        (af.compile(), "Pass regions= with the units"),
        (af.compress_grads("fp16"), "af.wrap_ddp\\(\\) reduces"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused(other, words):
    """By a sentence with the way out, when composed or when a state is made."""
    with pytest.raises(af.errors.CompositionError, match=words):
        in_two(begun, af.wrap_fsdp(), other)


def test_copies_that_train_apart_are_counted_by_axes():
    """Without any, all ranks have one copy together."""
    with pytest.raises(af.errors.WorldError, match="Set the number of copies"):
        in_two(begun, af.wrap_fsdp(), af.local_sgd(sync_every=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"units": "blocks"}, "expected a module class"),
        ({"gather_dtype": "bf16"}, "expected a floating-point dtype"),
        ({"reduce_dtype": torch.int32}, "expected a floating-point dtype"),
        ({"keep_grads": "parts"}, "expected 'whole' or 'sharded'"),
        ({"reshard_after_forward": 1}, "expected True or False"),
    ],
)
def test_options_that_are_none_are_refused(options, words):
    """What was given is in the sentence."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        af.wrap_fsdp(**options)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_double_backward_is_rejected(reshard):
    """A gradient penalty is named; gradients that nothing differentiates are right."""

    def loss(net, x, *, twice):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=twice)
        return net(x + grad).square().mean()

    def fn(world, *, twice):
        state = begun(world, af.wrap_fsdp(reshard_after_forward=reshard))
        step = af.make_step(partial(loss, twice=twice))
        return af.full_params(step(state, torch.eye(4))[0])

    with pytest.raises(af.errors.LossError, match="double backward.*af.wrap_ddp"):
        in_two(fn, twice=True)
    (alone,) = simulate(1, partial(fn, twice=False))
    for found in in_two(fn, twice=False):
        assert all(torch.allclose(p, found[name]) for name, p in alone.items())


def test_gradients_of_split_parameters_within_the_loss_are_refused():
    """On all ranks, before anything is trained."""

    def loss(net, x):
        mean = net(x).mean()
        torch.autograd.grad(mean, list(net.parameters()), retain_graph=True)
        return mean

    def fn(world):
        af.make_step(loss)(begun(world), rows(world))

    with pytest.raises(af.errors.LossError, match="autograd.grad for parameters that"):
        in_two(fn)


def test_another_method_of_a_unit_is_refused():
    """Its parameters were not gathered."""

    def scored(net, x):
        return net.blocks[0].score(x).mean()

    def fn(world):
        af.make_step(scored)(begun(world), rows(world))

    with pytest.raises(af.errors.LossError, match="a unit that was not gathered"):
        in_two(fn)


def test_parameters_that_take_no_part_are_named():
    """The rank that sees it says so; find_unused_parameters leaves them as they are."""

    def half(net, x):
        return net.blocks[0](x).square().mean()

    def fn(world, **options):
        state = begun(world, af.wrap_fsdp(**options))
        before = af.full_params(state, at="train")
        state, _ = af.make_step(half)(state, rows(world))
        after = af.full_params(state, at="train")
        return {name: after[name] - before[name] for name in before}

    with pytest.raises(af.errors.UnusedParametersError, match="blocks.1.layer.weight"):
        in_two(fn)
    for moved in in_two(fn, find_unused_parameters=True):
        assert [bool(each.any()) for each in moved.values()] == [
            True,
            True,
            False,
            False,
        ]


def test_a_part_of_an_earlier_micro_batch_stays():
    """Though the last one comes by less of the model."""

    def deep(net, batch):
        x, most = batch
        return net(x, most).square().mean()

    def fn(world, *setup):
        state = begun(world, *setup, optimizer=partial(torch.optim.SGD, lr=0.1))
        compute = af.value_and_grad(deep)
        batch = rows(world)
        _, grads = compute(state, (batch, 2), sync=False)
        _, grads = compute(state, (batch, 1), into=grads)
        return af.full_params(af.apply_grads(state, grads), at="train")

    unused = partial(af.wrap_fsdp, find_unused_parameters=True)
    whole, parts = (in_two(fn, unused(keep_grads=way)) for way in ("whole", "sharded"))
    replicas = in_two(fn, af.wrap_ddp(find_unused_parameters=True))
    for one, two, three in zip(whole, parts, replicas, strict=True):
        for name, param in one.items():
            assert torch.allclose(param, two[name], atol=1e-6)
            assert torch.allclose(param, three[name], atol=1e-6)


@pytest.mark.parametrize("wrap", [af.wrap_ddp, af.wrap_fsdp])
def test_every_rank_raises_what_one_left_out(wrap):
    """Before its optimizer runs, in the last micro-batch too; some are named, the rest counted."""
    errors: list[Exception] = []

    def loss(net, batch):
        return net(*batch).square().mean()

    def fn(world):
        several = af.accumulate(num_micro_batches=2)
        state = begun(world, wrap(), several, model=partial(Net, 5))
        before = {n: local(p).clone() for n, p in state.params.items()}
        whole, part = (rows(world), 5), (rows(world), 1 if world.rank else 5)
        try:
            af.make_step(loss)(
                state, [whole, part] if wrap is af.wrap_ddp else [part] * 2
            )
        except af.errors.Error as error:
            errors.append(error)
            assert all(
                torch.equal(local(p), before[n]) for n, p in state.params.items()
            )
            raise

    with pytest.raises(
        af.errors.UnusedParametersError, match=r"^Parameters took no part .*\. Other"
    ):
        in_two(fn)
    assert len(errors) == 2


def test_every_rank_raises_where_one_makes_a_collective():
    """A unit can be gathered for others alone; `af.all_reduce` needs all ranks."""
    errors: list[str] = []

    def loss(net, batch):
        x, world = batch
        if world.is_main:
            af.all_reduce(torch.ones(()), world)
        return net(x).square().mean()

    def fn(world):
        try:
            af.make_step(loss)(begun(world), (rows(world), world))
        except af.errors.CollectiveMismatchError as error:
            errors.append(str(error))
            raise

    with pytest.raises(af.errors.CollectiveMismatchError):
        in_two(fn)
    assert len(errors) == 2
    for error in errors:
        assert "rank 0 calls 'all_reduce'; rank 1 ends its pass." in error


def test_ranks_predict_in_different_numbers_of_calls():
    """As a loop that generates does: units are gathered for whoever still needs them."""

    def fn(world):
        state = begun(world, model=partial(Net, 3))
        held_out = torch.arange(16.0).view(4, 4) / 16

        def predict(net, x):
            for _ in range(1 + int(4 * x[0, 0])):
                x = net(x)
            return x

        return [
            *af.predict(state, af.Data(held_out, global_batch_size=world.size), predict)
        ]

    (alone,) = simulate(1, fn)
    for found in in_two(fn):
        torch.testing.assert_close(found, alone)


class Either(nn.Module):
    """A unit of two layers, of which a batch needs the first, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both else x


@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}, set()])
def test_a_part_of_a_unit_is_left_out_by_one_rank(ranks):
    """It has the gradient of the others; what all leave out has none, as under replicas."""

    def loss(net, batch):
        return net[0](*batch).square().mean()

    def fn(world, wrap):
        model = lambda: nn.ModuleList([Either()])  # noqa: E731 - drawn on each rank
        state = begun(world, wrap(find_unused_parameters=True), model=model)
        step = af.make_step(loss)
        for _ in range(2):
            state, _ = step(state, (rows(world), world.rank in ranks))
        return af.full_params(state, at="train")

    split, replicas = (in_two(fn, wrap) for wrap in (af.wrap_fsdp, af.wrap_ddp))
    for one, other in zip(split, replicas, strict=True):
        for name, param in one.items():
            assert torch.allclose(param, other[name], atol=1e-6)


class Centred(nn.Module):
    """A layer of what is left when the running mean is taken off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return self.layer(x - self.mean)


def test_buffers_are_those_of_replicas():
    """Ranks begin an update with rank 0's, and each micro-batch goes on from its rank's."""

    def fn(world, wrap):
        several = af.accumulate(num_micro_batches=2)
        state = begun(world, wrap, several, model=Centred)
        step = af.make_step(loss_fn)
        for i in range(3):
            values = [rows(world) + i, rows(world) * i]
            state, _ = step(state, af.micro_batches(torch.cat(values), 2))
        return {**af.full_params(state, at="train"), **state.buffers}

    split, replicas = (in_two(fn, wrap) for wrap in (af.wrap_fsdp(), af.wrap_ddp()))
    for one, other in zip(split, replicas, strict=True):
        for name, value in one.items():
            assert torch.allclose(value, other[name], atol=1e-6), name


def test_a_world_of_one_is_whole():
    """It trains as without it, and its tensors are torch's own."""
    world = af.World.single(device="cpu")
    states = [begun(world, setup) for setup in (af.wrap_fsdp(), af.identity())]
    step = af.make_step(loss_fn)
    for i, state in enumerate(states):
        states[i], _ = step(state, rows(world))
    for name, param in states[0].params.items():
        assert type(param) is torch.Tensor
        assert torch.equal(param, states[1].params[name])


def test_parameters_that_are_put_in_are_cut():
    """`with_params` takes whole ones on each rank."""

    def fn(world):
        state = begun(world)
        whole = {n: torch.ones(p.shape) for n, p in state.params.items()}
        state = state.with_params(whole)
        state, _ = af.make_step(loss_fn)(state, rows(world))
        return [tuple(local(p).shape) for p in state.params.values()]

    assert list(in_two(fn)) == [[(2, 4), (2,), (2, 4), (2,)]] * 2


def test_averages_are_evaluated():
    """By `evaluate` and `predict`, one unit at a time, as by a module that holds them."""

    def fn(world):
        state, step = begun(world, af.wrap_fsdp(), af.ema(0.9)), af.make_step(loss_fn)
        for _ in range(3):
            state, _ = step(state, rows(world))
        held_out = torch.randn(4, 4, generator=torch.Generator().manual_seed(7))
        data = af.Data(held_out, global_batch_size=2)
        found = af.evaluate(state, data, loss_fn)["loss"]
        with af.borrow_model(state, at="eval", gather=True) as net, torch.no_grad():
            expected = loss_fn(net, held_out).item()
        assert found == pytest.approx(expected, rel=1e-5)

    in_two(fn)


def test_what_is_lent_is_whole():
    """A module that is lent or frozen has plain tensors; without gather=True none is lent."""

    def fn(world):
        state = begun(world)
        with af.borrow_model(state, gather=True) as net:
            lent = [type(param.data) for param in net.parameters()]
        assert {
            *lent,
            *(type(p.data) for p in af.snapshot_model(state).parameters()),
        } == {torch.Tensor}
        with pytest.raises(af.errors.StateError, match="gather=True"):
            af.borrow_model(state).__enter__()

    in_two(fn)


@pytest.mark.parametrize(("keep_grads", "parts"), [("whole", 1), ("sharded", 2)])
def test_whole_gradients_are_estimated(keep_grads, parts):
    """Until the last micro-batch each rank has all of them, where they are kept whole."""
    setup = af.chain(
        af.wrap_fsdp(keep_grads=keep_grads), af.accumulate(num_micro_batches=2)
    )
    estimate = af.memory_estimate(
        Net, setup, optimizer=adamw, axes={"dp_shard": 2}
    ).by_dtype[torch.float32]
    assert estimate.grads == 2 * estimate.params // parts


@pytest.mark.parametrize(("keep_grads", "names"), [("whole", 3), ("sharded", 4)])
def test_what_lies_on_the_host_is_estimated(keep_grads, names):
    """Gradients too, unless they wait whole; in a world of one nothing does."""
    setup = af.chain(
        af.wrap_fsdp(keep_grads=keep_grads, cpu_offload=True),
        af.accumulate(num_micro_batches=2),
    )
    cut = af.memory_estimate(Net, setup, optimizer=adamw, axes={"dp_shard": 2})
    assert len(cut.on_host) == names
    assert f"In the host's memory (cpu_offload): {', '.join(cut.on_host)}." in str(cut)
    whole = af.memory_estimate(Net, setup, optimizer=adamw)
    assert (whole.on_host, "host" in str(whole)) == ((), False)


def test_nothing_is_offloaded_from_the_cpu():
    """Several ranks are refused by a sentence; one has all there, as it is asked for."""
    setup = af.wrap_fsdp(cpu_offload=True)

    def fn(world):
        with pytest.raises(af.errors.WorldError, match="cpu_offload has no effect"):
            af.TrainState.create(model=Net, optimizer=adamw, setup=setup, world=world)

    in_two(fn)
    alone = af.TrainState.create(model=Net, optimizer=adamw, setup=setup)
    assert {param.device.type for param in alone.params.values()} == {"cpu"}


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_what_lies_on_the_host_is_summed_there(kind, backend, joins):
    """Ranks of GPUs that nothing joins on the CPU are refused, with a backend that does."""
    connection = SimpleNamespace(joins=lambda device: joins or device.type != "cpu")
    world = SimpleNamespace(
        device=torch.device(kind), loss=SimpleNamespace(size=2), connection=connection
    )
    check = af.wrap_fsdp(cpu_offload=True)._check_offload
    if joins:
        check(world)
        return
    words = rf'does not connect the CPUs.*backend="cpu:gloo,{kind}:{backend}"'
    with pytest.raises(af.errors.WorldError, match=words):
        check(world)


def test_nothing_is_offloaded_where_nothing_has_values():
    """On the meta device it is refused by a sentence: ranks send the same without it."""

    def fn(world):
        setup = af.wrap_fsdp(cpu_offload=True)
        with pytest.raises(af.errors.ModelError, match="Remove cpu_offload there"):
            af.TrainState.create(model=Net, optimizer=adamw, setup=setup, world=world)

    simulate(2, fn, device="meta")


class Odd(nn.Module):
    """A parameter of some shape and dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.odd = nn.Parameter(
            torch.arange(1, 1 + math.prod(shape)).view(shape).to(dtype)
        )
        self.other = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.other) * (self.odd.square().sum() + self.other.sum())


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,), (0, 2), (5, 1, 2)])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_any_dtype_and_shape(dtype, shape):
    """A parameter stays of its dtype, and is what one rank makes of it."""

    def fn(world, *setup):
        optimizer = partial(torch.optim.SGD, lr=0.125, momentum=0.5)
        state = begun(
            world, *setup, model=partial(Odd, shape, dtype), optimizer=optimizer
        )
        step = af.make_step(lambda net, x: net(x).float().mean())
        for _ in range(2):
            state, _ = step(state, torch.full((2,), 0.25))
        return af.full_params(state, at="train")

    (alone,) = simulate(1, lambda world: fn(world, af.identity()))
    within = 8 * torch.finfo(dtype).eps
    for found in simulate(3, fn):
        for name, param in alone.items():
            assert (found[name].dtype, found[name].shape) == (dtype, param.shape)
            assert torch.allclose(param, found[name], rtol=within, atol=within)


@pytest.mark.parametrize("evaluates", [False, True])
def test_other_parameters_in_a_unit_are_refused(evaluates):
    """`functional_call` in a loss would compute with the unit's own parameters."""

    def loss_fn(model, batch):
        halved = {name: param / 2 for name, param in model.named_parameters()}
        return torch.func.functional_call(model, halved, (batch,)).square().mean()

    def rank(world):
        state = af.TrainState.create(
            model=Net,
            optimizer=adamw,
            data=af.Data(torch.ones(4, 4), global_batch_size=4),
            setup=af.chain(af.shard_data(), af.wrap_fsdp()),
            world=world,
        )
        batch, step = next(iter(af.batches(state))), af.make_step(loss_fn)
        data = state.data
        run = partial(af.evaluate, state, data, loss_fn) if evaluates else None
        with pytest.raises(af.errors.LossError, match="functional_call"):
            (run or partial(step, state, batch))()

    simulate(2, rank)
