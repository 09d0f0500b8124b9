# SPDX-License-Identifier: Apache-2.0
"""`check_transform` passes what keeps the laws, and refuses each planted bug by its law."""

import os
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import accelfn as af
from accelfn.errors import LawError
from accelfn.testing.checking.transform_laws import check_transform
from tests.budget import at_night
from tests.catalog import CATALOG


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)
def test_public_transforms_keep_the_laws(entry) -> None:
    check_transform(entry.transform, sizes=(1, 2) if at_night() else (2,))


def test_a_chain_is_checked_as_a_whole() -> None:
    check_transform(af.chain(af.clip_grad_norm(0.5), af.ema(0.5)), sizes=(2,))
    with pytest.raises(LawError, match="no_environment"):
        check_transform(af.chain(af.clip_grad_norm(0.5), ReadsTheRank()), sizes=(2,))


@af.transform
class SharedNoise:
    """Adds noise that is the same on all ranks, drawn under the state's own stream."""

    scale: float = 0.125

    def grads(self, grads, slot, state):
        return grads.map(lambda g: g + self.scale * torch.randn_like(g)), slot


@af.transform
class Momentum:
    """Remembers in its slot, and writes to it in place."""

    def init(self, state):
        return {name: torch.zeros_like(p) for name, p in state.params.items()}

    def grads(self, grads, slot, state):
        for name, grad in grads.tensors.items():
            slot[name].mul_(0.5).add_(grad)
        moved = {name: slot[name].clone() for name in grads.tensors}
        return grads.with_tensors(moved), slot


@pytest.mark.parametrize("kept", [SharedNoise(), Momentum()], ids=repr)
def test_a_users_transform_keeps_the_laws(kept: Any) -> None:
    check_transform(kept, sizes=(1, 2))


@af.transform
class DecaysParams:
    """Changes the parameters before the update."""

    def grads(self, grads, slot, state):
        for param in state.params.values():
            param.mul_(0.5)
        return grads, slot


@af.transform
class ScalesTheBatch:
    """Changes its batch: the caller's own tensors."""

    def loss(self, loss_fn):
        def scaled(model, batch):
            batch[0].mul_(0.5)
            return loss_fn(model, batch)

        return scaled


@af.transform
class WritesAnotherSlot:
    """Adds a slot that is not its own."""

    def after_update(self, state, slot):
        return state.with_slot("somebody", 1), slot


_seen: list[int] = []


@af.transform
class CountsInAClosure:
    """Remembers how often it was called, outside its slot."""

    def grads(self, grads, slot, state):
        _seen.append(1)
        return grads.map(lambda g: g / len(_seen)), slot


@af.transform
class ReadsTheRank:
    """Takes its rank from where the launcher left it."""

    def grads(self, grads, slot, state):
        rank = int(os.environ.get("RANK", "0"))
        return grads.map(lambda g: g * (1 + rank)), slot


@af.transform
class NeedsTheRank:
    """Cannot do without the launcher's variable."""

    def grads(self, grads, slot, state):
        assert int(os.environ["WORLD_SIZE"]) > 0
        return grads, slot


@af.transform
class DrawsFromPython:
    """Draws from the process's own generator."""

    def grads(self, grads, slot, state):
        factor = random.random()  # noqa: S311
        return grads.map(lambda g: g * factor), slot


@af.transform
class DrawsFromNumpy:
    """Draws from numpy's."""

    def hyper(self, state, slot):
        return {"lr": float(np.random.rand())}  # noqa: NPY002


@af.transform
class DrawsOutsideAStream:
    """Draws from torch's where no stream of the state's is at work."""

    def value_and_grad(self, inner):
        def noisy(state, batch, *extras, **how):
            metrics, grads = inner(state, batch, *extras, **how)
            factor = 1 + float(torch.rand(()))
            return metrics, grads.map(lambda g: g * factor)

        return noisy


@af.transform
class MovesAGenerator:
    """Throws a draw away."""

    def hyper(self, state, slot):
        random.random()  # noqa: S311
        return {}


@af.transform
class NoiseByRank:
    """Seeds its noise by the rank, and replicas drift apart."""

    def grads(self, grads, slot, state):
        generator = torch.Generator().manual_seed(state.step + 100 * state.world.rank)
        return grads.map(
            lambda g: g + torch.randn(g.shape, generator=generator).to(g)
        ), slot


class Noted(dict):
    """A dict with an attribute, which no checkpoint holds."""

    count = 0


@af.transform
class LosesItsSlot:
    """Remembers in an attribute of its slot."""

    def init(self, state):
        return Noted(a=torch.zeros(1))

    def grads(self, grads, slot, state):
        after = Noted(slot)
        after.count = getattr(slot, "count", 0) + 1
        return grads.map(lambda g: g / after.count), after


@af.transform
class CannotBeSaved:
    """Has a slot that no checkpoint takes."""

    def init(self, state):
        return {"generator": torch.Generator()}


@af.transform
class KeepsWhatItGivesUp:
    """Says that replicas disagree, and they don't."""

    gives_up: ClassVar[dict[str, str]] = {"replicas_agree": "now and then"}

    def grads(self, grads, slot, state):
        return grads, slot


@af.transform
class OpenOption:
    """Has an option that is no value."""

    names: list = None  # type: ignore[assignment]

    def grads(self, grads, slot, state):
        return grads, slot


@pytest.mark.parametrize(
    ("planted", "law"),
    [
        (OpenOption(["a"]), "value"),
        (DecaysParams(), "inputs_unchanged"),
        (ScalesTheBatch(), "inputs_unchanged"),
        (WritesAnotherSlot(), "own_slot"),
        (CountsInAClosure(), "memory_in_state"),
        (ReadsTheRank(), "no_environment"),
        (NeedsTheRank(), "no_environment"),
        (DrawsFromPython(), "own_randomness"),
        (DrawsFromNumpy(), "own_randomness"),
        (DrawsOutsideAStream(), "own_randomness"),
        (MovesAGenerator(), "own_randomness"),
        (NoiseByRank(), "replicas_agree"),
        (LosesItsSlot(), "resumes"),
        (CannotBeSaved(), "resumes"),
        (KeepsWhatItGivesUp(), "replicas_agree"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_planted_bugs_are_refused_by_their_law(
    planted: Any, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(planted, NeedsTheRank):  # so that the plain run can begin
        monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(LawError) as caught:
        check_transform(planted, sizes=(1, 2))
    assert f"{law!r}" in str(caught.value)
    assert repr(planted) in str(caught.value)


def test_what_is_no_transform_is_refused() -> None:
    with pytest.raises(af.ArgumentError, match="expected a transform"):
        check_transform(lambda state: state)


def test_an_unknown_law_cannot_be_given_up() -> None:
    @af.transform
    class Odd:
        gives_up: ClassVar[dict[str, str]] = {"gravity": "at times"}

        def grads(self, grads, slot, state):
            return grads, slot

    with pytest.raises(af.ArgumentError, match="gravity"):
        check_transform(Odd())
