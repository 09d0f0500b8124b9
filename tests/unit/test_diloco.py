# SPDX-License-Identifier: Apache-2.0
"""What diloco refuses, what it keeps in its slot, and outer optimizers of other kinds."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import bucket_names, is_shard, local, param_deltas

SGD = partial(torch.optim.SGD, lr=1.0)


def state(
    setup: Any, world: af.World | None = None, model: Any = None
) -> af.TrainState:
    return af.TrainState.create(
        model=model or partial(nn.Linear, 2, 1),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        setup=setup,
        world=world or af.World.single(device="cpu"),
    )


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


REFUSED = {
    "a made optimizer": (
        lambda: af.diloco(sync_every=2, outer=SGD([nn.Parameter(torch.ones(1))])),
        "expected a function that makes a torch optimizer",
    ),
    "more fragments than updates": (
        lambda: af.diloco(sync_every=2, fragments=3),
        "Use at most 2 fragments",
    ),
    "a delay as long as the period": (
        lambda: af.diloco(sync_every=2, delay=2),
        "Use a delay below sync_every=2",
    ),
    "all of one's own": (lambda: af.diloco(sync_every=2, mix=1.0), "below 1"),
    "3 bits": (lambda: af.diloco(sync_every=2, bits=3), "expected 32 or 16 or 8 or 4"),
    "True bits": (lambda: af.diloco(sync_every=2, bits=True), "expected 32 or 16"),
    "no bucket": (lambda: af.diloco(sync_every=2, bucket_cap_mb=0), "number of MiB"),
    "no bucket of averages": (
        lambda: af.local_sgd(sync_every=2, bucket_cap_mb=float("inf")),
        "number of MiB",
    ),
    "beside an average over time": (
        lambda: af.chain(af.diloco(sync_every=2), af.ema(0.5)),
        "evaluates its anchor",
    ),
    "beside DDP": (
        lambda: af.chain(af.diloco(sync_every=2), af.wrap_ddp()),
        "would have no gradients to reduce",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_when_it_is_made(name):
    """Each mistake has its sentence, at once."""
    make, words = REFUSED[name]
    with pytest.raises(af.errors.Error, match=words):
        make()


class Counting(torch.optim.SGD):
    """Counts updates in its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


def free(params: Any) -> torch.optim.Optimizer:
    made = SGD(params)
    for group in made.param_groups:
        group["train_mode"] = True
    return made


def whole(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for _, p in params])


UNFIT = {
    "fragments of few parameters": (
        af.diloco(sync_every=8, fragments=3),
        "would be empty",
    ),
    "one that needs a closure": (af.diloco(sync_every=2, outer=whole), "closure"),
    "one that is schedule-free": (af.diloco(sync_every=2, outer=free), "schedule-free"),
    "one that counts for all": (
        af.diloco(sync_every=2, outer=partial(Counting, lr=1.0), fragments=2),
        "has one update count for all",
    ),
    "no optimizer": (
        af.diloco(sync_every=2, outer=lambda _: None),
        "expected a torch optimizer",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_it_is_refused_when_the_state_is_made(name):
    """What only the model tells is told with the model."""
    setup, words = UNFIT[name]
    with pytest.raises(af.errors.Error, match=words):
        state(setup)


def test_parts_do_not_fly_in_few_bits():
    """Beside wrap_fsdp, a delay goes with numbers as they are."""
    late = af.diloco(sync_every=2, delay=1, bits=8)

    def go(world: af.World) -> None:
        with pytest.raises(
            af.errors.CompositionError, match="delay= and bits= cannot be combined"
        ):
            state(af.chain(af.wrap_fsdp(), late), world)

    simulate(4, go, axes={"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.parametrize(
    "outer",
    [
        partial(torch.optim.Adam, lr=0.1),
        partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
        partial(torch.optim.RMSprop, lr=0.1, momentum=0.5),
        partial(Counting, lr=1.0, momentum=0.5),
    ],
)
def test_any_outer_optimizer_goes_on(outer):
    """Its state is in the slot: a copy that goes on has the same anchor, bit by bit."""
    setup = af.diloco(sync_every=1, outer=outer)

    def go(world: af.World) -> None:
        step = af.make_step(loss)
        one = state(setup, world)
        for t in range(3):
            two = one.copy()
            x = torch.ones(3, 2) * (1 + t + world.rank)
            one, two = step(one, x)[0], step(two, x)[0]
            for name, each in af.eval_params(one).items():
                assert torch.equal(each, af.eval_params(two)[name])
        assert set(one.slots["diloco"]["outer"]) >= {"weight", "bias"}

    simulate(2, go)


def test_other_options_begin_where_ranks_agree():
    """After finalize a run goes on with other fragments and bits; before, it is told so."""

    def go(world: af.World) -> None:
        step = af.make_step(loss)
        it = state(af.diloco(sync_every=4), world)
        it, _ = step(it, torch.ones(2, 2) + world.rank)
        other = af.diloco(sync_every=4, fragments=2, bits=8)
        with pytest.raises(af.errors.StateError, match="call state = af.finalize"):
            step(it.copy().with_setup(other), torch.ones(2, 2))
        it = af.finalize(it).with_setup(other)
        for _ in range(4):
            it, _ = step(it, torch.ones(2, 2) + world.rank)
        it = af.finalize(it).with_setup(af.diloco(sync_every=2))
        for _ in range(2):
            it, _ = step(it, torch.ones(2, 2) + world.rank)
        af.assert_replicas_agree(it)

    simulate(2, go)


def test_neighbours_may_come_in_mid_run():
    """Parts that were not there yet count what was seen since all met."""

    def go(world: af.World) -> float:
        step = af.make_step(loss)
        it = state(af.local_sgd(sync_every=4), world)
        it, _ = step(it, torch.ones(2, 2) + world.rank)
        it = it.with_setup(af.local_sgd(sync_every=4, neighbours={2: 2}))
        it, _ = step(it, torch.ones(2, 2) + world.rank)
        assert it.slots["local_sgd"]["near"] == {"2": 0}
        return it.params["bias"].item()

    one, two, three, four = simulate(4, go)
    assert one == two
    assert three == four
    assert two != three


def test_two_factories_of_one_kind_are_one_value():
    """Setups with partials of the same function and arguments are equal."""
    one, two = (
        af.diloco(sync_every=2, outer=partial(torch.optim.SGD, lr=0.5, momentum=0.9))
        for _ in range(2)
    )
    assert one == two
    assert hash(one) == hash(two)
    assert one != af.diloco(sync_every=2, outer=partial(torch.optim.SGD, lr=0.5))


def test_equal_shapes_are_not_sent_first():
    """all_to_all(equal=True) is one call, gives what the other does, and looks at shapes."""

    def go(world: af.World, equal: bool) -> list[torch.Tensor]:
        mine = [torch.full((2,), 10 * world.rank + to) for to in range(world.size)]
        return af.all_to_all(mine, world, equal=equal)

    one, two = (simulate(3, partial(go, equal=equal)) for equal in (False, True))
    assert [[t.tolist() for t in each] for each in one] == [
        [t.tolist() for t in each] for each in two
    ]
    assert (len(one.log), len(two.log)) == (2, 1)

    def uneven(world: af.World) -> None:
        with pytest.raises(af.errors.ArgumentError, match="Remove equal=True"):
            af.all_to_all([torch.ones(1 + to) for to in range(2)], world, equal=True)

    simulate(2, uneven)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t, w: af.all_reduce(t, w, "sum", weight=1), "for weighted means"),
        (
            lambda t, w: af.all_reduce(t, w, "mean", bucket_cap_mb=1),
            "is only for weighted means",
        ),
        (lambda t, w: af.all_reduce(t, w, "mean", weight=-1), "one number, 0 or more"),
        (
            lambda t, w: af.all_reduce(t, w, "mean", weight=torch.ones(2)),
            "one number, 0 or more",
        ),
        (
            lambda t, w: af.all_reduce(t, w, "mean", weight=1, bucket_cap_mb=-1),
            "positive number of MiB",
        ),
        (lambda t, w: af.start_all_reduce(t, w, "median"), "expected one of"),
    ],
)
def test_a_mean_by_weight_is_asked_for_in_full(call, words):
    """What is no mean has no weight, and a weight is a number."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        call(torch.ones(1), af.World.single(device="cpu"))


def test_what_an_outer_optimizer_counts_lies_whole_beside_parts():
    """Under wrap_fsdp its averages lie over the ranks as parameters do, and its steps do not."""
    setup = af.chain(
        af.wrap_fsdp(), af.diloco(sync_every=1, outer=partial(torch.optim.Adam, lr=0.1))
    )

    def go(world: af.World) -> None:
        it = state(setup, world, model=partial(nn.Linear, 2, 4))
        it, _ = af.make_step(loss)(it, torch.ones(3, 2) * (1 + world.rank))
        outer = it.slots["diloco"]["outer"]
        for name, param in it.params.items():
            assert is_shard(outer[name]["exp_avg"])
            assert outer[name]["exp_avg"].shape == param.shape
            assert not is_shard(outer[name]["step"])
            assert float(outer[name]["step"]) == 1

    simulate(4, go, axes={"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.parametrize("options", [{"bits": 8}, {"delay": 1}], ids=repr)
def test_what_is_remembered_and_on_its_way_lies_beside_parts(options):
    """Under wrap_fsdp each has its parameter's shape and a rank's part of it, as files need."""
    setup = af.chain(af.wrap_fsdp(), af.diloco(sync_every=2, **options))

    def go(world: af.World) -> None:
        it, step = (
            state(setup, world, model=partial(nn.Linear, 2, 4)),
            af.make_step(loss),
        )
        for _ in range(2):
            it, _ = step(it, torch.ones(3, 2) * (1 + world.rank))
        slot = it.slots["diloco"]
        found = [slot["error"]] if "bits" in options else []
        found += [each["values"].wait()["sums"] for each in slot["flights"].values()]
        assert len(found) == 1
        for name, param in it.params.items():
            assert found[0][name].shape == param.shape
            assert local(found[0][name]).shape == local(param).shape

    simulate(4, go, axes={"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.parametrize("most", [0.0, 100.0])
def test_what_is_rounded_together_is_cut_alike(most):
    """Lone numbers, which all ranks of a copy hold, are in no bucket with what is cut."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Parameter(torch.ones(()))
            self.layer = nn.Linear(2, 4)
            self.between = nn.Parameter(torch.ones(()))
            self.after = nn.Parameter(torch.ones(()))
            self.last = nn.Parameter(torch.ones(4))

    def buckets(world: af.World) -> list[list[str]]:
        return [*bucket_names(names, state(af.wrap_fsdp(), world, Scaled).params, most)]

    lone = {"before", "between", "after"}
    names = ["before", "last", "between", "layer.weight", "layer.bias", "after"]
    for found in simulate(2, buckets):
        assert names == [name for bucket in found for name in bucket]
        assert all(len(set(bucket) & lone) in (0, len(bucket)) for bucket in found)
        assert len(found) == (6 if most == 0 else 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moves_are_added_up_in_32_bits_at_least(dtype):
    """What crosses is a sum by weight, and of 16 bits a weight of 257 is none."""
    param, anchor = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    (move,) = param_deltas({"w": param}, {"w": anchor}, ["w"]).values()
    assert move.dtype is torch.float32
    assert move.tolist() == [-1.0] * 3
