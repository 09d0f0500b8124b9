# SPDX-License-Identifier: Apache-2.0
"""What collectives take and refuse, beside their laws."""

import collections
import functools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import DeadlockError
from accelfn.testing import simulate
from tests.internals import check_replicas, checksum, is_same_text, start_sum_
from tests.states import linear_state


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_lazy_views_are_gathered_and_differentiated(kind):
    """What torch conjugates or negates when it is read is so when it arrives, gradients too."""

    def fn(world):
        mine = torch.tensor([1 + 2j * (world.rank + 1)], requires_grad=True)
        given = mine.conj() if kind == "conjugate" else mine.conj().imag
        found = af.all_gather(given, world, grad=True)
        assert torch.equal(af.all_gather(given, world), found.detach())
        (found * (world.rank + 1)).abs().square().sum().backward()
        return found.detach().tolist(), mine.grad.tolist()

    for rank, (found, grad) in enumerate(simulate(2, fn)):
        if kind == "conjugate":
            assert found == [1 - 2j, 1 - 4j]
            assert grad == [10 * (1 + 2j * (rank + 1))]
        else:
            assert found == [-2, -4]
            assert grad == [10 * 2j * (rank + 1)]


def test_ranks_that_differ_in_needing_gradients_are_told():
    """In a simulated world before the gather, as in any that is checked."""

    def fn(world):
        mine = torch.ones(2, requires_grad=world.is_main)
        return af.all_gather(mine, world, grad=True)

    with pytest.raises(af.errors.CollectiveMismatchError, match="structure") as told:
        simulate(2, fn)
    assert "* that requires grad" in str(told.value)


def test_a_loss_that_leaves_out_what_was_gathered():
    """Its rank does not come to the backward pass of the others, who are told so."""

    def fn(world):
        found = af.all_gather(torch.ones(2, requires_grad=True), world, grad=True)
        if world.is_main:
            found.sum().backward()

    with pytest.raises(DeadlockError, match="gather: gradient"):
        simulate(2, fn)


@pytest.mark.parametrize("call", [af.all_gather_objects, af.broadcast_object])
def test_pickles_that_only_some_ranks_expect(call):
    """Bytes are not read as what they are not, whatever the world compares."""

    def fn(world):
        world.connection.simulated = None
        return call(1, world, pickle=world.is_main, label="settings")

    with pytest.raises(
        af.errors.CollectiveMismatchError, match="pickle=False|pickle=True"
    ):
        simulate(2, fn)


def test_what_is_no_plain_data_may_be_pickled():
    """The refusal names the way; scatter, which has none, names none."""
    with pytest.raises(
        af.errors.PlainDataError, match=r"range.*pickle=True on all ranks"
    ):
        simulate(2, lambda world: af.all_gather_objects(range(3), world))
    found = simulate(
        2, lambda world: af.all_gather_objects(range(3), world, pickle=True)
    )
    assert found[0] == [range(3), range(3)]
    with pytest.raises(af.errors.PlainDataError) as told:
        simulate(2, lambda world: af.scatter([range(3)] * 2, world))
    assert "pickle" not in str(told.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64])
def test_a_lone_element_with_a_gap_after_it_travels(dtype):
    """It is contiguous to torch, and its bytes cannot be seen all the same."""
    given = torch.ones(2).to(dtype)[::2]
    assert given.stride() == (2,)
    calls = [
        lambda world: af.all_to_all([given] * 2, world)[1],
        functools.partial(af.broadcast, given),
        functools.partial(af.all_gather, given, ragged=True),
    ]
    for call in calls:
        assert simulate(2, call)[0][0] == 1


class Fixed(collections.UserDict):
    """A mapping that is not made from a dict."""

    def __init__(self):
        super().__init__(x=torch.ones(1))


def test_a_mapping_that_cannot_be_made_again():
    """It is refused with its name."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"Fixed\(a_dict\) raises TypeError"
    ):
        simulate(2, lambda world: af.all_gather(Fixed(), world))


@pytest.mark.parametrize(
    "call",
    [
        af.barrier,
        af.print_once,
        functools.partial(af.all_gather, torch.ones(1)),
        functools.partial(af.all_gather_objects, 1),
        functools.partial(af.broadcast_object, 1),
        functools.partial(af.broadcast, torch.ones(1)),
        functools.partial(af.pad_across, torch.ones(1)),
        af.Metrics({"a": (1, 1)}).all_reduce_mean,
        functools.partial(af.split_over_ranks, [1]),
        functools.partial(af.logger, "name"),
        af.print_in_order,
        af.on_main,
        af.on_rank,
        lambda world: af.main_first(world).__enter__(),
        lambda world: af.stopping(world).__enter__(),
    ],
)
@pytest.mark.parametrize("world", [None, 2])
def test_what_is_no_world_is_refused(call, world):
    """Wherever ranks talk, or are told apart."""
    with pytest.raises(af.errors.ArgumentError, match=r"expected an af\.World, got"):
        call(world)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 1),
        (torch.float32, 0.1),
        (torch.float32, float("nan")),
        (torch.bfloat16, float("-inf")),
        (torch.uint8, 255),
        (torch.int64, -1.0),
        (torch.bool, True),
        (torch.complex64, 1j),
    ],
)
def test_what_a_dtype_holds_fills_up(dtype, value):
    """Rounded where it is a float, and with no other value."""

    def fn(world):
        return af.pad_across(
            torch.zeros(1 + world.rank, dtype=dtype), world, value=value
        )

    (found,) = simulate(2, fn)[0][1:]
    assert str(torch.tensor(value).to(dtype)) == str(found)


@given(
    lengths=st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=3),
)
def test_tensors_of_a_tree_may_have_lengths_of_their_own(lengths):
    """Each tensor of a ragged tree is joined by its own number of rows on each rank."""
    trees = [
        [
            torch.full((n, place + 1), 10.0 * rank + place)
            for place, n in enumerate(each)
        ]
        for rank, each in enumerate(lengths)
    ]
    expected = [torch.cat(rows) for rows in zip(*trees, strict=True)]

    def fn(world):
        return af.all_gather(trees[world.rank], world, ragged=True)

    for found in simulate(len(trees), fn):
        for rows, own in zip(expected, found, strict=True):
            assert torch.equal(rows, own)


@given(
    chunks=st.permutations(range(4)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_checksum_tells_where_parts_of_a_large_tensor_stand(chunks, dtype):
    """Chunks that change places are another tensor; only the same tensor has its checksum."""
    length = 1 << 15
    tensor = torch.arange(4 * length).remainder(251).to(dtype)
    moved = torch.cat([tensor.split(length)[each] for each in chunks])
    is_same = torch.equal(tensor, moved)
    assert is_same == (int(checksum(tensor)) == int(checksum(moved)))


@pytest.mark.parametrize("other", ["frozen", "longer", "wider"])
def test_ranks_that_hold_other_models_are_told(other):
    """In names, shapes, and which parameters are trained, whatever their values."""

    def fn(world):
        tensors, trained = {"a": torch.ones(2), "b": torch.ones(3)}, {"a", "b"}
        if not world.is_main:
            trained -= {"b"} if other == "frozen" else set()
            tensors |= {"c": torch.ones(1)} if other == "longer" else {}
            tensors |= {"b": torch.ones(4)} if other == "wider" else {}
        check_replicas(tensors, world, label="model", values=False, trainable=trained)

    with pytest.raises(af.errors.ReplicaMismatchError, match="differ in structure"):
        simulate(2, fn)


def labelled(name, world):
    """Call a public collective under a label of ours."""
    given = {
        "barrier": lambda: (),
        "all_gather_valid": lambda: (torch.ones(1), one_batch(world)),
        "any_rank": lambda: (False,),
        "all_ranks": lambda: (True,),
        "broadcast_object": lambda: ("text",),
        "all_gather_objects": lambda: ("text",),
        "scatter": lambda: ([torch.ones(1)] * world.size,),
        "all_to_all": lambda: ([torch.ones(1)] * world.size,),
    }.get(name, lambda: (torch.ones(1),))()
    getattr(af, name)(*given, world, label="ours")
    return [label for label, _ in world.connection.activity.trail]


def one_batch(world):
    state = linear_state(
        data=af.Data(torch.ones(2, 1), global_batch_size=world.size),
        setup=af.shard_data(),
        world=world,
    )
    return next(iter(af.batches(state)))


LABELLED = [
    *("all_ranks", "all_to_all", "any_rank", "barrier", "broadcast"),
    *("all_gather", "all_gather_objects", "all_gather_valid", "all_reduce"),
    *("broadcast_object", "pad_across", "scatter"),
]


@pytest.mark.parametrize("name", LABELLED)
def test_every_collective_says_what_for(name):
    """The label that a call gives is what errors, and the record of calls, have."""
    for labels in simulate(2, lambda world: labelled(name, world)):
        assert "ours" in labels


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("m3553", "m5344"),  # the first, third and fifth byte of the sums are equal
        ("m832", "m893"),  # the others are
        ("m26546", "m129860"),  # the first four are
        ("m22784", "m85226"),  # all but the two in the middle are
        ("m64665", "m81643"),  # the last four are
    ],
)
def test_texts_are_told_apart_by_all_of_their_sum(one, two, size):
    """Two texts of which a part of the checksum is equal are two, on whichever rank one is."""
    for place in range(size):
        texts = [json.dumps([two if rank == place else one]) for rank in range(size)]

        def fn(world, texts=texts):
            return is_same_text(texts[world.rank], world, label="texts")

        assert set(simulate(size, fn)) == {False}
    assert all(simulate(size, lambda world: is_same_text(one, world, label="one")))


@pytest.mark.parametrize("field", ["params", "buffers"])
@pytest.mark.parametrize("call", [af.all_reduce, af.all_gather, af.broadcast])
def test_what_a_state_shows_travels_as_a_dict(call, field):
    """Ranks exchange `state.params` itself, and get a dict of what became of each tensor."""

    def fn(world):
        state = af.TrainState.create(
            model=lambda: torch.nn.BatchNorm1d(3),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            world=world,
        )
        shown = getattr(state, field)
        found, plain = call(shown, world), call(dict(shown), world)
        assert type(found) is dict
        assert list(found) == list(shown)
        assert all(torch.equal(found[n], plain[n]) for n in plain)
        return len(found)

    assert set(simulate(2, fn)) == {2 if field == "params" else 3}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_that_is_begun_is_there_when_it_is_waited_for(size, dtype):
    """In place; and in a world of one it is what was given, at once."""

    def fn(world):
        flat = torch.tensor([1.0 + world.rank, 2.0], dtype=dtype)
        wait = start_sum_(flat, world, label="a sum")
        begun = flat.isnan().all().item()
        wait()
        return begun, flat.tolist(), flat.dtype

    total = size * (size + 1) / 2
    for found in simulate(size, fn):
        assert found == (size > 1, [total, 2.0 * size], dtype)
