# SPDX-License-Identifier: Apache-2.0
"""What may be done between two updates, after which training goes on as if nothing had been."""

import contextlib
import gc
from collections.abc import Callable, Mapping
from functools import partial
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


def _step(scene: Scene, loss: Any, **options: Any) -> None:
    af.make_step(loss)(scene.state, scene.batch, **options)


def _look(scene: Scene, *, sync: bool) -> None:
    af.value_and_grad(scene.program.loss)(scene.state, scene.batch, sync=sync)


def _views(scene: Scene) -> None:
    for at in ("train", "eval"):
        af.full_params(scene.state, at=at)
    af.eval_params(scene.state)


def _tell(scene: Scene) -> None:
    str(scene.state)
    scene.state.setup.explain()
    af.memory(scene.state)


def _read_on(scene: Scene) -> None:
    batches = iter(af.batches(scene.state))
    next(batches), next(batches)


def _predict_one(scene: Scene) -> None:
    function = lambda net, batch: net(batch[0])  # noqa: E731
    next(iter(af.predict(scene.state, scene.held_out, function)))


def _draw_elsewhere(scene: Scene) -> None:
    torch.rand(3)
    af.fork_rng(scene.state, "mine")


def _of_old(scene: Scene) -> None:
    if scene.before is not None:
        scene.stepped_apart(scene.before)


ACTS: Mapping[str, Callable[[Scene], object]] = {
    "loss_raises": lambda s: _step(s, _raises),
    "backward_raises": lambda s: _step(s, _breaks_on_the_way_back(s)),
    "loss_is_none": lambda s: _step(s, lambda model, batch: str(model(batch[0]))),
    "look": lambda s: _look(s, sync=True),
    "look_apart": lambda s: _look(s, sync=False),
    "keep": lambda s: _step(s, s.program.loss, donate=False),
    "fork": lambda s: s.stepped_apart(s.state.copy()),
    "step_the_old_one": _of_old,
    "evaluate": lambda s: af.evaluate(s.state, s.held_out, s.program.loss),
    "evaluate_raises": lambda s: af.evaluate(s.state, s.held_out, _raises),
    "predict_one": _predict_one,
    "views": _views,
    "tell": _tell,
    "compare": lambda s: assert_states_equal(s.state, s.state.copy()),
    "finalize_a_copy": lambda s: af.finalize(s.state.copy()),
    "export": lambda s: af.export_model(s.state, s.folder, at="eval"),
    "save": lambda s: af.save(s.state, s.folder),
    "save_fails": lambda s: af.save(s.state, Path(__file__, "in-a-file")),
    "load_fails": lambda s: af.load(s.state, s.folder),
    "release": lambda s: af.release_engine(s.state),
    "read_on": _read_on,
    "refuse_a_setup": lambda s: s.state.with_setup(af.chain(*[af.shard_data()] * 2)),
    "draw_elsewhere": _draw_elsewhere,
    "collect": lambda _: gc.collect(),
}
"""What leaves the state that is there, by name; its result is not looked at."""
EXPECTED: Mapping[str, type[Exception]] = {
    **dict.fromkeys(("loss_raises", "backward_raises", "evaluate_raises"), BrokenError),
    "loss_is_none": af.errors.LossError,
    "look": af.errors.GradsError,  # there may be none to return
    "look_apart": af.errors.GradsError,
    "step_the_old_one": af.errors.StateDonatedError,
    "save_fails": af.errors.CheckpointError,
    "load_fails": af.errors.CheckpointError,
    "refuse_a_setup": af.errors.CompositionError,
}
"""What acts may raise."""


def _ignored(name: str, scene: Scene) -> None:
    with contextlib.suppress(*filter(None, [EXPECTED.get(name)])):
        ACTS[name](scene)


def copy_and_step_the_original(scene: Scene) -> af.TrainState:
    kept = scene.state.copy()
    scene.stepped_apart(scene.state)
    return kept


def saved(scene: Scene, into: Callable[[], af.TrainState]) -> af.TrainState:
    """Save the state, and load it into another, which is made afterwards."""
    af.save(scene.state, scene.folder)
    return af.load(into(), scene.folder)


def load_into_a_trained_one(scene: Scene) -> af.TrainState:
    program = scene.program
    return saved(scene, lambda: program.train(program.state(scene.world), 1)[0])


def go_back_to_what_was_saved(scene: Scene) -> af.TrainState:
    step = af.make_step(scene.program.loss)
    return saved(scene, lambda: step(scene.state, scene.batch)[0])


def restore(scene: Scene) -> af.TrainState:
    with af.CheckpointStore(scene.folder, keep=1) as store:
        store.save(scene.state)
        return store.restore(scene.program.state(scene.world))


def seek(scene: Scene) -> af.TrainState:
    away = af.seek(scene.state, 0, epoch=5)
    next(iter(af.batches(away)))
    cursor = scene.state.cursor
    return af.seek(away, cursor.samples, epoch=cursor.epoch)


INTERLUDES: Mapping[str, Interlude] = {
    **{name: partial(_ignored, name) for name in ACTS},
    "build": lambda s: af.prepare_engine(s.state),
    "copy": lambda s: s.state.copy(),
    "copy_and_step_the_original": copy_and_step_the_original,
    "load": lambda s: saved(s, lambda: s.program.state(s.world)),
    "load_into_itself": lambda s: saved(s, lambda: s.state),
    "load_into_a_trained_one": load_into_a_trained_one,
    "go_back_to_what_was_saved": go_back_to_what_was_saved,
    "restore": restore,
    "move": lambda s: af.with_world(s.state, s.world),
    "set_up_again": lambda s: s.state.with_setup(s.program.setup),
    "seek": seek,
}
