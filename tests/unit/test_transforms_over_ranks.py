# SPDX-License-Identifier: Apache-2.0
"""What compression, batch normalisation over ranks and updates in a backward pass take."""

import re
import warnings
from functools import partial

import attrs
import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, CompositionError, ModelError
from accelfn.testing import simulate
from tests.breaking import Refuses
from tests.states import bits, linear_state

LOW_RANK = af.compress_grads("powersgd")
IN_BACKWARD = af.optimizer_in_backward()
UNUSED = af.wrap_ddp(find_unused_parameters=True)
SYNCED = af.chain(af.wrap_ddp(), af.sync_batchnorm())
STEP = af.make_step(lambda model, x: model(x).square().mean())
ROWS = torch.arange(8.0).reshape(4, 2)
LOCAL = af.local_sgd(sync_every=2)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (af.compress_grads("fp16"), af.compress_grads("bf16", name="other")),
        (LOW_RANK, UNUSED),
        (LOW_RANK, af.wrap_ddp(static_graph=True)),
        (af.sync_batchnorm(), LOCAL),
        (af.sync_batchnorm(), af.compile()),
        (IN_BACKWARD, af.clip_grad_norm(1.0)),
        (IN_BACKWARD, af.clip_grad_value(1.0)),
        (IN_BACKWARD, af.skip_nonfinite()),
        (IN_BACKWARD, af.autocast("fp16")),
        (IN_BACKWARD, af.accumulate(num_micro_batches=2)),
        (IN_BACKWARD, LOCAL),
        (IN_BACKWARD, af.compile()),
        (IN_BACKWARD, UNUSED),
        (IN_BACKWARD, af.optimizer_in_backward(name="other")),
    ],
    ids=repr,
)
def test_pairs_without_meaning(one, two):
    """They are refused when composed, in either order, both named, and say what to do."""
    for order in ((one, two), (two, one)):
        with pytest.raises(CompositionError, match=r"Leave out|Keep one|Pass fullgrap"):
            af.chain(*order)


@pytest.mark.parametrize("method", ["fp16", "powersgd"])
def test_nothing_to_compress(method):
    """Without DistributedDataParallel it would be without effect, so it is refused."""
    with pytest.raises(CompositionError, match="wrap_ddp"):
        linear_state(setup=af.compress_grads(method))


@pytest.mark.parametrize("option", ["matrix_approximation_rank", "start_powerSGD_iter"])
def test_options_of_another_method(option):
    """An option that the method has no use for is refused."""
    with pytest.raises(ArgumentError, match="is only for 'powersgd'"):
        af.compress_grads("fp16", **{option: 2})


class Doubled(nn.BatchNorm1d):
    """Batch normalisation with a forward of its own."""

    def forward(self, given):
        return 2 * super().forward(given)


@af.transform
class Converts:
    """Makes torch's own layers of all ranks, or of another group."""

    is_own: bool

    def module(self, module, state):
        group = object() if self.is_own else state.definition.copy.group
        return nn.SyncBatchNorm.convert_sync_batchnorm(module, group)


def with_norm(norm, world, setup=SYNCED):
    model = lambda: nn.Sequential(nn.Linear(2, 2), norm(2))  # noqa: E731
    return linear_state(model=model, setup=setup, world=world)


def built(norm, world, setup=SYNCED):
    af.prepare_engine(with_norm(norm, world, setup))


@pytest.mark.parametrize(
    ("norm", "converts", "words"),
    [
        (Doubled, None, "'1' is a Doubled"),
        (nn.BatchNorm1d, Converts(True), "'1' is a SyncBatchNorm with its own process"),  # noqa: FBT003 - drawn
    ],
)
def test_a_norm_of_its_own_is_refused_when_built(norm, converts, words):
    """What its forward does besides, or its group, would be left out, so the layer is named."""
    setup = af.chain(af.wrap_ddp(), converts, af.sync_batchnorm())
    with pytest.raises(ModelError, match=words):
        simulate(2, partial(built, norm, setup=setup))


@pytest.mark.parametrize(
    ("norm", "told"),
    [
        (partial(nn.GroupNorm, 2), ["has no effect: .*torch's BatchNorm"]),
        (nn.InstanceNorm1d, ["has no effect: .*torch's BatchNorm"]),
        (nn.BatchNorm1d, []),
        (nn.SyncBatchNorm, []),
    ],
)
def test_a_model_without_layers_to_synchronise_is_told(norm, told):
    """Once, by rank 0; layers of another kind, or of somebody's own, would stay apart."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        simulate(2, partial(built, norm))
    ours = [each for each in said if each.category is af.errors.AccelfnWarning]
    assert len(ours) == len(told)
    assert all(map(re.search, told, [str(each.message) for each in ours]))


@pytest.mark.parametrize("converts", [None, Converts(False)])  # noqa: FBT003
def test_layers_of_torchs_own_class_are_taken(converts):
    """SyncBatchNorm, which needs a GPU, trains on CPUs as BatchNorm of all ranks."""
    norm = nn.BatchNorm1d if converts else nn.SyncBatchNorm
    setup = af.chain(af.wrap_ddp(), converts, af.sync_batchnorm())
    values = torch.arange(16.0).reshape(8, 2).square() / 100
    step = af.make_step(lambda model, x: (model(x) - x).square().mean())

    def train(world, norm, setup):
        share = values.tensor_split(world.size)[world.rank]
        return step(with_norm(norm, world, setup), share)[0].params

    plain = dict(train(af.World.single(), nn.BatchNorm1d, af.chain()))
    for params in simulate(2, partial(train, norm=norm, setup=setup)):
        torch.testing.assert_close(dict(params), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_16_bits(dtype):
    """Outputs have the dtype of the inputs, and statistics are of float32 sums."""

    def loss_fn(model, x):
        out = model(x)
        assert out.dtype is dtype
        return out.float().square().mean()

    def train(world):
        state = linear_state(model=lambda: nn.BatchNorm1d(2), setup=SYNCED, world=world)
        values = torch.arange(12.0).reshape(6, 2).to(dtype)[world.rank :: 2]
        return af.make_step(loss_fn)(state, values)[0].buffers

    first, second = simulate(2, train)
    assert torch.allclose(first["running_mean"], torch.tensor([0.5, 0.6]))
    assert torch.equal(first["running_var"], second["running_var"])


def normed(world, samples, **options):
    """Return the state of a batch normalisation after an update."""
    every = af.accumulate(**options) if options else None
    state = linear_state(
        model=lambda: nn.BatchNorm1d(2),
        data=af.Data(samples, global_batch_size=8),
        setup=af.chain(af.shard_data(), every, SYNCED),
        world=world,
    )
    return STEP(state, next(iter(af.batches(state))))[0]


def test_one_value_a_channel_over_all_ranks():
    """A batch of one sample has no variance, on any number of ranks: torch's own error."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        simulate(2, partial(normed, samples=torch.ones(1, 2)))


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_batch_norms_count_batches_that_somebody_had(samples):
    """A micro-batch without a sample on any rank moves no statistic, and is not counted."""
    values = torch.arange(8.0 * samples).view(samples, 2, 4)
    # of parts that ranks cut alike: as many as the longest share has samples, three at most
    expected = min(3, -(-samples // 2))
    for found in simulate(2, partial(normed, samples=values, num_micro_batches=3)):
        assert int(found.buffers["num_batches_tracked"]) == expected


@pytest.mark.parametrize("flipped", [False, True])
def test_norms_between_compiled_graphs(flipped):
    """Compiled in pieces, layers meet between these, wherever the two stand."""
    pair = [af.sync_batchnorm(), af.compile(backend="eager", fullgraph=False)]
    setup = af.chain(af.wrap_ddp(), *pair[:: -1 if flipped else 1])

    def train(world, setup):
        state = with_norm(nn.BatchNorm1d, world, setup)
        state, _ = STEP(state, ROWS[world.rank :: 2].contiguous())
        return {**state.params, **state.buffers}

    compiled, plain = (
        list(simulate(2, partial(train, setup=each))) for each in (setup, SYNCED)
    )
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-8)


def test_an_optimizer_that_cannot_be_tried():
    """What its step raises on small parameters is told, with its name."""

    class Picky(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no small ones")

    words = r"in this test Picky raised.*no small ones"
    with pytest.raises(af.errors.OptimizerError, match=words):
        linear_state(2, 2, optimizer=partial(Picky, lr=0.1), setup=IN_BACKWARD)


def test_updates_in_a_backward_pass_need_ranks_that_reduce():
    """Without what reduces gradients nothing is updated, and the state is whole."""

    def train(world):
        state = linear_state(2, 2, setup=IN_BACKWARD, world=world)
        with pytest.raises(af.errors.GradsError, match="not reduced"):
            STEP(state, torch.ones(1, 2))
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
@pytest.mark.parametrize("broken", [breaks_forward, breaks_backward, leaves_one_out])
def test_a_broken_pass_leaves_no_trace_over_ranks(broken, bucket_cap_mb):
    """A loss that raises on all ranks costs its call: the next step is as if it were the first."""
    setup = af.wrap_ddp(bucket_cap_mb=bucket_cap_mb)

    def train(world, *, breaks):
        state = with_norm(partial(nn.Linear, out_features=2), world, setup)
        share = ROWS[world.rank :: 2].contiguous()
        for _ in range(2):
            if breaks:
                with pytest.raises((ZeroDivisionError, af.errors.GradsError)):
                    af.make_step(broken)(state, share)
            state, _ = STEP(state, share)
        return bits(state.params)

    found, expected = (
        list(simulate(2, partial(train, breaks=breaks))) for breaks in (True, False)
    )
    assert found == expected


def test_ranks_that_meet_in_mid_forward_leave_no_trace():
    """torch.compile asks which DistributedDataParallel is in its forward: afterwards none."""

    def train(world):
        def own(model, batch):
            mine = model(batch)
            af.barrier(world)  # who comes first waits here,
            af.barrier(world)  # and leaves from here first
            return mine.square().mean()

        state = linear_state(2, setup=af.wrap_ddp(), world=world)
        af.make_step(own)(state, torch.ones(4, 2))

    simulate(2, train)
    assert nn.parallel.DistributedDataParallel._active_ddp_module is None


@af.transform
class OwnWeightFrom:
    """Sum as one must, and from some update on with this rank's own weight."""

    update: int

    def reduce(self, grads, slot, update):
        own = torch.as_tensor(grads.weight, dtype=torch.float64)
        sums, weight = af.all_reduce((grads.tensors, own), update.world)
        is_late = update.num_tried >= self.update
        return grads.with_sums(sums, own if is_late else weight), slot


@pytest.mark.parametrize(("late", "checked"), [(0, False), (1, False), (2, True)])
def test_simulated_ranks_compare_their_sums_in_every_update(late, checked):
    """Not in the first alone, and whether the world is checked or not."""

    def fn(world):
        world = attrs.evolve(world, group=world.connection, checked=checked)
        setup = af.chain(af.shard_data(), OwnWeightFrom(late))
        data = af.Data(torch.arange(27.0).view(9, 3), global_batch_size=3)
        state = linear_state(3, setup=setup, world=world, data=data)
        for batch in af.batches(state, until_epoch=1):
            state, _ = STEP(state, batch)

    told = rf"in update {late}(?s:.*)rank 0: the weight: 2.0\n.*rank 1: the weight"
    with pytest.raises(af.errors.ReplicaMismatchError, match=told):
        simulate(2, fn)


def test_ranks_compare_what_they_hold_once():
    """Sums by hand, of one update after another, are of ranks that have compared already."""

    def rank(world):
        state = linear_state(world=world)
        compute = af.value_and_grad(lambda net, x: net(x).square().mean())
        for _ in range(3):
            _, grads = compute(state, torch.ones(2, 1))
            state = af.apply_grads(state, af.sync_grads(state, grads))

    log = simulate(2, rank).log
    assert len({each.step for each in log}) == 3
    assert {each.step for each in log if "compare" in each.label} == {0}
