# SPDX-License-Identifier: Apache-2.0
"""`transform` and `chain`: values that are compared, printed, composed and refused."""

import pytest
import torch

import accelfn as af
from accelfn.errors import ArgumentError, CompositionError
from tests.states import linear_state

ALL = (
    af.shard_data(),
    af.wrap_ddp(),
    af.autocast("bf16"),
    af.accumulate(num_micro_batches=4),
    af.clip_grad_norm(1.0, norm_type=1.0),
    af.clip_grad_value(0.5),
    af.ema(0.9),
    af.identity(),
)


def test_two_of_one_kind_under_two_names():
    """Under names of their own two transforms of one kind are fine."""
    assert len(af.chain(af.ema(0.9), af.ema(0.99, name="slow"))) == 2


def test_two_engines():
    """Two engines are refused, both shown."""
    words = r"two engines.*wrap_ddp.*Keep one"
    with pytest.raises(CompositionError, match=words) as caught:
        af.chain(af.wrap_ddp(), af.wrap_ddp(name="other"))
    assert isinstance(caught.value, ValueError)


def test_two_ways_to_reduce():
    """Two ways to reduce gradients are refused."""
    with pytest.raises(CompositionError, match="two ways to reduce"):
        af.chain(af.local_sgd(sync_every=2), af.local_sgd(sync_every=3, name="b"))


@pytest.mark.parametrize("given", [af.shard_data, af.ema, af.chain])
def test_class_instead_of_a_value(given):
    """A class in place of a value is refused with its position, and told to be called."""
    with pytest.raises(CompositionError, match=r"argument 1 .*Write"):
        af.chain(af.identity(), given)


@pytest.mark.parametrize("given", ["autocast", 3, [af.identity()], lambda state: state])
def test_no_transform(given):
    """Anything else is refused with its position."""
    with pytest.raises(CompositionError, match=r"argument 0 .*not a transform"):
        af.chain(given)


@pytest.mark.parametrize("given", [af.shard_data, [af.identity()], "autocast"])
def test_setup_that_is_no_transform(given):
    """`create(setup=)` refuses the same."""
    with pytest.raises(CompositionError, match="not a transform"):
        linear_state(setup=given)


def test_misspelt_field():
    """A method that is no field is refused with the nearest that is."""
    with pytest.raises(ArgumentError, match=r"Noise\.grad .*Did you mean 'grads'"):

        @af.transform
        class Noise:
            def grad(self, grads, slot, update):
                return grads, slot


@pytest.mark.parametrize(
    "body",
    [
        {"__init__": lambda self, scale: setattr(self, "scale", scale)},
        {"grad": lambda _, grads, slot: (grads, slot)},
        {"grads": lambda _, grads: grads},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_class_that_is_refused_stays_as_it_was(body):
    """What is wrong with it is found before anything of it is changed."""
    cls = type("Scaled", (), body)
    before = dict(vars(cls))
    with pytest.raises(ArgumentError, match="Scaled"):
        af.transform(cls)
    assert before == dict(vars(cls))


def test_helper_methods_start_with_an_underscore():
    """A helper with an underscore is allowed."""

    @af.transform
    class Noise:
        scale: float = 1.0

        def _draw(self):
            return self.scale

    assert repr(Noise(2.0)).endswith("Noise(2.0)")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", 3, None])
def test_name_of_a_transform(name):
    """A name that cannot name a slot in a checkpoint is refused."""
    with pytest.raises(ArgumentError, match=r"name=.*letters"):
        af.identity(name=name)


def test_explain_prints_the_nested_calls(capsys):
    """`explain` shows the calls of a step, with each transform at its place in them."""
    af.chain(*ALL).explain()
    assert (
        capsys.readouterr().out
        == """\
step(state, batch):
    plan = accumulate.data(shard_data.data(plan))  # who takes which samples
    metrics, grads = accumulate.value_and_grad(value_and_grad(autocast.loss(loss_fn)))(state, batch)
    # engine: wrap_ddp; gradients averaged over ranks
    grads = clip_grad_value.grads(clip_grad_norm.grads(grads / weight))
    hyper = schedule(state.step)
    state = optimizer(state, grads, hyper)
    state = ema.after_update(state)
"""
    )


@af.transform
class Adds:
    """Adds gradients up over the ranks by itself."""

    def reduce(self, grads, slot, update):
        return grads, slot


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (af.chain(), "not reduced over ranks"),
        (af.wrap_ddp(), "averaged over ranks"),
        (af.local_sgd(sync_every=2), "not reduced over ranks: local_sgd"),
        (Adds(), "reduced over ranks: adds"),
    ],
)
def test_explain_says_how_gradients_cross(setup, words, capsys):
    """By whom they are reduced, or that they stay each rank's own."""
    af.chain(setup).explain()
    assert f"; gradients {words}\n" in capsys.readouterr().out


def test_methods_take_what_they_are_called_with():
    """A method with other arguments is refused when the class is made a transform."""
    with pytest.raises(ArgumentError, match=r"Odd\.grads.*grads, slot, update"):

        @af.transform
        class Odd:
            def grads(self, grads, update):
                return grads


def test_methods_return_a_value_and_a_slot():
    """One that forgets its slot is named, and the state is as it was."""

    @af.transform
    class Forgets:
        def grads(self, grads, slot, update):
            return grads

    state = linear_state(2, setup=Forgets())
    with pytest.raises(ArgumentError, match=r"Forgets\(\)\.grads.*\(grads, slot\)"):
        af.make_step(lambda model, x: model(x).mean())(state, torch.ones(3, 2))
    assert state.step == 0
    state.copy()


@af.transform
class Draws:
    """Draw in every update."""

    def grads(self, grads, slot, update):
        del slot, update
        return grads, torch.rand(())


def test_a_class_may_say_what_its_slot_is_called():
    """A default of `name` in its body holds; of a class made of it, that class's own name."""

    @af.transform
    class Counting:
        step: int = 1
        name: str = "count"

    @af.transform
    class CountingTwice(Counting):
        more: int = 2

    assert [Counting().name, Counting(2).name, Counting(name="a").name] == [
        "count",
        "count",
        "a",
    ]
    assert repr(Counting(2)) == "Counting(2)"
    assert CountingTwice().name == "counting_twice"
    with pytest.raises(ArgumentError, match="'no slot'"):
        af.transform(
            type("Bad", (), {"__annotations__": {"name": str}, "name": "no slot"})
        )()


def one_weight(setup, seed=0):
    return af.TrainState.create(
        model=lambda: torch.nn.Linear(1, 1, bias=False),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
        setup=setup,
        seed=seed,
    )


def test_a_loss_draws_by_the_seed_that_was_loaded(tmp_path):
    """So does its dropout, and that of what is evaluated after it."""

    def dropped(model, batch):
        return torch.nn.functional.dropout(model(batch).square(), 0.5).mean()

    step, batch = af.make_step(dropped), torch.ones(64, 1)
    state, _ = step(one_weight(af.identity(), seed=1), batch)
    other, _ = step(one_weight(af.identity(), seed=2), batch)
    af.save(state, tmp_path / "saved")
    loaded = af.load(other, tmp_path / "saved")
    for _ in range(2):
        state, expected = step(state, batch)
        loaded, metrics = step(loaded, batch)
        assert metrics["loss"] == expected["loss"]


def test_draws_are_of_the_seed_that_was_loaded(tmp_path):
    """A state that is loaded draws by its own seed, though another has drawn before it."""
    step = af.make_step(lambda model, x: model(x).sum())
    state, _ = step(one_weight(Draws(), seed=1), torch.ones(1, 1))
    other, _ = step(one_weight(Draws(), seed=2), torch.ones(1, 1))
    af.save(state, tmp_path / "saved")
    loaded = af.load(other, tmp_path / "saved")
    state, _ = step(state, torch.ones(1, 1))
    loaded, _ = step(loaded, torch.ones(1, 1))
    assert loaded.slots[Draws().name] == state.slots[Draws().name]
