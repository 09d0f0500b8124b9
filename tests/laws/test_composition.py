# SPDX-License-Identifier: Apache-2.0
"""chain is associative, chain() its unit, different fields commute, doubles are refused."""

import pickle

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.catalog import CATALOG, public_transforms, stacks
from tests.internals import FIELDS
from tests.strategies import Run, differences, tensors

VALUES = [entry.transform for entry in CATALOG]
by_name = pytest.mark.parametrize("value", VALUES, ids=lambda each: each.name)


def test_catalog_is_complete():
    """Every public transform has an entry in the catalog."""
    assert public_transforms() == {type(value) for value in VALUES}


@given(stack=stacks(), cuts=st.lists(st.integers(0, 9), max_size=3))
def test_associativity(stack: tuple, cuts: list[int]) -> None:
    """However a chain is nested, it is the same value."""
    flat = af.chain(*stack)
    nested: list[object] = []
    start = 0
    for cut in [*sorted(min(c, len(stack)) for c in cuts), len(stack)]:
        nested.append(af.chain(*stack[start:cut]))
        start = cut
    assert flat == af.chain(*nested)
    assert flat == af.chain(af.chain(), *nested, None)
    assert hash(flat) == hash(af.chain(*nested))


@by_name
def test_values(value: object) -> None:
    """A transform is a value: printed as code, compared, hashed, pickled, never assigned to."""
    assert value == eval(repr(value), {"af": af})  # noqa: S307 - what repr promises
    assert value == pickle.loads(pickle.dumps(value))  # noqa: S301
    assert hash(value) == hash(eval(repr(value), {"af": af}))  # noqa: S307
    with pytest.raises(af.errors.RecordError):
        value.name = "other"


@given(stack=stacks())
def test_chain_prints_as_code(stack: tuple) -> None:
    """repr of a chain is the code that makes it."""
    setup = af.chain(*stack)
    assert setup == eval(repr(setup), {"af": af})  # noqa: S307
    assert setup == pickle.loads(pickle.dumps(setup))  # noqa: S301


@by_name
def test_the_same_name_twice_is_refused(value: object) -> None:
    """Two transforms of one name do not compose; under another name they may."""
    with pytest.raises(af.errors.CompositionError, match=value.name):
        af.chain(value, value)


@given(stack=stacks())
def test_unit_and_application(stack: tuple) -> None:
    """chain() leaves a state as it is; applying one by one is applying the chain."""
    state = Run().state()
    assert state is af.chain()(state)
    at_once = af.chain(*stack)(state)
    one_by_one = state
    for each in stack:
        one_by_one = each(one_by_one)
    assert at_once.setup == one_by_one.setup
    assert differences(tensors(at_once), tensors(one_by_one)) == []
    assert af.chain() == state.setup


@given(data=st.data())
def test_transforms_about_different_fields_commute(data: st.DataObject) -> None:
    """Where two transforms share no field, their order changes neither state nor metrics."""
    one, two = data.draw(st.permutations(VALUES))[:2]
    try:
        af.chain(one, two)
    except af.errors.CompositionError:
        return  # refused, see below
    fields = [{f for f in FIELDS if hasattr(type(t), f)} for t in (one, two)]
    # init is each one's own; metrics of accumulate are sums in micro-batches
    if (fields[0] & fields[1]) - {"init"}:
        return
    results = []
    for order in ((one, two), (two, one)):
        run = Run(
            setup=af.chain(*order), n=11, batch_size=5, dyadic=False, loss="squared"
        )
        state, metrics = run.train(run.state())
        results.append((tensors(state), [dict(m) for m in metrics]))
    assert differences(results[0][0], results[1][0]) == []
    assert results[0][1] == results[1][1]


def test_pairs_without_meaning_are_refused():
    """DDP beside local SGD, and a static graph beside accumulation, name both and why."""
    for pair, why in (
        ((af.wrap_ddp(), af.local_sgd(sync_every=2)), "no gradients to reduce"),
        ((af.check_replicas(every=2), af.local_sgd(sync_every=2)), "differ on purpose"),
        (
            (af.accumulate(num_micro_batches=2), af.wrap_ddp(static_graph=True)),
            "several",
        ),
    ):
        for order in (pair, pair[::-1]):
            with pytest.raises(af.errors.CompositionError, match=why):
                af.chain(*order)


@by_name
@given(stack=stacks(), updates=st.integers(0, 2))
def test_slots_are_conserved(value: object, stack: tuple, updates: int) -> None:
    """Adding a transform adds its own slot at most; taking it out removes exactly that."""
    others = [each for each in stack if each.name != value.name]
    try:
        setup = af.chain(*others, value)
    except af.errors.CompositionError:
        return  # refused, see above
    run = Run(n=12, setup=af.chain(*others))
    plain, _ = run.train(run.state(), updates)
    plain = plain.with_slot("mine", torch.ones(2))
    with_it = plain.with_setup(setup)
    assert set(with_it.slots) - set(plain.slots) <= {value.name}
    without = with_it.with_setup(af.chain(*others))
    assert without.slots.keys() == plain.slots.keys()
    for state in (with_it, without):
        assert all(state.slots[name] is plain.slots[name] for name in plain.slots)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in CATALOG if entry.neutral is not None],
    ids=lambda entry: entry.name,
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_neutral_arguments_change_nothing(entry, optimizer):
    """At its neutral argument a transform is the identity on params, bitwise."""
    plain = Run(n=11, batch_size=4, updates=4, optimizer=optimizer, dyadic=False)
    with_it = attrs.evolve(plain, setup=af.chain(entry.neutral))
    results = [tensors(run.train(run.state())[0]) for run in (plain, with_it)]
    for found in results:
        for path in [p for p in found if p.startswith("slots")]:
            del found[path]
    assert differences(*results) == []


@pytest.mark.parametrize(
    ("one", "two"),
    [(e.transform, other) for e in CATALOG for other in e.other.values()],
    ids=repr,
)
def test_every_option_is_observable(one, two):
    """Changing one option of a transform changes something of a run."""
    results = []
    for value in (one, two):
        run = Run(setup=af.chain(value), n=12, batch_size=6, updates=3, dyadic=False)
        run = attrs.evolve(run, loss="squared", kind="norm")
        state, metrics = run.train(run.state())
        found = tensors(state)
        found.update(
            {f"metric.{k}{i}": m[k].double() for i, m in enumerate(metrics) for k in m}
        )
        results.append(found)
    if type(one) is af.local_sgd:  # in a world of 1 its period shows in the slot alone
        assert (
            results[0]["slots.local_sgd.since"] != results[1]["slots.local_sgd.since"]
        )
    assert differences(*results) != []
