# SPDX-License-Identifier: Apache-2.0
"""`assert_states_equal`: reflexive, and no single change of a state escapes it."""

import math
import re
from typing import NamedTuple

import attrs
import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import LawError
from accelfn.testing import assert_states_equal, simulate
from tests.catalog import stacks
from tests.internals import Lease, tree
from tests.strategies import Run, runs

FIELDS = ("params", "buffers", "opt_state", "slots")


class Pair(NamedTuple):
    first: object
    second: object


tensors = st.builds(
    lambda values, dtype: torch.tensor(values).to(dtype),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.sampled_from(
        [
            *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
            *(torch.int64, torch.uint8, torch.bool, torch.complex64),
        ]
    ),
)
plain = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    st.floats(allow_nan=True),
)
trees = st.recursive(
    tensors | plain,
    lambda inside: st.one_of(
        st.lists(inside, max_size=2),
        st.tuples(inside, inside),
        st.builds(Pair, inside, inside),
        st.dictionaries(st.text(max_size=2), inside, max_size=2),
    ),
    max_leaves=4,
)


@st.composite
def states(draw: st.DrawFn) -> af.TrainState:
    """Draw a state of some transforms after some updates, with an entry of the user's own."""
    run = draw(runs(n=4, batch_size=4, updates=1, setup=af.chain(*draw(stacks(3)))))
    if draw(st.booleans()):
        run = attrs.evolve(run, kind="norm")  # has buffers; cannot train on single rows
    updates = 0 if run.kind == "norm" else draw(st.integers(0, 1))
    state, _ = run.train(run.state(), updates)
    return state.with_slot("mine", draw(trees))


def state_of(**slots: object) -> af.TrainState:
    state = Run(kind="tied").state()
    for name, value in slots.items():
        state = state.with_slot(name, value)
    return state


def refused(a: af.TrainState, b: af.TrainState, **tolerance: float) -> list[str]:
    """Return the lines of the refusal."""
    with pytest.raises(LawError) as caught:
        assert_states_equal(a, b, **tolerance)
    return str(caught.value).splitlines()


def replaced(state: af.TrainState, field: str, index: int, leaf: object):
    """Return a copy of the state with another leaf at a place of a field."""
    places = iter(range(10**6))
    values = dict(getattr(state.copy(), field))
    changed = tree.tree_map(lambda old: leaf if next(places) == index else old, values)
    return attrs.evolve(state, **{field: changed}, lease=Lease())


def flipped(tensor: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    """Return a tensor in which one bit of one element is another."""
    if tensor.dtype is torch.bool:
        changed = tensor.clone().reshape(-1)
        changed[place % tensor.numel()] ^= True
        return changed.view(tensor.shape)
    raw = bytearray(tensor.reshape(-1).view(torch.uint8).tolist())
    width = tensor.element_size()
    position = (place % tensor.numel()) * width + bit % width
    raw[position] ^= 1 << bit % 8
    return torch.tensor(list(raw), dtype=torch.uint8).view(tensor.dtype).view_as(tensor)


def changed_plain(leaf: object) -> object:
    """Return another value, as near as can be."""
    match leaf:
        case bool():
            return not leaf
        case int():
            return leaf + 1
        case float():
            return 0.0 if math.isnan(leaf) else math.nextafter(leaf, 1e308)
        case str():
            return leaf + "x"
        case _:
            return 0


@given(state=states())
def test_a_state_equals_itself_and_its_copy(state):
    """Whatever it holds, NaN included."""
    assert_states_equal(state, state)
    assert_states_equal(state, state.copy())
    assert_states_equal(state, state.copy(), rtol=1e-3)


@given(state=states(), data=st.data())
def test_a_change_of_one_leaf_is_found_and_named(state, data):
    """One bit of one tensor, or one plain value, is one line with its place."""
    field = data.draw(st.sampled_from([f for f in FIELDS if getattr(state, f)]))
    leaves = tree.tree_leaves(dict(getattr(state, field)))
    assume(leaves)
    index = data.draw(st.integers(0, len(leaves) - 1))
    leaf = leaves[index]
    if isinstance(leaf, torch.Tensor):
        place, bit = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 63)))
        new = flipped(leaf, place, bit)
    else:
        new = changed_plain(leaf)
    event(f"{field}: {type(leaf).__name__}")
    for lines in (
        refused(state, replaced(state, field, index, new)),
        refused(replaced(state, field, index, new), state),
    ):
        assert len(lines) == 2
        assert lines[1].startswith(f"  {field}[")
        assert lines[0].startswith("The states differ in 1 entry (first state and ")


@given(state=states(), field=st.sampled_from(["step", "seed", "epoch", "samples"]))
def test_a_change_of_a_number_is_found_and_named(state, field):
    """The counts, the seed and the place in the data belong to a state."""
    cursor = {"epoch": "cursor.epoch", "samples": "cursor.samples"}
    if field in cursor:
        moved = attrs.evolve(state.cursor, **{field: getattr(state.cursor, field) + 1})
        other = attrs.evolve(state, cursor=moved)
    else:
        other = attrs.evolve(state, **{field: getattr(state, field) + 1})
    (_, line) = refused(state, other)
    assert line.startswith(f"  {cursor.get(field, field)}: ")


@given(state=states(), field=st.sampled_from(FIELDS), data=st.data())
def test_an_entry_that_only_one_has_is_found_and_named(state, field, data):
    """On either side."""
    entries = dict(getattr(state, field))
    assume(entries)
    gone = data.draw(st.sampled_from(sorted(entries)))
    left = {name: entry for name, entry in entries.items() if name != gone}
    other = attrs.evolve(state, **{field: left})
    (_, line) = refused(state, other)
    assert line.startswith(f"  {field}[{gone!r}]: only in the first: ")
    (_, line) = refused(other, state)
    assert line.startswith(f"  {field}[{gone!r}]: only in the second: ")


@pytest.mark.parametrize(
    ("one", "two", "line"),
    [
        (0.0, -0.0, "0.0 and -0.0"),
        (1, 1.0, "1 and 1.0"),
        (1, True, "1 and True"),
        ((1,), [1], "a tuple of 1 and a list of 1"),
        ({}, [], "{} and []"),
        (
            torch.ones(2),
            torch.ones(1, 2),
            "(2,) float32 tensor and (1, 2) float32 tensor",
        ),
        (
            torch.ones(2),
            torch.ones(2).half(),
            "(2,) float32 tensor and (2,) float16 tensor",
        ),
        (
            torch.tensor([[0.5, 1.0], [2.0, 3.0]]),
            torch.tensor([[0.5, 1.5], [2.0, 4.0]]),
            (
                "2 of 4 elements differ, the first at [0, 1]: 1.0 and 1.5, largest"
                " difference 1"
            ),
        ),
        (
            torch.tensor([0.1]),
            torch.tensor([0.1]).nextafter(torch.ones(1)),
            "1 of 1 elements differs, at [0]: 0.1 and 0.10000001, difference 7.45e-09 (1 ulp)",
        ),
        (
            torch.tensor(0x7FC00000).int().view(torch.float32),
            torch.tensor(0x7FC00001).int().view(torch.float32),
            "nan of bits 0x7fc00000 and nan of bits 0x7fc00001",
        ),
    ],
    ids=repr,
)
def test_what_a_line_says(one, two, line):
    """Types, shapes and bits count; the values are shown as they are."""
    assert refused(state_of(x=one), state_of(x=two))[1:] == [f"  slots['x']: {line}"]
    assert_states_equal(state_of(x=two), state_of(x=two))


def test_a_tensor_shared_by_two_entries_counts():
    """Values alone do not make states equal: a step would move both entries at once."""
    tensor = torch.ones(2)
    shared, apart = state_of(x=[tensor, tensor]), state_of(x=[tensor, tensor.clone()])
    assert_states_equal(shared, shared.copy())
    assert refused(shared, apart)[1:] == [
        "  slots['x'][1]: one tensor with slots['x'][0] in the first only"
    ]
    assert refused(apart, shared)[1:] == [
        "  slots['x'][1]: one tensor with slots['x'][0] in the second only"
    ]


def test_many_differences_are_counted():
    """At most 20 lines, and how many more there are."""
    one, two = state_of(x=list(range(50))), state_of(x=list(range(1, 51)))
    lines = refused(one, two)
    assert lines[0] == "The states differ in 50 entries (first state and second state):"
    assert len(lines) == 22
    assert lines[-1] == "  and 30 more"
    one, two = state_of(x=list(range(21))), state_of(x=list(range(1, 22)))
    assert refused(one, two)[-1] == "  and 1 more"


@given(
    values=st.lists(st.floats(-8, 8), min_size=1, max_size=3),
    scale=st.floats(0.0, 4.0),
    rtol=st.sampled_from([0.0, 0.25]),
    atol=st.sampled_from([0.0, 0.5]),
    beyond=st.sampled_from([[], [], [math.inf], [-math.inf]]),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
)
def test_a_tolerance_is_of_the_largest_element(
    values, scale, rtol, atol, beyond, dtype
):
    """An element may be off by `atol + rtol * largest` finite one, and by no more."""
    one = torch.tensor([*values, *beyond], dtype=dtype)
    two = one.clone()
    two[0] += scale
    largest = max(float(t[: len(values)].abs().max()) for t in (one, two))
    off, allowed = float(abs(one[0] - two[0])), atol + rtol * largest
    if off <= allowed and (off or not torch.equal(one, two) or allowed):
        assert_states_equal(state_of(x=one), state_of(x=two), rtol=rtol, atol=atol)
    elif off:
        (_, line) = refused(state_of(x=one), state_of(x=two), rtol=rtol, atol=atol)
        assert re.match(r"  slots\['x'\]: 1 of \d elements differs, at \[0\]: ", line)


def test_with_a_tolerance_nan_equals_nan_and_integers_are_exact():
    """A tolerance is for rounding."""
    bits = torch.tensor([0x7FC00000, 0x7FC00001]).int().view(torch.float32)
    one = state_of(nan=bits[:1], inf=torch.tensor([math.inf]), zero=0.0, count=100)
    two = state_of(nan=bits[1:], inf=torch.tensor([math.inf]), zero=-0.0, count=100)
    assert_states_equal(one, two, rtol=0.1)
    assert len(refused(one, two)) == 3
    assert refused(one, two.with_slot("count", 101), rtol=0.1, atol=5)[1:] == [
        "  slots['count']: 100 and 101"
    ]
    (line,) = refused(one, two.with_slot("nan", torch.ones(1)), rtol=0.1)[1:]
    assert "slots['nan']: 1 of 1 elements differs" in line
    assert refused(one, two.with_slot("inf", torch.tensor([1.0])), rtol=0.1)[1:] == [
        "  slots['inf']: 1 of 1 elements differs, at [0]: inf and 1.0"
    ]


def test_a_donated_state_is_refused():
    """It says at which update it was given away, as any other use of it does."""
    run = Run()
    state = run.state()
    after, _ = run.train(state, 1)
    for pair in ((state, after), (after, state)):
        with pytest.raises(af.errors.StateDonatedError, match="update 0"):
            assert_states_equal(*pair)


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf, "0"])
def test_a_tolerance_that_is_none_is_refused(tolerance):
    """Negative, infinite, or no number."""
    state = Run().state()
    with pytest.raises(af.errors.ArgumentError, match="rtol="):
        assert_states_equal(state, state, rtol=tolerance)


def test_what_is_no_state_is_refused():
    """A state dict, say."""
    state = Run().state()
    with pytest.raises(af.errors.ArgumentError, match="expected two TrainStates"):
        assert_states_equal(state, dict(state.params))


def test_what_is_on_its_way_is_compared():
    """An exchange in flight equals its copy's, and another one is named by its element."""

    def train(world):
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(2, 1),
            optimizer=torch.optim.SGD,
            data=af.Data(torch.ones(8, 2), global_batch_size=2),
            setup=af.chain(af.shard_data(), af.diloco(sync_every=4, delay=2)),
            world=world,
        )
        step = af.make_step(lambda model, x: model(x).square().mean())
        for _ in range(4):
            state, _ = step(state, next(iter(af.batches(state))))
        other = state.copy()
        assert_states_equal(state, other)
        flight = other.slots["diloco"]["flights"]["0"]["values"].wait()
        flight["sums"]["weight"].add_(1)
        with pytest.raises(AssertionError, match=r"flights.*wait\(\).*weight"):
            assert_states_equal(state, other)

    simulate(2, train)
