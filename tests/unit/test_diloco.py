# SPDX-License-Identifier: Apache-2.0
"""What diloco refuses, what it keeps in its slot, and outer optimizers of other kinds."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, CompositionError, StateError
from accelfn.testing import simulate
from tests.internals import bucket_names, is_shard, local, param_deltas
from tests.states import linear_state

SGD = partial(torch.optim.SGD, lr=1.0)
DILOCO = partial(af.diloco, sync_every=2)
PARTS = {"dp_replicate": 2, "dp_shard": 2}
STEP = af.make_step(lambda model, x: (model(x) - 1).square().mean())
ALONE = af.World.single(device="cpu")
MEAN = partial(af.all_reduce, torch.ones(1), ALONE)


class Counting(torch.optim.SGD):
    """Counts updates in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


def free(params):
    made = SGD(params)
    for group in made.param_groups:
        group["train_mode"] = True
    return made


def whole(params):
    return torch.optim.LBFGS([p for _, p in params])


def applied(**options):
    return lambda: linear_state(2, setup=DILOCO(**options))


REFUSED = [
    (
        lambda: DILOCO(outer=SGD([nn.Parameter(torch.ones(1))])),
        "that makes a torch opt",
    ),
    (lambda: DILOCO(fragments=3), "Use at most 2 fragments"),
    (lambda: DILOCO(delay=2), "Use a delay below sync_every=2"),
    (lambda: DILOCO(mix=1.0), "below 1"),
    (lambda: DILOCO(bits=3), "expected 32 or 16 or 8 or 4"),
    (lambda: DILOCO(bits=True), "expected 32 or 16"),
    (lambda: DILOCO(bucket_cap_mb=0), "number of MiB"),
    (lambda: af.local_sgd(sync_every=2, bucket_cap_mb=math.inf), "number of MiB"),
    (lambda: af.chain(DILOCO(), af.ema(0.5)), "evaluates its anchor"),
    (lambda: af.chain(DILOCO(), af.wrap_ddp()), "would have no gradients to reduce"),
    (applied(sync_every=8, fragments=3), "would be empty"),
    (applied(outer=whole), "closure"),
    (applied(outer=free), "schedule-free"),
    (applied(outer=partial(Counting, lr=1.0), fragments=2), "has one update count for"),
    (applied(outer=lambda _: None), "expected a torch optimizer"),
    (lambda: MEAN("sum", weight=1), "for weighted means"),
    (lambda: MEAN("mean", bucket_cap_mb=1), "is only for weighted means"),
    (lambda: MEAN("mean", weight=-1), "one number, 0 or more"),
    (lambda: MEAN("mean", weight=torch.ones(2)), "one number, 0 or more"),
    (lambda: MEAN("mean", weight=1, bucket_cap_mb=-1), "positive number of MiB"),
    (lambda: af.start_all_reduce(torch.ones(1), ALONE, "median"), "expected one of"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_it_is_refused(make, words):
    """Each mistake has its sentence, at once, or when the state tells it."""
    with pytest.raises(af.errors.Error, match=words):
        make()


def test_parts_do_not_fly_in_few_bits():
    """Beside wrap_fsdp, a delay goes with numbers as they are."""
    setup = af.chain(af.wrap_fsdp(), DILOCO(delay=1, bits=8))
    with pytest.raises(CompositionError, match="delay= and bits= cannot be combined"):
        simulate(4, lambda world: linear_state(2, setup=setup, world=world), axes=PARTS)


@pytest.mark.parametrize(
    "outer",
    [
        partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
        partial(torch.optim.RMSprop, lr=0.1, momentum=0.5),
        partial(Counting, lr=1.0, momentum=0.5),
    ],
)
def test_any_outer_optimizer_goes_on(outer):
    """Its state is in the slot: a copy that goes on has the same anchor, bit by bit."""
    setup = af.diloco(sync_every=1, outer=outer)

    def go(world):
        one = linear_state(2, setup=setup, world=world)
        for t in range(3):
            two = one.copy()
            x = torch.ones(3, 2) * (1 + t + world.rank)
            one, two = STEP(one, x)[0], STEP(two, x)[0]
            for name, each in af.eval_params(one).items():
                assert torch.equal(each, af.eval_params(two)[name])
        assert set(one.slots["diloco"]["outer"]) >= {"weight", "bias"}

    simulate(2, go)


def test_other_options_begin_where_ranks_agree():
    """A run that is not finalized is told so before it goes on with other options."""

    def go(world):
        state = linear_state(2, setup=af.diloco(sync_every=4), world=world)
        state, _ = STEP(state, torch.ones(2, 2) + world.rank)
        state = state.with_setup(af.diloco(sync_every=4, fragments=2, bits=8))
        with pytest.raises(StateError, match="call state = af.finalize"):
            STEP(state, torch.ones(2, 2))

    simulate(2, go)


def test_two_factories_of_one_kind_are_one_value():
    """Setups with partials of the same function and arguments are equal."""
    one, two, other = (
        DILOCO(outer=partial(torch.optim.SGD, lr=0.5, momentum=m)) for m in (9, 9, 8)
    )
    assert one == two != other
    assert hash(one) == hash(two)


def test_equal_shapes_are_not_sent_first():
    """all_to_all(equal=True) is one call, gives what the other does, and looks at shapes."""

    def go(world, *, equal):
        mine = [torch.full((2,), 10 * world.rank + to) for to in range(world.size)]
        return [each.tolist() for each in af.all_to_all(mine, world, equal=equal)]

    one, two = (simulate(3, partial(go, equal=equal)) for equal in (False, True))
    assert [*one] == [*two]
    assert (len(one.log), len(two.log)) == (2, 1)

    def uneven(world):
        af.all_to_all([torch.ones(1 + to) for to in range(2)], world, equal=True)

    with pytest.raises(ArgumentError, match="Remove equal=True"):
        simulate(2, uneven)


def test_what_an_outer_optimizer_counts_lies_whole_beside_parts():
    """Under wrap_fsdp its averages lie over the ranks as parameters do, and its steps do not."""
    outer = partial(torch.optim.Adam, lr=0.1)
    setup = af.chain(af.wrap_fsdp(), af.diloco(sync_every=1, outer=outer))

    def go(world):
        state = linear_state(2, 4, setup=setup, world=world)
        state, _ = STEP(state, torch.ones(3, 2) * (1 + world.rank))
        for name, param in state.params.items():
            own = state.slots["diloco"]["outer"][name]
            assert is_shard(own["exp_avg"])
            assert own["exp_avg"].shape == param.shape
            assert not is_shard(own["step"])
            assert float(own["step"]) == 1

    simulate(4, go, axes=PARTS)


@pytest.mark.parametrize("options", [{"bits": 8}, {"delay": 1}], ids=repr)
def test_what_is_remembered_and_on_its_way_lies_beside_parts(options):
    """Under wrap_fsdp each has its parameter's shape and a rank's part of it, as files need."""
    setup = af.chain(af.wrap_fsdp(), DILOCO(**options))

    def go(world):
        state = linear_state(2, 4, setup=setup, world=world)
        for _ in range(2):
            state, _ = STEP(state, torch.ones(3, 2) * (1 + world.rank))
        slot = state.slots["diloco"]
        flying = [each["values"].wait()["sums"] for each in slot["flights"].values()]
        (found,) = [*([slot["error"]] if "bits" in options else []), *flying]
        for name, param in state.params.items():
            assert found[name].shape == param.shape
            assert local(found[name]).shape == local(param).shape

    simulate(4, go, axes=PARTS)


@pytest.mark.parametrize("most", [0.0, 100.0])
def test_what_is_rounded_together_is_cut_alike(most):
    """Lone numbers, which all ranks of a copy hold, are in no bucket with what is cut."""
    names = ["before", "last", "between", "weight", "bias", "after"]
    shapes = {"last": (4,), "weight": (4, 2), "bias": (4,)}

    def model():
        return nn.ParameterDict({n: torch.ones(shapes.get(n, ())) for n in names})

    def buckets(world):
        state = linear_state(model=model, setup=af.wrap_fsdp(), world=world)
        return [*bucket_names(names, state.params, most)]

    for found in simulate(2, buckets):
        assert names == [name for bucket in found for name in bucket]
        assert all(len({name in shapes for name in bucket}) == 1 for bucket in found)
        assert len(found) == (6 if most == 0 else 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moves_are_added_up_in_32_bits_at_least(dtype):
    """What crosses is a sum by weight, and of 16 bits a weight of 257 is none."""
    param, anchor = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    (move,) = param_deltas({"w": param}, {"w": anchor}, ["w"]).values()
    assert move.dtype is torch.float32
    assert move.tolist() == [-1.0] * 3
