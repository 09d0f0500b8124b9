# SPDX-License-Identifier: Apache-2.0
"""What is drawn is valid by construction, prints as code, and shrinks to the simplest."""

import pickle

import attrs
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty

import accelfn as af
from accelfn.testing import assert_states_equal, catalog, simulate, strategies
from accelfn.testing.strategies import (
    Criterion,
    Net,
    Program,
    Samples,
    TorchOptimizer,
    chains,
    datasets,
    losses,
    models,
    optimizers,
    programs,
    schedules,
    sums,
    worlds,
)
from tests.internals import CATALOG, FIELDS, calls, has_field
from tests.strategies import differences, tensors

KINDS = [fault for fault in vars(calls).values() if fault in strategies.KINDS]
SIMPLEST = {
    "worlds": (worlds(), 1),
    "schedules": (schedules(), []),
    "sums": (sums(), "ranks"),
    "faults": (strategies.faults(2), ()),
    "chains": (chains(), af.chain()),
    "datasets": (datasets(), Samples([[0, 0, 0]], [[0, 0]])),
    "models": (models(), Net()),
    "losses": (losses(), Criterion("mean")),
    "optimizers": (optimizers(), TorchOptimizer("SGD", lr=0.5)),
    "programs": (
        programs(),
        Program(
            Samples([[0, 0, 0]], [[0, 0]]),
            setup=af.chain(af.shard_data(), af.wrap_ddp()),
            batch_size=1,
            updates=1,
        ),
    ),
}
NAMES = {"af": af, "linear": af.schedules.linear, **vars(strategies)}
by_name = pytest.mark.parametrize("name", sorted(SIMPLEST))


def alone(program: Program) -> af.TrainState:
    """Train in a world of one, in a setup that does nothing."""
    plain = attrs.evolve(program, setup=af.chain())
    return plain(af.World.single(device="cpu"))


@by_name
def test_the_simplest_comes_first(name):
    """A strategy shrinks to the least that there is of its kind."""
    strategy, simplest = SIMPLEST[name]
    first = settings(max_examples=1, phases=[Phase.generate])
    assert simplest == find(strategy, lambda _: True, settings=first)


@by_name
@given(data=st.data())
def test_what_is_drawn_prints_as_code(data, name):
    """What hypothesis shows of a failing example makes an equal value, and so does repr."""
    drawn = data.draw(SIMPLEST[name][0])
    if name != "faults":
        assert drawn == eval(repr(drawn), NAMES)  # noqa: S307 - what repr promises
    if name not in {"faults", "chains"}:
        assert drawn == eval(pretty(drawn), NAMES)  # noqa: S307
    assert drawn == pickle.loads(pickle.dumps(drawn))  # noqa: S301


class TestChains:
    """Chains compose by construction, and have what is asked of them."""

    @given(data=st.data())
    def test_included_and_excluded(self, data):
        """Classes and transforms that are included are there, those excluded are not."""
        classes = [row.cls for row in CATALOG]
        order = data.draw(st.permutations(classes))
        mine = data.draw(st.sampled_from([Halve(), Whole()]))
        size = data.draw(st.integers(0, 3))
        setup = data.draw(
            chains(include=[mine, order[0]], exclude=order[1:3], max_size=size)
            if order[0] not in (af.wrap_ddp, af.local_sgd, af.diloco)
            else chains(include=[mine], exclude=order[1:3], max_size=size)
        )
        assert mine in list(setup)
        assert len(setup) <= size + 2
        assert {type(each) for each in setup}.isdisjoint(order[1:3])
        if order[0] not in (af.wrap_ddp, af.local_sgd, af.diloco):
            assert order[0] in {type(each) for each in setup}

    def test_what_is_included_takes_no_other_place(self):
        """`max_size` counts what is drawn beside what is included, and all of it may be drawn."""
        mine = [Halve(), Whole(), af.ema(0.5)]
        full = chains(include=mine, max_size=2)
        find(full, lambda setup: len(setup) == 5)

    @given(data=st.data(), field=st.sampled_from(FIELDS))
    def test_of_a_field(self, data, field):
        """All that is drawn has a say in the field that is asked for."""
        assert all(has_field(each, field) for each in data.draw(chains(field=field)))

    @given(setup=chains(reduced=True))
    def test_reduced(self, setup):
        """Exactly one transform says how gradients cross ranks."""
        assert len([*setup.owners["engine"], *setup.owners["reduce"]]) == 1

    @given(setup=chains(reduced=True, include=[af.local_sgd(sync_every=2)]))
    def test_reduced_by_what_is_included(self, setup):
        """What is included may be what reduces; no other does then."""
        assert af.local_sgd(sync_every=2) in list(setup)
        assert setup.owners["engine"] == ()

    @given(setup=chains(include=[af.wrap_ddp(static_graph=True)]))
    def test_an_included_option_is_respected(self, setup):
        """Beside a static graph nothing is drawn that runs several backward passes."""
        assert setup.owners["value_and_grad"] == ()

    @given(setup=chains(include=[af.accumulate, af.wrap_ddp]))
    def test_included_classes_draw_options_that_compose(self, setup):
        """Two classes that are included get options under which both can be there."""
        assert {af.accumulate, af.wrap_ddp} <= {type(each) for each in setup}

    @pytest.mark.slow
    def test_every_transform_and_every_order(self):
        """Each transform is drawn, and two come in either order."""
        for row in CATALOG:
            found = find(chains(), lambda s, cls=row.cls: cls in map(type, s))
            assert [type(each) for each in found] == [row.cls]
        for one in (af.shard_data(), af.ema(0.5)):
            mine = chains(include=[af.shard_data(), af.ema(0.5)], max_size=0)
            assert find(mine, lambda s, one=one: s.transforms[0] == one)


@af.transform
class Halve:
    """A user's transform about gradients."""

    def grads(self, grads, slot, update):
        return grads.map(lambda grad: grad / 2), slot


@af.transform
class Whole:
    """A user's transform that reduces gradients by itself."""

    def reduce(self, grads, slot, update):
        return grads, slot


class TestModels:
    """Models are what their recipe says."""

    @given(net=models())
    def test_the_parts_of_a_recipe(self, net):
        """Each part of a recipe is in the module, and nothing else is."""
        module = net()
        params = list(module.parameters())
        names = list(dict(module.named_parameters(remove_duplicate=False)))
        assert net.tied == (len(names) > len(params))
        assert net.frozen == any(not param.requires_grad for param in params)
        assert net.norm == bool(list(module.buffers()))
        assert net.unused == ("unused" in names)
        linear = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
        assert len(linear) == net.depth + 2 * net.tied + net.frozen + 1
        assert net.bias == any("bias" in name for name in names if "norm" not in name)

    @given(net=models(), rows=st.integers(1, 3))
    def test_a_backward_pass(self, net, rows):
        """Any number of samples goes through, and trains all but frozen and unused parts."""
        torch.manual_seed(0)
        module = net()
        outputs = module(torch.ones(rows, net.inputs, dtype=torch.float64))
        assert outputs.shape == (rows, net.outputs)
        outputs.sum().backward()
        lacking = {n for n, p in module.named_parameters() if p.grad is None}
        idle = {n for n, p in module.named_parameters() if not p.requires_grad}
        assert lacking == idle | ({"unused"} if net.unused else set())

    @given(net=models(norm=False, dropout=False))
    def test_per_sample(self, net):
        """Without norm and dropout a sample's output is its own, whatever stands beside it."""
        assert net.per_sample
        together, apart = outputs_of_rows(net)
        assert torch.allclose(together, apart, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("net", [Net(norm=True), Net(dropout=True)], ids=repr)
    def test_not_per_sample(self, net):
        """With either, it is not; the recipe says so."""
        assert not net.per_sample
        together, apart = outputs_of_rows(net)
        assert not torch.allclose(together, apart)

    @given(net=models(dyadic=True, width=2))
    def test_given_fields(self, net):
        """A field that is given is not drawn; dyadic weights are -1, 1 and 2."""
        assert net.width == 2
        weights = torch.cat([param.flatten() for param in net().parameters()])
        assert set(weights.tolist()) <= {-1.0, 1.0, 2.0}


def outputs_of_rows(net: Net) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of three samples as one batch, and as two."""
    torch.manual_seed(0)
    module = net()
    rows = torch.tensor([[1, -2, 3], [-3, 1, 1], [2, 2, -1]], dtype=torch.float64)
    return module(rows), torch.cat([module(rows[:1]), module(rows[1:])])


class TestLosses:
    """Losses are totals with weights, or a mean."""

    @given(loss=losses(), samples=datasets(dyadic=True), cut=st.integers(0, 12))
    def test_totals_add(self, loss, samples, cut):
        """The totals and weights of two parts are those of the whole."""
        net = Net(dyadic=True)()
        whole = total_and_weight(loss, net, samples.tensors)
        parts = [
            total_and_weight(loss, net, tuple(t[rows] for t in samples.tensors))
            for rows in (slice(0, cut), slice(cut, None))
            if len(samples.inputs[rows])
        ]
        added = tuple(map(sum, zip(*parts, strict=True)))
        assert added == pytest.approx(whole, rel=1e-12)

    @pytest.mark.parametrize("reduction", ["weighted", "masked"])
    def test_weights_of_nothing(self, reduction):
        """Batches are drawn of which no sample counts; the loss is 0, with a gradient."""
        loss = Criterion(reduction)
        net = Net(dyadic=True)()
        samples = find(datasets(), lambda drawn: loss(net, drawn.tensors).weight == 0)
        total = loss(net, samples.tensors).total
        assert (total.item(), total.requires_grad) == (0.0, True)


def total_and_weight(loss, net, batch) -> tuple[float, float]:
    value = loss(net, batch)
    if isinstance(value, af.Loss):
        return value.total.item(), float(value.weight)
    return value.item() * len(batch[0]), float(len(batch[0]))


class TestDatasets:
    """Datasets are rows of small numbers."""

    @given(data=st.data(), dyadic=st.booleans(), size=st.integers(1, 5))
    def test_rows(self, data, dyadic, size):
        """There are as many as asked for, and integers where they must be."""
        samples = data.draw(
            datasets(dyadic=dyadic, inputs=2, outputs=1, min_size=size, max_size=5)
        )
        inputs, targets = samples.tensors
        assert inputs.shape == (len(samples), 2)
        assert targets.shape == (len(samples), 1)
        assert size <= len(samples) <= 5
        if dyadic:
            assert torch.equal(inputs, inputs.round())


class TestOptimizers:
    """Optimizers are torch's own."""

    @given(optimizer=optimizers())
    def test_a_factory(self, optimizer):
        """One is made of named parameters, with the options that it prints."""
        made = optimizer([("weight", torch.nn.Parameter(torch.ones(2)))])
        assert type(made).__name__ == optimizer.name
        (group,) = made.param_groups
        assert dict(optimizer.options).items() <= group.items()

    @given(optimizer=optimizers(dyadic=True))
    def test_dyadic(self, optimizer):
        """The first update of a dyadic one is of multiples of a power of two."""
        weight = torch.nn.Parameter(torch.tensor([1.0, 3.0]))
        made = optimizer([("weight", weight)])
        weight.grad = torch.tensor([1.0, -5.0])
        made.step()
        assert torch.equal(weight * 16, (weight * 16).round())


class TestRanks:
    """Sizes, turns and faults fit the world."""

    @given(data=st.data(), size=worlds((1, 2, 3)))
    def test_they_fit(self, data, size):
        """Choices and faults are of ranks that there are, one fault at most."""
        assert size in (1, 2, 3)
        assert all(0 <= each < size for each in data.draw(schedules(size)))
        planned = data.draw(strategies.faults(size))
        assert len(planned) <= 1
        assert all(fault.rank < size for fault in planned)

    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
    def test_every_fault_is_drawn(self, kind):
        """Each kind comes, at the simplest place."""
        found = find(strategies.faults(2), lambda drawn: [*map(type, drawn)] == [kind])
        assert found == (kind(0, 0),)

    @given(planned=strategies.faults(2, kinds=[calls.Leave], at=st.just("barrier")))
    def test_given_kinds_and_places(self, planned):
        """Only the kinds that are given are drawn, where they are wanted."""
        assert planned in [
            (),
            (calls.Leave(0, "barrier"),),
            (calls.Leave(1, "barrier"),),
        ]


class TestPrograms:
    """Programs train in every world."""

    @given(program=programs(), size=worlds(), schedule=schedules())
    def test_any_world_trains(self, program, size, schedule):
        """All ranks take all updates, and the order of turns changes nothing."""

        def train(world):
            return af.finalize(program(world))  # for what is under way

        run = simulate(size, train, schedule=schedule)
        again = simulate(size, train)
        for state, other in zip(run, again, strict=True):
            assert state.step == program.updates
            assert_states_equal(state, other)

    @given(program=programs(exact=True), size=worlds())
    def test_exact_programs_are_exact(self, program, size):
        """Any number of ranks gives an exact program exactly the result of one process."""
        expected = tensors(alone(program))
        for state in simulate(size, program):
            assert differences(expected, tensors(state)) == []

    @given(
        program=programs(
            model=models(norm=False, dropout=False, width=st.integers(1, 2)),
            setup=chains(field="data", include=[af.shard_data, af.wrap_ddp]),
        ),
        size=worlds(),
    )
    def test_splits_change_rounding_alone(self, program, size):
        """Without batch statistics and dropout, how a batch is split is a matter of rounding."""
        expected = alone(program)
        for state in simulate(size, program):
            assert_states_equal(expected, state, rtol=1e-9, atol=1e-9)

    @given(data=st.data())
    def test_given_fields(self, data):
        """A value stands for itself, a strategy is drawn from; what depends on it follows."""
        mine = attrs.field
        program = data.draw(
            programs(
                model=Net(inputs=2, outputs=1, unused=True),
                updates=st.sampled_from([5, 6]),
                loss=mine,
                batch_size=7,
            )
        )
        assert program.loss is mine
        assert program.updates in (5, 6)
        assert program.batch_size == 7
        assert [len(row) for row in program.dataset[0]] == [2, 1]

    @given(
        program=programs(model=models(unused=True), setup=chains(include=[af.wrap_ddp]))
    )
    def test_unused_parameters_are_looked_for(self, program):
        """A drawn wrap_ddp looks for unused parameters where the model has some."""
        (ddp,) = program.setup.owners["engine"]
        assert ddp.find_unused_parameters

    @given(program=programs(setup=af.wrap_ddp()))
    def test_a_given_setup_gets_models_that_it_trains(self, program):
        """Beside a wrap_ddp that does not look, no model with unused parameters is drawn."""
        assert program.setup == af.chain(af.wrap_ddp())
        assert not program.model.unused

    @pytest.mark.parametrize("model", [True, False], ids=["model", "any model"])
    @pytest.mark.parametrize("setup", [True, False], ids=["setup", "any setup"])
    @given(data=st.data())
    def test_what_is_given_is_not_changed(self, data, setup, model):
        """Of a setup and a model that do not go together the one that was drawn gives way."""
        net, chain = Net(unused=True), af.chain(af.wrap_ddp(), af.ema(0.5))
        program = data.draw(
            programs(
                setup=chain if setup else st.just(chain),
                model=net if model else st.just(net),
                remainder="pad",
                dataset=Samples([[1, 2, 3]], [[4, 5]]),
            )
        )
        ddp, average = program.setup
        assert average == af.ema(0.5)
        assert ddp.find_unused_parameters == (not setup)
        assert program.model == (
            net if model or not setup else attrs.evolve(net, unused=False)
        )
        assert program.remainder == "pad"
        assert program.dataset == Samples([[1, 2, 3]], [[4, 5]])

    @pytest.mark.ranks(2)
    @settings(max_examples=5)
    @given(program=programs())
    def test_processes_agree(self, program):
        """Real processes joined by Gloo give bitwise what simulated ranks give."""
        simulate(2, program, also="processes")


def test_the_package_exports_what_it_lists():
    """Every public name is there, and each strategy is a function of the package."""
    assert sorted(strategies.__all__) == strategies.__all__
    assert all(hasattr(strategies, name) for name in strategies.__all__)
    assert catalog.CATALOG is CATALOG


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: chains(include=[af.chain()]), "expected a transform"),
        (lambda: chains(include=[3]), "expected a transform"),
        (lambda: chains(include=[Net]), "pass a transform with"),
        (lambda: chains(field="grad"), "after_update"),
        (lambda: Net(depth=-1), "Net"),
        (lambda: Net(width=0), "Net"),
        (lambda: Net(dtype="int64"), "Net"),
        (lambda: Net(norm=True, inputs=1), "Net"),
        (lambda: Criterion("median"), "'masked'"),
        (lambda: Samples([[1], [2]], [[1]]), "2 rows of inputs, but 1"),
        (lambda: TorchOptimizer("Sgd", lr=1.0), "Sgd"),
    ],
)
def test_what_cannot_be_made_is_refused(make, words):
    """By the field, the name or what there is instead."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        make()
