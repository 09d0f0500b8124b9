# SPDX-License-Identifier: Apache-2.0
"""`check_step` and `check_resume`: steps as users write them, and ones with planted bugs."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import accelfn as af
from accelfn.errors import ArgumentError, LawError
from accelfn.testing import check_resume, check_step, laws

SETUP = af.chain(af.shard_data(), af.wrap_ddp())
DATA = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
adam = partial(torch.optim.Adam, lr=0.01)


def state_of(
    world: af.World, model: Any, setup: Any = SETUP, seed: int = 0
) -> af.TrainState:
    return af.TrainState.create(
        model=model,
        optimizer=adam,
        data=af.Data(DATA, global_batch_size=4, shuffle=True),
        setup=setup,
        world=world,
        seed=seed,
    )


def player(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, size))


def plain_states(world: af.World) -> Any:
    return state_of(world, lambda: player(3))


# A GAN: two states, each player's loss taken with the other one frozen.


def discriminator_loss(model: nn.Module, real: Any, generator: nn.Module) -> Any:
    fake = generator(torch.randn(len(real), 3))
    score, fooled = model(real), model(fake)
    return binary_cross_entropy_with_logits(
        score, torch.ones_like(score)
    ) + binary_cross_entropy_with_logits(fooled, torch.zeros_like(fooled))


def generator_loss(model: nn.Module, real: Any, discriminator: nn.Module) -> Any:
    score = discriminator(model(torch.randn(len(real), 3)))
    return binary_cross_entropy_with_logits(score, torch.ones_like(score))


step_discriminator = af.make_step(discriminator_loss)
step_generator = af.make_step(generator_loss)


def gan_step(players: Any, batch: Any) -> Any:
    generator, discriminator = players
    discriminator, first = step_discriminator(
        discriminator, batch, af.snapshot_model(generator, at="eval")
    )
    generator, second = step_generator(
        generator, batch, af.snapshot_model(discriminator, at="eval")
    )
    return (generator, discriminator), {"d": first["loss"], "g": second["loss"]}


def gan(world: af.World) -> Any:
    return (
        state_of(world, lambda: player(3), seed=1),
        state_of(world, lambda: player(1), seed=2),
    )


# SAM (Foret et al. 2021): the gradient is taken where the loss is worst nearby.


def reconstruction(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_loss(model(batch), batch)


gradient = af.value_and_grad(reconstruction)


def sam_step(state: Any, batch: Any) -> Any:
    _, grads = gradient(state, batch)
    tensors = grads.tensors
    norm = torch.stack([g.norm() for g in tensors.values()]).norm()
    worst = {n: p + 0.05 * tensors[n] / norm for n, p in state.params.items()}
    metrics, grads = gradient(state.with_params(worst), batch)
    return af.apply_grads(state, grads), metrics


# A mean teacher: the student learns from an average of itself, in a slot of its own.


def teacher_loss(model: nn.Module, batch: Any, teacher: nn.Module) -> torch.Tensor:
    noisy = batch + 0.1 * torch.randn_like(batch)
    return mse_loss(model(noisy), batch) + mse_loss(model(noisy), teacher(batch))


step_student = af.make_step(teacher_loss)


def teacher_step(pair: Any, batch: Any) -> Any:
    student, metrics = step_student(
        pair["student"], batch, af.snapshot_model(pair["teacher"], at="eval")
    )
    old = pair["teacher"]
    mean = {
        name: 0.75 * param + 0.25 * student.params[name]
        for name, param in old.params.items()
    }
    return {"student": student, "teacher": old.with_params(mean)}, metrics


def teacher(world: af.World) -> Any:
    return {"student": plain_states(world), "teacher": plain_states(world)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "states"),
    [
        (gan_step, gan),
        (sam_step, plain_states),
        (teacher_step, teacher),
        (
            af.make_step(reconstruction),
            plain_states,
        ),
    ],
    ids=["gan", "sam", "mean teacher", "make_step"],
)
def test_steps_as_users_write_them_keep_the_laws(step, states):
    check_step(step, states=states)


def test_batches_may_be_given():
    def rows(world: af.World) -> Iterator[torch.Tensor]:
        return iter(DATA[world.rank :: world.size].split(1))

    given = {"states": plain_states, "batches": rows}
    check_step(_plain, **given, sizes=(1, 2), updates=2)
    with pytest.raises(ArgumentError, match=r"only \d batches for"):
        check_step(_plain, **given, sizes=(4,), updates=4)


_plain = af.make_step(reconstruction)
_noisy = af.make_step(lambda model, batch, noise: reconstruction(model, batch + noise))
_calls: list[int] = []


def forgets_to_return(state: Any, batch: Any) -> Any:
    _, metrics = _plain(state, batch)
    return state, metrics


def counts(state: Any, batch: Any) -> Any:
    _calls.append(1)
    state, metrics = _plain(state, batch)
    return state, {"loss": metrics["loss"] * len(_calls)}


def draws(state: Any, batch: Any) -> Any:
    return _noisy(state, batch, torch.randn(()))


def local_only(state: Any, batch: Any) -> Any:
    metrics, grads = gradient(state, batch, sync=False)
    params = {n: p - 0.1 * grads.tensors[n] for n, p in state.params.items()}
    return state.with_params(params), metrics


@pytest.mark.parametrize(
    ("step", "law"),
    [
        (forgets_to_return, "returns_states"),
        (counts, "memory_in_state"),
        (draws, "own_randomness"),
    ],
)
def test_planted_bugs_are_refused_by_their_law(step, law):
    with pytest.raises(LawError, match=f"'{law}'"):
        check_step(step, states=plain_states, sizes=(1,))


class Scale(nn.Module):
    """A model whose parameter begins as the names of metrics and buffers do."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.head = nn.ParameterDict({name: torch.ones(3)})

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        (scale,) = self.head.values()
        return batch * scale.sin()


@pytest.mark.parametrize(
    "model",
    [partial(player, 3), partial(Scale, "metrics"), partial(Scale, "buffers_scale")],
    ids=["any", "metrics", "buffers"],
)
def test_replicas_that_drift_are_found(model):
    with pytest.raises(LawError, match="'replicas_agree'.*params"):
        check_step(
            local_only,
            states=lambda world: state_of(world, model),
            batches=lambda world: DATA[world.rank :: world.size].split(1),
            sizes=(2,),
        )


def test_check_resume():
    def make(world: af.World) -> Any:
        setup = af.chain(SETUP, af.ema(0.5), af.clip_grad_norm(0.1))
        return state_of(world, lambda: player(3), setup), _plain

    check_resume(make, 4)


def test_check_resume_finds_what_is_forgotten():
    def make(world: af.World) -> Any:
        taken: list[int] = []

        def step(state: Any, batch: Any) -> Any:
            taken.append(1)
            state, metrics = _plain(state, batch)
            return state, {"loss": metrics["loss"] * len(taken)}

        return plain_states(world), step

    with pytest.raises(LawError, match="saved and loaded after 1 updates"):
        check_resume(make, 3, sizes=(1,))


def test_check_resume_finds_sums_that_move():
    """What is added up in another place after a load has other last bits, over some ranks."""

    def make(world: af.World) -> Any:
        taken: list[int] = []

        def step(state: Any, batch: Any) -> Any:
            taken.append(1)
            state, _ = _plain(state, batch)
            mine = torch.linspace(0.1, 1.7, 9) * (world.rank + 0.3)
            mine = mine.flip(0) if len(taken) == 1 else mine
            summed = af.all_reduce(mine, world)
            return state, {"sum": summed.flip(0) if len(taken) == 1 else summed}

        return plain_states(world), step

    check_resume(make, 2, sizes=(1, 2))
    with pytest.raises(LawError, match="saved and loaded after 1 updates"):
        check_resume(make, 2)


def test_the_callers_environment_is_the_callers(monkeypatch):
    """What a launcher told this process is there again when a law is through with it."""
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with laws._environment({"WORLD_SIZE": "2"}):
        assert (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == (None, "2")
    assert (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == ("7", None)


def made(swap: Any) -> Any:
    """Return a `make` whose state and step are swapped for other things."""
    return lambda world: swap(plain_states(world), _plain)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_step(3, states=plain_states), "expected a function"),
        (lambda: check_step(_plain, states=plain_states, updates=1), "2 or more"),
        (lambda: check_resume(made(lambda *two: two), 0), "1 or more"),
        (
            lambda: check_step(_plain, states=lambda _: None),
            "returned NoneType. Expected a TrainState, or a tuple",
        ),
        (
            lambda: check_step(_plain, states=lambda _: ()),
            r"returned \(\)\. Expected a TrainState",
        ),
        (
            lambda: check_step(_plain, states=lambda _: (3, "a")),
            r"returned \(int, str\)\. Expected a TrainState",
        ),
        (
            lambda: check_step(_plain, states=plain_states(af.World.single())),
            "expected a function.*got TrainState",
        ),
        (
            lambda: check_resume((plain_states(af.World.single()), _plain), 2),
            "expected a function.*got tuple",
        ),
        *(
            (
                lambda swap=swap: check_resume(made(swap), 3),
                rf"make\(world\) returned {words}. Expected \(state, step\)",
            )
            for swap, words in [
                (lambda state, step: (step, state), r"\(function, TrainState\)"),
                (lambda state, _: state, "TrainState"),
                (lambda *two: (*two, 3), r"\(TrainState, function, int\)"),
                (lambda state, _: (state, 3), r"\(TrainState, int\)"),
            ]
        ),
    ],
)
def test_wrong_arguments_are_refused(call, words):
    """By their types, before the step sees them."""
    with pytest.raises(ArgumentError, match=words):
        call()
