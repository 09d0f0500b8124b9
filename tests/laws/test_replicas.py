# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold different parameters are found out, and those that agree are let be."""

from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import Pending, checksum
from tests.laws.worlds import DDP
from tests.ranks import programs
from tests.strategies import Run, runs

NAMES = sorted(Run().state().params)


@given(
    size=st.integers(2, 3),
    every=st.integers(1, 4),
    after=st.integers(1, 5),
    name=st.sampled_from(NAMES),
    data=st.data(),
)
def test_the_next_check_finds_one_element_of_one_rank(size, every, after, name, data):
    """All ranks raise after the update whose number is the next multiple; it names the tensor."""
    culprit = data.draw(st.integers(0, size - 1))
    run = Run(n=24, batch_size=4)
    setup = af.chain(DDP, af.check_replicas(every=every))
    run = attrs.evolve(run, setup=setup)
    due = (after // every + 1) * every

    def fn(world):
        state = run.state(world)
        for _ in range(due + 1):
            if state.step == after and world.rank == culprit:
                state.params[name].view(-1)[-1] += 1
            update = state.step + 1
            try:
                state, _ = run.train(state, 1)
            except af.errors.ReplicaMismatchError as error:
                return update, str(error)
        return 0, ""

    found = simulate(size, fn)
    looked = [each for each in found.log if "check_replicas" in str(each.label)]
    assert [each.kind for each in looked] == ["all_reduce"] * (due // every) + [
        "all_gather"  # of the checksums, which differ
    ]
    updates, told = zip(*found.results, strict=True)
    assert updates == (due,) * size
    assert len(set(told)) == 1
    assert f"first difference is:\n  rank 0: {name}: checksum " in told[0]
    assert told[0].count(f": {name}: checksum ") == size


@given(run=runs(), size=st.integers(1, 3), every=st.integers(1, 3))
def test_a_check_changes_nothing(run, size, every):
    """Ranks that agree train, bitwise, as without it."""
    plain = attrs.evolve(run, setup=DDP)
    looked = attrs.evolve(run, setup=af.chain(DDP, af.check_replicas(every=every)))
    before, after = (
        simulate(size, lambda world, each=each: programs.train(world, each)).results
        for each in (plain, looked)
    )
    for (states, means), (others, theirs) in zip(before, after, strict=True):
        assert means == theirs
        for one, other in zip(states, others, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("every", [1, 2])
def test_batch_statistics_may_differ(every):
    """Buffers that each rank counts for itself are no difference."""
    run = Run(n=16, batch_size=8, kind="norm", dyadic=False)
    run = attrs.evolve(run, setup=af.chain(DDP, af.check_replicas(every=every)))

    def fn(world):
        state, _ = run.train(run.state(world), 2)
        return state.buffers["norm.running_mean"].tolist()

    first, second = simulate(2, fn).results
    assert first != second


WORDS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.int64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.uint8: torch.int8,
}


@st.composite
def bits(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two tensors of bits: of the same elements elsewhere, or of some moved up and down."""
    dtype = draw(st.sampled_from(sorted(WORDS, key=str)))
    info = torch.iinfo(WORDS[dtype])
    number = st.sampled_from([0, 1, -1, info.min, info.max])
    number |= st.integers(info.min, info.max)
    numbers = draw(st.lists(number, min_size=1, max_size=6))
    others = draw(st.permutations(numbers))
    if draw(st.booleans()):
        step = draw(st.sampled_from([1, 2, 1 << (info.bits - 1)]))
        place = st.integers(0, len(numbers) - 1)
        others = [*numbers]
        for by in (step, -step):
            for at in draw(st.lists(place, max_size=2)):
                others[at] = (others[at] + by - info.min) % (1 << info.bits) + info.min
    gap = [0] * draw(st.sampled_from([0, 1, 1 << 15]))  # which is a chunk
    one, other = (
        torch.tensor([*each[:1], *gap, *each[1:]], dtype=WORDS[dtype]).view(dtype)
        for each in (numbers, others)
    )
    return one, other


@given(pair=bits())
def test_a_checksum_tells_bits_and_places_apart(pair):
    """It is the same where all bits are, and no other elements' or their places'."""
    one, other = pair
    same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert (checksum(one).item() == checksum(other).item()) == same
    padded = torch.stack([one, other], dim=1)
    assert checksum(padded[:, 0]).item() == checksum(one).item()


FIELDS = {
    "step": lambda s: attrs.evolve(s, step=s.step + 1),
    "num_skipped": lambda s: attrs.evolve(s, num_skipped=1),
    "seed": lambda s: attrs.evolve(s, seed=s.seed + 1),
    "cursor['samples']": lambda s: attrs.evolve(s, cursor=af.seek(s, 1).cursor),
    "slots['own']['n']": lambda s: s.with_slot("own", {**s.slots["own"], "n": 4}),
}
TENSORS = {  # whose first two elements change places, so that no sum changes
    "params['first.weight']": lambda s: s.params["first.weight"],
    "opt_state['first.weight']['momentum_buffer']": lambda s: s.opt_state[
        "first.weight"
    ]["momentum_buffer"],
    "slots['own']['x'][0]": lambda s: s.slots["own"]["x"][0],
    "buffers['norm.running_mean']": lambda s: s.buffers["norm.running_mean"],
}


@pytest.mark.parametrize("field", [*FIELDS, *TENSORS])
@pytest.mark.parametrize("culprit", [0, 2])
def test_whatever_differs_in_a_state_is_named(field, culprit):
    """On all ranks, with a row for each; states that are the same are let be."""
    run = Run(n=24, batch_size=6, kind="norm", dyadic=False, optimizer="momentum")
    run = attrs.evolve(run, setup=af.chain(DDP, af.sync_batchnorm()))

    def fn(world):
        state, _ = run.train(run.state(world), 2)
        state = state.with_slot("own", {"x": [torch.arange(4.0)], "n": 3})
        af.assert_replicas_agree(state)
        if world.rank == culprit and field in TENSORS:
            flat = TENSORS[field](state).view(-1)
            first, second = flat[0].item(), flat[1].item()
            flat[0], flat[1] = second, first + (first == second)
        elif world.rank == culprit:
            state = FIELDS[field](state)
        with pytest.raises(af.errors.ReplicaMismatchError) as told:
            af.assert_replicas_agree(state)
        return str(told.value)

    told = set(simulate(3, fn).results)
    assert len(told) == 1
    (text,) = told
    assert all(f"\n  rank {rank}: {field}: " in text for rank in range(3))
    assert "TrainState.create" not in text


@attrs.frozen
class Keeping:
    values: list[object]

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


CONTAINERS: dict[str, Callable[[list[object]], object]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda values: dict(enumerate(values)),
    "pending": Pending.of,
    "object": Keeping,
}
IN_SLOTS = st.recursive(
    st.just("leaf"),
    lambda inner: st.tuples(st.sampled_from(sorted(CONTAINERS)), inner),
    max_leaves=4,
)


def around(kinds: object, leaf: object) -> object:
    """Return a leaf in containers of these kinds, behind another each time."""
    if kinds == "leaf":
        return leaf
    return CONTAINERS[kinds[0]]([torch.ones(2), around(kinds[1], leaf)])


@given(
    kinds=IN_SLOTS,
    leaf=st.sampled_from([torch.zeros(2), 0, 0.5, "text", None]),
    size=st.integers(2, 3),
    data=st.data(),
)
def test_any_leaf_of_a_slot_is_compared(kinds, leaf, size, data):
    """However deep it lies, in whatever a slot may have, and whatever it is."""
    culprit = data.draw(st.integers(0, size - 1))
    other = leaf + 1 if isinstance(leaf, (torch.Tensor, int, float)) else "other"

    def fn(world, *, differ):
        mine = other if differ and world.rank == culprit else leaf
        state = Run().state(world).with_slot("mine", around(kinds, mine))
        try:
            af.assert_replicas_agree(state)
        except af.errors.ReplicaMismatchError as error:
            return str(error)
        return ""

    assert set(simulate(size, lambda world: fn(world, differ=False))) == {""}
    (said,) = set(simulate(size, lambda world: fn(world, differ=True)))
    assert "slots['mine']" in said
