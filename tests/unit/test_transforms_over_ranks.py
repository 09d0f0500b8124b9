# SPDX-License-Identifier: Apache-2.0
"""What compression, batch normalisation over ranks and updates in a backward pass take."""

import functools
import re
import warnings

import attrs
import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.breaking import Refuses
from tests.states import linear_state

LOW_RANK = af.compress_grads("powersgd")
IN_BACKWARD = af.optimizer_in_backward()

PAIRS = {
    "two compressions": (
        af.compress_grads("fp16"),
        af.compress_grads("bf16", name="other"),
    ),
    "unused parameters": (LOW_RANK, af.wrap_ddp(find_unused_parameters=True)),
    "static graph": (LOW_RANK, af.wrap_ddp(static_graph=True)),
    "norms apart": (af.sync_batchnorm(), af.local_sgd(sync_every=2)),
    "norms in a graph": (af.sync_batchnorm(), af.compile()),
    "clipping": (IN_BACKWARD, af.clip_grad_norm(1.0)),
    "clipping by value": (IN_BACKWARD, af.clip_grad_value(1.0)),
    "skipping": (IN_BACKWARD, af.skip_nonfinite()),
    "fp16": (IN_BACKWARD, af.autocast("fp16")),
    "accumulation": (IN_BACKWARD, af.accumulate(num_micro_batches=2)),
    "local updates": (IN_BACKWARD, af.local_sgd(sync_every=2)),
    "compiling": (IN_BACKWARD, af.compile()),
    "looking for unused": (IN_BACKWARD, af.wrap_ddp(find_unused_parameters=True)),
    "twice": (IN_BACKWARD, af.optimizer_in_backward(name="other")),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("flipped", [False, True])
def test_pairs_without_meaning(pair, flipped):
    """They are refused when composed, in either order, both named, and say what to do."""
    one, two = PAIRS[pair][:: -1 if flipped else 1]
    with pytest.raises(
        af.errors.CompositionError, match=r"Leave out|Keep one|Pass fullgraph"
    ):
        af.chain(one, two)


def create(world, model, setup):
    return af.TrainState.create(
        model=model,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        setup=setup,
        world=world,
    )


@pytest.mark.parametrize("method", ["fp16", "powersgd"])
def test_nothing_to_compress(method):
    """Without DistributedDataParallel it would be without effect, so it is refused."""
    with pytest.raises(af.errors.CompositionError, match="wrap_ddp"):
        create(af.World.single(), lambda: nn.Linear(2, 2), af.compress_grads(method))


@pytest.mark.parametrize("option", ["matrix_approximation_rank", "start_powerSGD_iter"])
def test_options_of_another_method(option):
    """An option that the method has no use for is refused."""
    with pytest.raises(af.errors.ArgumentError, match="is only for 'powersgd'"):
        af.compress_grads("fp16", **{option: 2})


class Doubled(nn.BatchNorm1d):
    """Batch normalisation with a forward of its own."""

    def forward(self, given):
        return 2 * super().forward(given)


def test_a_norm_of_its_own_is_refused_when_built():
    """What its forward does besides would be left out, so the layer is named."""
    setup = af.chain(af.wrap_ddp(), af.sync_batchnorm())

    def build(world):
        net = lambda: nn.Sequential(nn.Linear(2, 2), Doubled(2))  # noqa: E731
        af.prepare_engine(create(world, net, setup))

    with pytest.raises(af.errors.ModelError, match="'1' is a Doubled"):
        simulate(2, build)


@af.transform
class Converts:
    """Makes torch's own layers of all ranks, or of another group."""

    is_own: bool

    def module(self, module, state):
        group = object() if self.is_own else state.definition.copy.group
        return nn.SyncBatchNorm.convert_sync_batchnorm(module, group)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_norm_over_a_group_of_its_own_is_refused_when_built(is_own):
    """A layer that another transform gave other ranks is named; that of the same is taken."""
    setup = af.chain(af.wrap_ddp(), Converts(is_own), af.sync_batchnorm())

    def build(world):
        net = lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # noqa: E731
        af.prepare_engine(create(world, net, setup))

    if not is_own:
        simulate(2, build)
        return
    with pytest.raises(
        af.errors.ModelError, match="'1' is a SyncBatchNorm with its own process"
    ):
        simulate(2, build)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.GroupNorm, ["has no effect: .*torch's BatchNorm"]),
        (nn.InstanceNorm1d, ["has no effect: .*torch's BatchNorm"]),
        (nn.BatchNorm1d, []),
        (nn.SyncBatchNorm, []),
    ],
)
def test_a_model_without_layers_to_synchronise_is_told(layer, told, size):
    """Once, by rank 0; layers of another kind, or of somebody's own, would stay apart."""
    setup = af.chain(af.wrap_ddp(), af.sync_batchnorm())

    def build(world):
        norm = layer(2, 2) if layer is nn.GroupNorm else layer(2)
        af.prepare_engine(
            create(world, lambda: nn.Sequential(nn.Linear(2, 2), norm), setup)
        )

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        simulate(size, build)
    found = [
        str(each.message) for each in said if each.category is af.errors.AccelfnWarning
    ]
    assert len(found) == len(told)
    assert all(map(re.search, told, found))


def test_layers_of_torchs_own_class_are_taken():
    """SyncBatchNorm, which needs a GPU, trains on CPUs as BatchNorm of all ranks."""
    setup = af.chain(af.wrap_ddp(), af.sync_batchnorm())

    def train(world, layer, setup):
        net = lambda: nn.Sequential(nn.Linear(2, 2), layer(2))  # noqa: E731
        state = create(world, net, setup)
        values = torch.arange(16.0).reshape(8, 2).square() / 100
        share = values.tensor_split(world.size)[world.rank]
        step = af.make_step(lambda model, x: (model(x) - x).square().mean())
        return step(state, share)[0].params

    plain = train(af.World.single(), nn.BatchNorm1d, af.chain())
    for params in simulate(
        2, lambda world: train(world, nn.SyncBatchNorm, setup)
    ).results:
        for name, expected in plain.items():
            assert torch.allclose(params[name], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_16_bits(dtype):
    """Outputs have the dtype of the inputs, and statistics are of float32 sums."""
    setup = af.chain(af.wrap_ddp(), af.sync_batchnorm())

    def train(world):
        state = create(world, lambda: nn.BatchNorm1d(2), setup)
        values = torch.arange(12.0).reshape(6, 2).to(dtype)[world.rank :: 2]

        def loss_fn(model, x):
            out = model(x)
            assert out.dtype is dtype
            return out.float().square().mean()

        return af.make_step(loss_fn)(state, values)[0].buffers

    first, second = simulate(2, train).results
    assert torch.allclose(first["running_mean"], torch.tensor([0.5, 0.6]))
    assert torch.equal(first["running_var"], second["running_var"])


def test_one_value_a_channel_over_all_ranks():
    """A batch of one sample has no variance, on any number of ranks: torch's own error."""
    setup = af.chain(af.shard_data(), af.wrap_ddp(), af.sync_batchnorm())

    def train(world):
        state = af.TrainState.create(
            model=lambda: nn.BatchNorm1d(2),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            data=af.Data(torch.ones(1, 2), global_batch_size=1),
            setup=setup,
            world=world,
        )
        step = af.make_step(lambda model, x: model(x).sum())
        step(state, next(iter(af.batches(state))))

    with pytest.raises(ValueError, match="more than 1 value per channel"):
        simulate(2, train)


def test_an_optimizer_that_cannot_be_tried():
    """What its step raises on small parameters is told, with its name."""

    class Picky(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no small ones")

    with pytest.raises(
        af.errors.OptimizerError, match=r"in this test Picky raised.*no small ones"
    ):
        linear_state(
            2,
            2,
            optimizer=functools.partial(Picky, lr=0.1),
            setup=IN_BACKWARD,
            world=af.World.single(),
        )


def test_updates_in_a_backward_pass_need_ranks_that_reduce():
    """Without what reduces gradients nothing is updated, and the state is whole."""

    def train(world):
        state = create(world, lambda: nn.Linear(2, 2), IN_BACKWARD)
        step = af.make_step(lambda model, x: model(x).sum())
        with pytest.raises(af.errors.GradsError, match="not reduced"):
            step(state, torch.ones(1, 2))
        return state.params

    simulate(2, train)


def breaks_forward(model, x):
    model(x)
    raise ZeroDivisionError


def breaks_backward(model, x):
    return model[1](Refuses.apply(model[0](x))).square().mean()


def leaves_one_out(model, x):
    return model[1](x).square().mean()


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-5])
@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (breaks_forward, ZeroDivisionError),
        (breaks_backward, ZeroDivisionError),
        (leaves_one_out, af.errors.GradsError),
    ],
)
def test_a_broken_pass_leaves_no_trace_over_ranks(broken, error, bucket_cap_mb):
    """A loss that raises on all ranks costs its call: the next step is as if it were the first."""
    setup = af.wrap_ddp(bucket_cap_mb=bucket_cap_mb)

    def train(world, *, breaks):
        net = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # noqa: E731
        state = create(world, net, setup)
        share = torch.arange(8.0).reshape(4, 2)[world.rank :: 2].contiguous()
        step = af.make_step(lambda model, x: model(x).square().mean())
        for _ in range(2):
            if breaks:
                with pytest.raises(error):
                    af.make_step(broken)(state, share)
            state, _ = step(state, share)
        return state.params

    found, expected = (
        simulate(2, functools.partial(train, breaks=breaks)).results
        for breaks in (True, False)
    )
    for one, two in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize("flipped", [False, True])
def test_norms_between_compiled_graphs(flipped):
    """Compiled in pieces, layers meet between these, wherever the two stand."""
    pair = [af.sync_batchnorm(), af.compile(backend="eager", fullgraph=False)]
    setups = [
        af.chain(af.wrap_ddp(), *pair[:: -1 if flipped else 1]),
        af.chain(af.wrap_ddp(), pair[0]),
    ]

    def train(world, setup):
        net = lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # noqa: E731
        state = create(world, net, setup)
        share = torch.arange(8.0).reshape(4, 2)[world.rank :: 2].contiguous()
        step = af.make_step(lambda model, x: (model(x) - x).square().mean())
        state, _ = step(state, share)
        return {**state.params, **state.buffers}

    compiled, plain = (
        simulate(2, functools.partial(train, setup=setup)).results for setup in setups
    )
    for found, expected in zip(compiled, plain, strict=True):
        for name, each in expected.items():
            assert torch.allclose(found[name], each)


def test_ranks_that_meet_in_mid_forward_leave_no_trace():
    """torch.compile asks which DistributedDataParallel is in its forward: afterwards none."""

    def train(world):
        state = linear_state(2, setup=af.wrap_ddp(), world=world)

        def own(model, batch):
            mine = model(batch)
            af.barrier(world)  # who comes first waits here,
            af.barrier(world)  # and leaves from here first
            return mine.square().mean()

        af.make_step(own)(state, torch.ones(4, 2))

    simulate(2, train)
    assert nn.parallel.DistributedDataParallel._active_ddp_module is None


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_batch_norms_count_batches_that_somebody_had(samples):
    """A micro-batch without a sample on any rank moves no statistic, and is not counted."""

    def train(world):
        state = af.TrainState.create(
            model=lambda: nn.BatchNorm1d(2),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            setup=af.chain(
                af.shard_data(),
                af.wrap_ddp(),
                af.accumulate(num_micro_batches=3),
                af.sync_batchnorm(),
            ),
            data=af.Data(
                torch.arange(8.0 * samples).view(samples, 2, 4), global_batch_size=8
            ),
            world=world,
        )
        step = af.make_step(lambda model, x: model(x).square().mean())
        state, _ = step(state, next(iter(af.batches(state))))
        return int(state.buffers["num_batches_tracked"])

    # of parts that ranks cut alike: as many as the longest share has samples, three at most
    assert set(simulate(2, train)) == {min(3, -(-samples // 2))}


@af.transform
class OwnWeightFrom:
    """Sum as one must, and from some update on with this rank's own weight."""

    update: int

    def reduce(self, grads, slot, update):
        own = torch.as_tensor(grads.weight, dtype=torch.float64)
        sums, weight = af.all_reduce((grads.tensors, own), update.world)
        return grads.with_sums(
            sums, weight if update.num_tried < self.update else own
        ), slot


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("checked", [False, True])
def test_simulated_ranks_compare_their_sums_in_every_update(late, checked):
    """Not in the first alone, and whether the world is checked or not."""

    def fn(world):
        world = attrs.evolve(world, group=world.connection, checked=checked)
        setup = af.chain(af.shard_data(), OwnWeightFrom(late))
        data = af.Data(torch.arange(27.0).view(9, 3), global_batch_size=3)
        state = linear_state(3, setup=setup, world=world, data=data)
        step = af.make_step(lambda net, x: net(x).square().mean())
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)

    told = (
        rf"returned in update {late}(?s:.*)rank 0: the weight: 2.0\n.*rank 1: the weig"
    )
    with pytest.raises(af.errors.ReplicaMismatchError, match=told):
        simulate(2, fn)


def test_ranks_compare_what_they_hold_once():
    """Sums by hand, of one update after another, are of ranks that have compared already."""

    def rank(world: af.World) -> None:
        state = linear_state(world=world)
        compute = af.value_and_grad(lambda net, x: net(x).square().mean())
        for _ in range(3):
            _, grads = compute(state, torch.ones(2, 1))
            state = af.apply_grads(state, af.sync_grads(state, grads))

    log = simulate(2, rank).log
    compared = {each.step for each in log if "compare" in each.label}
    assert len({each.step for each in log}) == 3
    assert compared == {0}
