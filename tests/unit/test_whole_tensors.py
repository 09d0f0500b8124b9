# SPDX-License-Identifier: Apache-2.0
"""Whole tensors: what a user cuts in another way than layouts do, and what calls are called."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import accelfn as af
from accelfn.testing import simulate
from tests.internals import collectives, is_shard, local, tree

SGD = partial(torch.optim.SGD, lr=0.1)
AXES = {"dp_replicate": 2, "dp_shard": 2}


def begun(world, *setup, **kw):
    return af.TrainState.create(
        model=lambda: nn.Linear(3, 5, dtype=torch.float64),
        optimizer=SGD,
        setup=af.chain(*(setup or (af.wrap_fsdp(),))),
        world=world,
        **kw,
    )


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Replicate(), Partial()),
        (Partial(), Shard(1)),
        (Shard(1), Replicate()),
    ],
)
def test_what_a_user_cuts_is_what_torch_gathers(placements):
    """Parts of parts from the left, and summands, beside parts as layouts cut them."""

    def fn(world):
        state = begun(world)
        part = torch.arange(6.0).view(2, 3) + world.rank
        mine = DTensor.from_local(part, world.mesh, placements, run_check=False)
        tensors = {"mine": mine, **state.params}
        found = collectives.gather_full(tensors, world, label="whole")
        for name, tensor in tensors.items():
            assert torch.equal(tensor.full_tensor(), found[name])

    simulate(4, fn, axes=AXES)


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
            state = begun(world).with_slot("mine", {name: mine})
            said = rf"slots\.mine\.{name} is a DTensor with the placement P.*redistribute\(\)"
            with pytest.raises(af.errors.CheckpointWriteError, match=said):
                af.save(state, tmp_path / "saved")

    simulate(4, fn, axes=AXES)
    assert list(tmp_path.iterdir()) == []


def lent(state, _folder):
    with af.borrow_model(state, gather=True):
        pass


class Pretrained(nn.Linear):
    """Has a method to write itself."""

    def save_pretrained(self, directory):
        torch.save(self.state_dict(), directory / "all.pt")


WHOLES = {
    "af.full_params": lambda state, _: af.full_params(state),
    "af.snapshot_model": lambda state, _: af.snapshot_model(state),
    "af.borrow_model": lent,
    "gather what is exported": lambda state, folder: af.export_model(
        state, folder / "a"
    ),
    "lay out anew": lambda state, _: state.with_setup(af.chain(af.wrap_ddp())),
}


@pytest.mark.parametrize("label", WHOLES)
def test_a_gather_says_what_it_is_for(label, tmp_path):
    """One call for the whole model; a rank that waits in vain is told in which."""

    def fn(world, *, leaves=False):
        state = begun(world)
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
        state = af.TrainState.create(
            model=lambda: Pretrained(3, 5),
            optimizer=SGD,
            setup=af.chain(af.wrap_fsdp()),
            world=world,
        )
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
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


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_norms_in_a_list_are_of_the_parts(norm_type):
    """Each rank has the norm of what it has; of no tensors there is none."""
    whole = torch.arange(-8.0, 8).view(4, 4)

    def each_rank(world):
        (part,), (split,) = halves(world.mesh, world.rank, whole)
        own = torch.linalg.vector_norm(part, norm_type)
        for given in ([part, split], [split, part]):
            found = tree.norms(given, norm_type)
            assert not any(map(is_shard, found))
            torch.testing.assert_close(found, [own, own])
        wide = tree.norms([part.bfloat16()], norm_type, dtype=torch.float32)
        assert wide[0].dtype is torch.float32
        torch.testing.assert_close(wide, [own])
        assert tree.norms([], norm_type) == []

    simulate(2, each_rank, axes={"dp_shard": 2})


@af.transform
class spoils:
    """Lets one rank have an infinite number in its part of a gradient."""

    def grads(self, grads, slot, update):
        if update.world.rank == 1:
            split = [each for each in grads.tensors.values() if is_shard(each)]
            local(split[-1]).fill_(torch.inf)
        return grads, slot


@pytest.mark.parametrize(
    ("axes", "split"),
    [
        ({"dp_shard": 2}, af.wrap_fsdp()),
        ({"tp": 2}, af.tensor_parallel({"0": "gathered"})),
        ({"tp": 2}, af.tensor_parallel({"1": "gathered"})),
    ],
    ids=["all layers", "the first layer", "the last layer"],
)
def test_a_part_that_is_not_finite_skips_the_update_of_all(axes, split):
    """Also where some gradients are whole, which each rank sees by itself."""

    def each_rank(world):
        state = af.TrainState.create(
            model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
            optimizer=SGD,
            setup=af.chain(split, spoils(), af.skip_nonfinite()),
            world=world,
        )
        step = af.make_step(lambda model, batch: model(batch).square().mean())
        state, metrics = step(state, torch.ones(2, 3))
        return state.step, state.num_skipped, float(metrics["skipped"])

    assert list(simulate(2, each_rank, axes=axes)) == [(0, 1, 1.0)] * 2
