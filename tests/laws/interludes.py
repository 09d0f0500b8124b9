# SPDX-License-Identifier: Apache-2.0
"""What may be done between two updates, after which training goes on as if nothing had been."""

import contextlib
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch

import accelfn as af
from accelfn.testing import assert_states_equal
from accelfn.testing.strategies import Program
from tests.laws.histories import Broken, BrokenError


@attrs.frozen
class Scene:
    """Where something is done: before which batch, of which program, with which files.

    Attributes:
        program: what is trained.
        world: by whom.
        state: as it stands.
        before: the state that the last step took, if there was one.
        batch: what the next step takes.
        folder: nobody has written to; all ranks have the same.
    """

    program: Program
    world: af.World
    state: af.TrainState
    before: af.TrainState | None
    batch: af.Batch
    folder: Path

    @property
    def held_out(self) -> af.Data:
        """Other data, of batches that ranks share unevenly."""
        return attrs.evolve(self.program.data, global_batch_size=3, remainder="short")

    def stepped_apart(self, state: af.TrainState) -> None:
        """Step a state that is no other's."""
        af.make_step(self.program.loss)(state, self.batch)


Interlude: TypeAlias = Callable[[Scene], af.TrainState | None]
"""Does something; returns the state that goes on, where it is not the one that was there."""


def _raises(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    model(batch[0])
    raise BrokenError


def _breaks_on_the_way_back(scene: Scene) -> Callable[..., Any]:
    def loss(model: torch.nn.Module, batch: Any) -> Any:
        found = scene.program.loss(model, batch)
        if isinstance(found, af.Loss):
            return af.Loss(Broken.apply(found.total), found.weight)
        return Broken.apply(found)

    return loss


def loss_raises(scene: Scene) -> None:
    with contextlib.suppress(BrokenError):
        af.make_step(_raises)(scene.state, scene.batch)


def backward_raises(scene: Scene) -> None:
    with contextlib.suppress(BrokenError):
        af.make_step(_breaks_on_the_way_back(scene))(scene.state, scene.batch)


def loss_is_none(scene: Scene) -> None:
    with contextlib.suppress(af.errors.LossError):
        af.make_step(lambda model, batch: str(model(batch[0])))(
            scene.state, scene.batch
        )


def look(scene: Scene, *, sync: bool = True) -> None:
    with contextlib.suppress(af.errors.GradsError):  # there may be none to return
        af.value_and_grad(scene.program.loss)(scene.state, scene.batch, sync=sync)


def look_apart(scene: Scene) -> None:
    look(scene, sync=False)


def keep(scene: Scene) -> None:
    af.make_step(scene.program.loss)(scene.state, scene.batch, donate=False)


def fork(scene: Scene) -> None:
    scene.stepped_apart(scene.state.copy())


def step_the_old_one(scene: Scene) -> None:
    if scene.before is not None:
        with contextlib.suppress(af.errors.StateDonatedError):
            scene.stepped_apart(scene.before)


def evaluate(scene: Scene) -> None:
    af.evaluate(scene.state, scene.held_out, scene.program.loss)


def evaluate_raises(scene: Scene) -> None:
    with contextlib.suppress(BrokenError):
        af.evaluate(scene.state, scene.held_out, _raises)


def predict_one(scene: Scene) -> None:
    predicted = af.predict(
        scene.state, scene.held_out, lambda net, batch: net(batch[0])
    )
    next(iter(predicted))


def views(scene: Scene) -> None:
    for at in ("train", "eval"):
        af.full_params(scene.state, at=at)
    af.eval_params(scene.state)


def tell(scene: Scene) -> None:
    str(scene.state)
    scene.state.setup.explain()
    af.memory(scene.state)


def compare(scene: Scene) -> None:
    assert_states_equal(scene.state, scene.state.copy())


def finalize_a_copy(scene: Scene) -> None:
    af.finalize(scene.state.copy())


def export(scene: Scene) -> None:
    af.export_model(scene.state, scene.folder, at="eval")


def save(scene: Scene) -> None:
    af.save(scene.state, scene.folder)


def save_fails(scene: Scene) -> None:
    with contextlib.suppress(af.errors.CheckpointError):
        af.save(scene.state, Path(__file__, "in-a-file"))


def load_fails(scene: Scene) -> None:
    with contextlib.suppress(af.errors.CheckpointError):
        af.load(scene.state, scene.folder)


def release(scene: Scene) -> None:
    af.release_engine(scene.state)


def build(scene: Scene) -> af.TrainState:
    return af.prepare_engine(scene.state)


def read_on(scene: Scene) -> None:
    batches = iter(af.batches(scene.state))
    next(batches), next(batches)


def refuse_a_setup(scene: Scene) -> None:
    with contextlib.suppress(af.errors.CompositionError):
        scene.state.with_setup(af.chain(af.shard_data(), af.shard_data()))


def draw_elsewhere(scene: Scene) -> None:
    torch.rand(3)
    af.fork_rng(scene.state, "mine")


def collect(scene: Scene) -> None:
    del scene
    gc.collect()


def copy(scene: Scene) -> af.TrainState:
    return scene.state.copy()


def copy_and_step_the_original(scene: Scene) -> af.TrainState:
    kept = scene.state.copy()
    scene.stepped_apart(scene.state)
    return kept


def load(scene: Scene) -> af.TrainState:
    af.save(scene.state, scene.folder)
    return af.load(scene.program.state(scene.world), scene.folder)


def load_into_itself(scene: Scene) -> af.TrainState:
    af.save(scene.state, scene.folder)
    return af.load(scene.state, scene.folder)


def load_into_a_trained_one(scene: Scene) -> af.TrainState:
    af.save(scene.state, scene.folder)
    other, _ = scene.program.train(scene.program.state(scene.world), 1)
    return af.load(other, scene.folder)


def go_back_to_what_was_saved(scene: Scene) -> af.TrainState:
    af.save(scene.state, scene.folder)
    step = af.make_step(scene.program.loss)
    gone, _ = step(scene.state, scene.batch)
    return af.load(gone, scene.folder)


def restore(scene: Scene) -> af.TrainState:
    with af.CheckpointStore(scene.folder, keep=1) as store:
        store.save(scene.state)
        return store.restore(scene.program.state(scene.world))


def move(scene: Scene) -> af.TrainState:
    return af.with_world(scene.state, scene.world)


def set_up_again(scene: Scene) -> af.TrainState:
    return scene.state.with_setup(scene.program.setup)


def seek(scene: Scene) -> af.TrainState:
    away = af.seek(scene.state, 0, epoch=5)
    next(iter(af.batches(away)))
    cursor = scene.state.cursor
    return af.seek(away, cursor.samples, epoch=cursor.epoch)


INTERLUDES: Mapping[str, Interlude] = {
    each.__name__: each
    for each in (
        *(loss_raises, backward_raises, loss_is_none, look, look_apart, keep, fork),
        *(
            step_the_old_one,
            evaluate,
            evaluate_raises,
            predict_one,
            views,
            tell,
            compare,
        ),
        *(finalize_a_copy, export, save, save_fails, load_fails, release),
        *(build, read_on, refuse_a_setup, draw_elsewhere, collect, copy),
        *(copy_and_step_the_original, load, load_into_itself),
        *(load_into_a_trained_one, go_back_to_what_was_saved, restore, move),
        *(set_up_again, seek),
    )
}
