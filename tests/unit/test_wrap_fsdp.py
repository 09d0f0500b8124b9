# SPDX-License-Identifier: Apache-2.0
"""What `wrap_fsdp` and `wrap_ddp(within=)` refuse, and what others see of a split model."""

import math
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

import accelfn as af
from accelfn import errors
from accelfn.errors import ArgumentError, CompositionError, GradsError, WorldError
from accelfn.testing import simulate
from tests.internals import local, tree
from tests.states import STEP, create

adamw = partial(torch.optim.AdamW, lr=0.1)


class Block(nn.Module):
    """A layer that is called, or asked for its score."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x))

    def score(self, x):
        return self.layer(x).square()


class Net(nn.Module):
    def __init__(self, count=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x, most=None):
        for block in self.blocks[:most]:
            x = block(x)
        return x


def rows(world):
    generator = torch.Generator().manual_seed(world.rank)
    return torch.randn(3, 4, generator=generator)


def begun(world, *setup, model=Net, **options):
    options = {"optimizer": adamw, "model": model, "world": world, **options}
    return create(setup=af.chain(*(setup or (af.wrap_fsdp(),))), **options)


def in_two(fn, *args, **kw):
    return simulate(2, lambda world: fn(world, *args, **kw))


@af.transform
class Drift:
    gives_up: ClassVar[Mapping[str, str]] = {"replicas_agree": "each does as it likes"}

    def after_update(self, state, slot, update):
        return state, slot


def tied():
    net = Net()
    net.blocks[1].layer.weight = net.blocks[0].layer.weight
    return net


def of_two_dtypes():
    net = Net()
    net.blocks[0].layer.bias = nn.Parameter(net.blocks[0].layer.bias.double())
    return net


FSDP = af.wrap_fsdp()
OFFLOADS = af.wrap_fsdp(cpu_offload=True)
ONE_LAYER = partial(nn.Linear, 4, 4, bias=False)
REFUSED = {
    errors.ModelError: [
        (
            {"model": lambda: nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True))},
            "'0.weight' is sparse.*sparse=False",
        ),
        ({"model": tied}, "is shared by two places of the model, unit 'blocks.0'"),
        ({"model": of_two_dtypes}, "unit 'blocks.0' has parameters of several dtypes"),
        ({"model": lambda: nn.Linear(3, 2, dtype=torch.complex64)}, "is complex"),
        ({"setup": [af.wrap_fsdp(nn.Conv2d)]}, "have the classes Block, Linear"),
    ],
    errors.OptimizerError: [
        (
            {"model": ONE_LAYER, "optimizer": partial(kind, lr=0.1)},
            f"{kind.__name__} does not update",
        )
        for kind in (torch.optim.Adafactor, torch.optim.Muon)
    ],
    errors.CompositionError: [
        ({"setup": [FSDP, other]}, words)
        for other, words in (
            (af.wrap_ddp(), "wrap_ddp"),
            (Drift(), "splits one model over the ranks"),
            (af.optimizer_in_backward(), "reduces the gradients of a unit together"),
            (af.compile(), "Pass regions= with the units"),
            (af.compress_grads("fp16"), "af.wrap_ddp\\(\\) reduces"),
        )
    ],
    errors.WorldError: [
        ({"setup": [FSDP, af.local_sgd(sync_every=2)]}, "Set the number of copies"),
        ({"setup": [OFFLOADS]}, "cpu_offload has no effect"),
    ],
}


@pytest.mark.parametrize("error", REFUSED)
def test_what_cannot_be_split_is_refused(error):
    """When composed or when a state is made, with the parameters' names and the way out."""
    for options, words in REFUSED[error]:

        def fn(world, options=options):
            setup = af.chain(*options.get("setup", [FSDP]))
            create(**{"model": Net, **options, "setup": setup}, world=world)

        with pytest.raises(error, match=words):
            simulate(2, fn)


def test_worlds_that_are_not_split_are_refused():
    """For the lack of an axis, of a transform for another, or of values to offload."""
    words = "no transform splits the work along 'tp'"
    with pytest.raises(errors.WorldError, match=words):
        simulate(4, begun, axes={"dp_shard": 2, "tp": 2})
    with pytest.raises(errors.WorldError, match="that axis is missing or has one rank"):
        simulate(4, begun, axes={"dp_replicate": 4})
    with pytest.raises(errors.ModelError, match="Remove cpu_offload there"):
        simulate(2, lambda world: begun(world, OFFLOADS), device="meta")
    alone = begun(None, OFFLOADS)
    assert {param.device.type for param in alone.params.values()} == {"cpu"}


DTYPE, BOTH = "expected a floating-point dtype", "expected True or False"
OPTIONS = [
    ({"units": "blocks"}, "expected a module class"),
    ({"gather_dtype": "bf16"}, DTYPE),
    ({"reduce_dtype": torch.int32}, DTYPE),
    ({"keep_grads": "parts"}, "expected 'whole' or 'sharded'"),
    ({"reshard_after_forward": 1}, BOTH),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS)
def test_options_that_are_none_are_refused(options, words):
    """What was given is in the sentence."""
    with pytest.raises(errors.ArgumentError, match=words):
        af.wrap_fsdp(**options)


def differentiates(net, x):
    mean = net(x).mean()
    torch.autograd.grad(mean, list(net.parameters()), retain_graph=True)
    return mean


def replaces(net, x):
    halved = {name: param / 2 for name, param in net.named_parameters()}
    return torch.func.functional_call(net, halved, (x,)).square().mean()


LOSSES = [
    (differentiates, "autograd.grad for parameters that"),
    (lambda net, x: net.blocks[0].score(x).mean(), "a unit that was not gathered"),
    (replaces, "functional_call"),
]


@pytest.mark.parametrize(("loss", "words"), LOSSES)
def test_losses_that_need_whole_parameters_are_refused(loss, words):
    """By gradients within the loss, another method of a unit, or parameters of its own."""

    def trains(world):
        af.make_step(loss)(begun(world), rows(world))

    def evaluates(world):
        data = af.Data(torch.ones(4, 4), global_batch_size=4)
        af.evaluate(begun(world), data, loss)

    for fn in (trains, evaluates) if loss is replaces else (trains,):
        with pytest.raises(errors.LossError, match=words):
            simulate(2, fn)


def test_rows_that_are_not_trained_are_split():
    """Sparse is what a gradient is, and a frozen layer has none."""

    def model():
        net = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
        net[0].requires_grad_(requires_grad=False)
        return net

    def fn(world):
        state = begun(world, model=model)
        return STEP(state, torch.arange(4))[0].step

    assert [*in_two(fn)] == [1, 1]


class Containers(nn.Module):
    """Layers in containers that have no forward, one of which is in a list."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(4, 4)}), nn.Linear(4, 4)]
        )
        self.scales = nn.ParameterList([torch.ones(4)])
        self.plain = nn.Module()
        self.plain.layer = nn.Linear(4, 4)

    def forward(self, x):
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

    with pytest.raises(errors.ModelError, match=words):
        simulate(size, fn)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        return self.parts[1](self.parts[0](x))


def nested():
    net = Net()
    net.blocks[0] = Nested()
    return net


@pytest.mark.parametrize(("model", "num_gathers"), [(Containers, 5), (nested, 4)])
def test_units_by_default(model, num_gathers):
    """Members of the outermost lists that have a forward; the model trains as on one rank."""

    def fn(world):
        state, _ = STEP(begun(world, model=model), torch.eye(4))
        return af.full_params(state)

    (alone,) = simulate(1, fn)
    run = simulate(2, fn)
    assert all(torch.allclose(run.results[0][n], p) for n, p in alone.items())
    gathers = [entry for entry in run.log if entry.kind == "all_gather_single"]
    assert len(gathers) == num_gathers


CAPTURED = [
    kind
    for kind in vars(torch.optim).values()
    if "capturable" in getattr(getattr(kind, "__init__", None), "__annotations__", {})
]


@pytest.mark.parametrize("kind", CAPTURED)
def test_an_optimizer_that_is_for_accelerators_alone_is_tried(kind):
    """On the host, where torch captures nothing."""
    in_two(begun, optimizer=partial(kind, lr=0.1, capturable=True))


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

    with pytest.raises(errors.LossError, match="double backward.*af.wrap_ddp"):
        in_two(fn, twice=True)
    (alone,) = simulate(1, partial(fn, twice=False))
    for found in in_two(fn, twice=False):
        assert all(torch.allclose(p, found[name]) for name, p in alone.items())


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

    with pytest.raises(
        errors.UnusedParametersError, match="blocks.1.layer.weight.*Other"
    ):
        in_two(fn)
    for moved in in_two(fn, find_unused_parameters=True):
        assert [bool(each.any()) for each in moved.values()] == [
            True,
            True,
            False,
            False,
        ]


def test_every_rank_raises_where_one_makes_a_collective():
    """A unit can be gathered for others alone; `af.all_reduce` needs all ranks."""
    told: list[str] = []

    def loss(net, batch):
        x, world = batch
        if world.is_main:
            af.all_reduce(torch.ones(()), world)
        return net(x).square().mean()

    def fn(world):
        try:
            af.make_step(loss)(begun(world), (rows(world), world))
        except errors.CollectiveMismatchError as error:
            told.append(str(error))
            raise

    with pytest.raises(errors.CollectiveMismatchError):
        in_two(fn)
    assert len(told) == 2
    for error in told:
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
        with pytest.raises(errors.StateError, match="gather=True"):
            af.borrow_model(state).__enter__()

    in_two(fn)


@pytest.mark.parametrize(("keep_grads", "parts"), [("whole", 1), ("sharded", 2)])
def test_memory_is_estimated(keep_grads, parts):
    """Gradients lie whole on each rank until the last micro-batch, where they are kept whole."""

    def estimate(axes, **options):
        wrap = af.wrap_fsdp(keep_grads=keep_grads, **options)
        setup = af.chain(wrap, af.accumulate(num_micro_batches=2))
        return af.memory_estimate(Net, setup, optimizer=adamw, axes=axes)

    axes = {"dp_shard": 2}
    memory = estimate(axes).by_dtype[torch.float32]
    assert memory.grads == 2 * memory.params // parts
    cut = estimate(axes, cpu_offload=True)
    assert len(cut.on_host) == 2 + parts
    assert f"In the host's memory (cpu_offload): {', '.join(cut.on_host)}." in str(cut)
    whole = estimate(None, cpu_offload=True)
    assert (whole.on_host, "host" in str(whole)) == ((), False)


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
    with pytest.raises(errors.WorldError, match=words):
        check(world)


class Odd(nn.Module):
    def __init__(self, shape, dtype):
        super().__init__()
        self.odd = nn.Parameter(
            torch.arange(1, 1 + math.prod(shape)).view(shape).to(dtype)
        )
        self.other = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x):
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


SQUARE = {"dp_replicate": 2, "dp_shard": 2}
WORKER = af.wrap_ddp(within="dp_shard")
EVERY = af.local_sgd(sync_every=2)
COMPUTE = af.value_and_grad(lambda model, x: model(x).mean())


def state_of(world, *setup):
    return create(model=partial(nn.Linear, 1, 1), setup=af.chain(*setup), world=world)


@pytest.mark.parametrize("within", ["tp", "cp", "node", 4, True])
def test_what_is_no_axis_of_samples_is_refused(within):
    """Along the others ranks have the same samples."""
    with pytest.raises(ArgumentError, match="expected an axis .*'dp_replicate' or"):
        af.wrap_ddp(within=within)


@af.transform
class Reduces:
    def reduce(self, grads, slot, update):
        return grads, slot


def test_what_workers_cannot_stand_beside_is_refused():
    """Workers need a transform that brings them together, and no `reduce` of one's own."""
    with pytest.raises(CompositionError, match=r"no transform synchronizes .* Add"):
        state_of(af.World(), WORKER)
    with pytest.raises(CompositionError, match=r'af.wrap_ddp\(within="dp_shard"\)'):
        af.chain(af.wrap_ddp(), EVERY)
    with pytest.raises(CompositionError, match="no gradients to reduce, because"):
        af.chain(WORKER, Reduces())


@pytest.mark.parametrize("axes", [None, {"dp_replicate": 2}])
def test_an_axis_that_is_not_there_is_refused(axes):
    """When the state is made, with the axes that there are."""
    with pytest.raises(WorldError, match=r"needs a world with the axis 'dp_shard'"):
        simulate(2, lambda world: state_of(world, WORKER, EVERY), axes=axes)


def test_gradients_that_stay_on_a_rank_are_refused():
    """`apply_grads` would let the ranks of a worker drift apart."""

    def program(world):
        state = state_of(world, WORKER, EVERY)
        _, grads = COMPUTE(state, torch.ones(1, 1), sync=False)
        af.apply_grads(state, grads)

    with pytest.raises(GradsError, match="not reduced over the 2 ranks"):
        simulate(4, program, axes=SQUARE)


wide = partial(create, model=partial(nn.Linear, 3, 5, dtype=torch.float64), setup=FSDP)


def test_summands_of_a_tensor_are_not_saved(tmp_path):
    """What ranks have to be added up is refused by its name, and nothing is written."""

    def fn(world):
        for name, placements in (
            ("first", (Partial(), Shard(0))),
            ("last", (Shard(0), Partial())),
        ):
            mine = DTensor.from_local(
                torch.ones(2), world.mesh, placements, run_check=False
            )
            state = wide(world=world).with_slot("mine", {name: mine})
            said = rf"slots\.mine\.{name} is a DTensor with the placement P.*redistribute\(\)"
            with pytest.raises(af.errors.CheckpointWriteError, match=said):
                af.save(state, tmp_path / "saved")

    simulate(4, fn, axes=SQUARE)
    assert list(tmp_path.iterdir()) == []


class Pretrained(nn.Linear):
    def save_pretrained(self, directory):
        torch.save(self.state_dict(), directory / "all.pt")


WHOLES = {
    "af.full_params": lambda state, _: af.full_params(state),
    "af.snapshot_model": lambda state, _: af.snapshot_model(state),
    "af.borrow_model": lambda state, _: af.borrow_model(state, gather=True).__enter__(),
    "gather what is exported": lambda state, folder: af.export_model(
        state, folder / "a"
    ),
    "lay out anew": lambda state, _: state.with_setup(af.chain(af.wrap_ddp())),
}


@pytest.mark.parametrize("label", WHOLES)
def test_a_gather_says_what_it_is_for(label, tmp_path):
    """One call for the whole model; a rank that waits in vain is told in which."""

    def fn(world, *, leaves=False):
        state = wide(world=world)
        if not (leaves and world.rank):
            WHOLES[label](state, tmp_path / f"{leaves}")

    (tmp_path / "False").mkdir()
    (tmp_path / "True").mkdir()
    log = simulate(2, fn).log
    assert [each.label for each in log].count(label) == 1
    with pytest.raises(af.errors.DeadlockError, match=f"{label}|export: begin"):
        simulate(2, partial(fn, leaves=True))


def test_what_a_model_writes_by_itself_is_gathered_at_once(tmp_path):
    """`save_pretrained` takes one call, too."""

    def fn(world):
        state = create(model=lambda: Pretrained(3, 5), setup=FSDP, world=world)
        af.save_pretrained(state, tmp_path / "model")
        return af.full_params(state)

    run = simulate(2, fn)
    assert [e.label for e in run.log].count("gather what is exported") == 1
    written = torch.load(tmp_path / "model" / "all.pt")
    assert all(torch.equal(run[0][name], written[name]) for name in written)


IN_PLACE = {
    "mul_": (lambda some, _: tree.mul_(some, 3.0), lambda one, _: one * 3),
    "mul_ by a tensor": (
        lambda some, _: tree.mul_(some, torch.tensor(3.0)),
        lambda one, _: one * 3,
    ),
    "div_": (lambda some, _: tree.div_(some, 4.0), lambda one, _: one / 4),
    "add_": (tree.add_, lambda one, other: one + other),
    "add_ a part": (
        lambda some, others: tree.add_(some, others, alpha=0.5),
        lambda one, other: one + other / 2,
    ),
    "lerp_": (
        lambda some, others: tree.lerp_(some, others, 0.25),
        lambda one, other: one + (other - one) / 4,
    ),
    "copy_": (tree.copy_, lambda _, other: other),
    "clamp_": (
        lambda some, _: tree.clamp_(some, -2.0, 3.0),
        lambda one, _: one.clamp(-2, 3),
    ),
}


def halves(mesh, rank, *wholes, dtype=torch.float32):
    """Return a rank's rows of matrices: as tensors, and as parts of what is split."""
    parts = [each[2 * rank : 2 * rank + 2].to(dtype) for each in wholes]
    split = [
        DTensor.from_local(each.clone(), mesh, [Shard(0)], run_check=False)
        for each in parts
    ]
    return parts, split


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_list_of_whole_and_split_tensors_is_changed_in_one_call(name, dtype):
    """Of a split one the part of the rank is, whatever stands beside it; of none nothing."""
    change, expected = IN_PLACE[name]
    one, other = torch.arange(-8.0, 8).view(4, 4), torch.arange(16.0).view(4, 4) ** 2

    def each_rank(world):
        parts, split = halves(world.mesh, world.rank, one, other, dtype=dtype)
        for some, others in (
            ([parts[0].clone(), split[0]], [parts[1], split[1]]),
            ([split[0], parts[0].clone()], [split[1], parts[1]]),
        ):
            before = [local(each).clone() for each in some]
            change(iter(some), iter(others))
            for was, found in zip(before, some, strict=True):
                assert torch.equal(local(found), expected(was, parts[1]))
        change([], [])

    simulate(2, each_rank, axes={"dp_shard": 2})
