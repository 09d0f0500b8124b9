# SPDX-License-Identifier: Apache-2.0
"""`check_transform` passes what keeps the laws, and refuses each planted bug by its law."""

import faulthandler
import os
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

import accelfn as af
from accelfn.errors import ArgumentError, GradsError, LawError, ReplicaMismatchError
from accelfn.testing import Problem, check_transform
from tests.budget import at_night
from tests.catalog import CATALOG
from tests.internals import PROBLEMS, Subject, loads_anywhere, observe_acts
from tests.laws.reducing import (
    ErrorFeedback,
    GatherAll,
    HalfPrecision,
    SumAll,
    weight_of,
)


@pytest.mark.slow
@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)
def test_public_transforms_keep_the_laws(entry):
    check_transform(entry.transform, sizes=(1, 2) if at_night() else (2,))


@pytest.mark.slow
def test_a_chain_is_checked_as_a_whole():
    check_transform(af.chain(af.clip_grad_norm(0.5), af.ema(0.5)), sizes=(2,))
    with pytest.raises(LawError, match="no_environment"):
        check_transform(af.chain(af.clip_grad_norm(0.5), ReadsTheRank()), sizes=(2,))


@af.transform
class SharedNoise:
    """Adds noise that is the same on all ranks, drawn under the state's own stream."""

    scale: float = 0.125

    def grads(self, grads, slot, update):
        return grads.map(lambda g: g + self.scale * torch.randn_like(g)), slot


@af.transform
class Momentum:
    """Remembers in its slot."""

    def init(self, state):
        return {name: torch.zeros_like(p) for name, p in state.params.items()}

    def grads(self, grads, slot, update):
        moved = {n: 0.5 * slot[n] + grad for n, grad in grads.tensors.items()}
        copies = {name: each.clone() for name, each in moved.items()}
        return grads.with_tensors(moved), {**slot, **copies}


@af.transform
class NoisyInputs:
    """Draws in the loss, others for each rank: as it may."""

    def loss(self, loss_fn, slot, update):
        def noisy(model, batch, *extras):
            inputs, targets = batch
            inputs = inputs + torch.randn_like(inputs) / 8
            return loss_fn(model, (inputs, targets), *extras)

        return noisy, slot


@pytest.mark.slow
@pytest.mark.parametrize("kept", [SharedNoise(), Momentum(), NoisyInputs()], ids=repr)
def test_a_users_transform_keeps_the_laws(kept):
    check_transform(kept, sizes=(1, 2))


@af.transform
class DecaysParams:
    """Changes the parameters before the update."""

    def grads(self, grads, slot, update):
        for param in update.state.params.values():
            param.mul_(0.5)
        return grads, slot


@af.transform
class DecaysBuffers:
    """Changes the buffers before the update."""

    def hyper(self, hyper, slot, update):
        for buffer in update.state.buffers.values():
            buffer.mul_(2)
        return hyper, slot


@af.transform
class ScalesTheBatch:
    """Changes its batch: the caller's own tensors."""

    def loss(self, loss_fn, slot, update):
        def scaled(model, batch):
            batch[0].mul_(0.5)
            return loss_fn(model, batch)

        return scaled, slot


@af.transform
class WritesAnotherSlot:
    """Adds a slot that is not its own."""

    def after_update(self, state, slot, update):
        return state.with_slot("somebody", 1), slot


Sums = tuple[dict[str, torch.Tensor], Any]


def by_own_weight(grads: af.Grads, world: af.World) -> Sums:
    """Divide by the weight of this rank."""
    return af.all_reduce(grads.tensors, world), grads.weight


def by_times_own_weight(grads: af.Grads, world: af.World) -> Sums:
    """Divide by the weight of this rank, as often as there are ranks."""
    return af.all_reduce(grads.tensors, world), grads.weight * world.size


def by_one(grads: af.Grads, world: af.World) -> Sums:
    """Take sums for means."""
    return af.all_reduce(grads.tensors, world), 1


def of_means(grads: af.Grads, world: af.World) -> Sums:
    """Give each rank's mean the same weight."""
    own = weight_of(grads, world).clamp(min=1)
    means = {n: g / own for n, g in grads.tensors.items()}
    return af.all_reduce(means, world, "mean"), 1


def all_but_the_last(grads: af.Grads, world: af.World) -> Sums:
    """Forget a rank."""
    weight = weight_of(grads, world)
    if world.rank == world.size - 1:
        grads, weight = grads.map(torch.zeros_like), weight * 0
    return af.all_reduce((grads.tensors, weight), world)


def the_first_twice(grads: af.Grads, world: af.World) -> Sums:
    """Count a rank twice."""
    weight = weight_of(grads, world)
    if world.is_main:
        grads, weight = grads.map(lambda g: 2 * g), weight * 2
    return af.all_reduce((grads.tensors, weight), world)


def of_the_first(grads: af.Grads, world: af.World) -> Sums:
    """Take the gradients of one rank."""
    return af.broadcast((grads.tensors, weight_of(grads, world)), world)


def but_one_parameter(grads: af.Grads, world: af.World) -> Sums:
    """Leave the gradient of one parameter as it is."""
    sums, weight = af.all_reduce((grads.tensors, weight_of(grads, world)), world)
    return {**sums, "head.bias": grads.tensors["head.bias"]}, weight


def without_one_parameter(grads: af.Grads, world: af.World) -> Sums:
    """Drop the gradient of one parameter."""
    sums, weight = af.all_reduce((grads.tensors, weight_of(grads, world)), world)
    return {n: s for n, s in sums.items() if n != "head.bias"}, weight


def zero_of_one_parameter(grads: af.Grads, world: af.World) -> Sums:
    """Train one parameter no more."""
    sums, weight = af.all_reduce((grads.tensors, weight_of(grads, world)), world)
    return {**sums, "head.bias": 0 * sums["head.bias"]}, weight


def from_this_rank_on(grads: af.Grads, world: af.World) -> Sums:
    """Add up in an order that differs by rank, and so in the last bits."""
    sums = {}
    for name, grad in grads.tensors.items():
        parts = af.all_gather(grad[None], world).roll(-world.rank, 0)
        sums[name] = parts[0]
        for part in parts[1:]:
            sums[name] = sums[name] + part
    return sums, af.all_reduce(weight_of(grads, world), world)


def transposed(grads: af.Grads, world: af.World) -> Sums:
    """Give one gradient the wrong way round."""
    sums, weight = af.all_reduce((grads.tensors, weight_of(grads, world)), world)
    return {**sums, "first.weight": sums["first.weight"].T}, weight


SUMS = [
    *(by_own_weight, by_times_own_weight, by_one, of_means, all_but_the_last),
    *(the_first_twice, of_the_first, but_one_parameter, without_one_parameter),
    *(zero_of_one_parameter, from_this_rank_on, transposed),
]


@af.transform
class Reduces:
    """Reduces as a function says."""

    sums: Any

    def reduce(self, grads, slot, update):
        return grads.with_sums(*self.sums(grads, update.world)), slot


_seen: list[int] = []


@af.transform
class CountsInAClosure:
    """Remembers how often it was called, outside its slot."""

    def grads(self, grads, slot, update):
        _seen.append(1)
        return grads.map(lambda g: g / len(_seen)), slot


@af.transform
class ReadsTheRank:
    """Takes its rank from where the launcher left it."""

    def grads(self, grads, slot, update):
        rank = int(os.environ.get("RANK", "0"))
        return grads.map(lambda g: g * (1 + rank)), slot


@af.transform
class NeedsTheRank:
    """Cannot do without the launcher's variable."""

    def grads(self, grads, slot, update):
        assert int(os.environ["WORLD_SIZE"]) > 0
        return grads, slot


@af.transform
class DrawsFromPython:
    """Draws from the process's own generator, where none of the state's is at work."""

    def value_and_grad(self, inner, slot, update):
        def noisy(state, batch, *extras, **how):
            metrics, grads = inner(state, batch, *extras, **how)
            factor = 1 + random.random()  # noqa: S311
            return metrics, grads.map(lambda g: g * factor)

        return noisy, slot


@af.transform
class DrawsFromNumpy:
    """Draws from numpy's."""

    def value_and_grad(self, inner, slot, update):
        def noisy(state, batch, *extras, **how):
            metrics, grads = inner(state, batch, *extras, **how)
            factor = 1 + float(np.random.rand())  # noqa: NPY002
            return metrics, grads.map(lambda g: g * factor)

        return noisy, slot


@af.transform
class DrawsOutsideAStream:
    """Draws from torch's where no stream of the state's is at work."""

    def value_and_grad(self, inner, slot, update):
        def noisy(state, batch, *extras, **how):
            metrics, grads = inner(state, batch, *extras, **how)
            factor = 1 + float(torch.rand(()))
            return metrics, grads.map(lambda g: g * factor)

        return noisy, slot


@af.transform
class MovesAGenerator:
    """Throws a draw away."""

    def value_and_grad(self, inner, slot, update):
        def drawing(*given, **how):
            random.random()  # noqa: S311
            return inner(*given, **how)

        return drawing, slot


@af.transform
class NoiseByRank:
    """Seeds its noise by the rank, and replicas drift apart."""

    def grads(self, grads, slot, update):
        generator = torch.Generator().manual_seed(
            update.state.step + 100 * update.world.rank
        )
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

    def grads(self, grads, slot, update):
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

    def grads(self, grads, slot, update):
        return grads, slot


@af.transform
class OpenOption:
    """Has an option that is no value."""

    names: list = None  # type: ignore[assignment]

    def grads(self, grads, slot, update):
        return grads, slot


@af.transform
class ScalesTheMicroBatches:
    """Changes what a step is given, on its way to the loss."""

    def value_and_grad(self, inner, slot, update):
        def scaled(state, batch, *extras, **how):
            batch.micro_batches[0][0].mul_(0.5)
            return inner(state, batch, *extras, **how)

        return scaled, slot


_by_step: dict[tuple[int, ...], Any] = {}


@af.transform
class RemembersByStep:
    """Keeps the last gradients outside its slot, where a run from the start finds its own."""

    def grads(self, grads, slot, update):
        place = (update.world.size, update.world.rank, update.state.step)
        last = _by_step.get((*place[:2], update.state.step - 1), grads.tensors)
        _by_step[place] = grads.map(torch.clone).tensors
        return grads.with_tensors(
            {n: g + last[n] / 2 for n, g in grads.tensors.items()}
        ), slot


@af.transform
class DropsAGradient:
    """Lets a parameter go untrained."""

    def grads(self, grads, slot, update):
        kept = {n: g for n, g in grads.tensors.items() if n != "head.bias"}
        return grads.with_tensors(kept), slot


@af.transform
class EvaluatesLess:
    """Evaluates a parameter less than there are."""

    def eval_params(self, params, slot, update):
        return {n: p for n, p in params.items() if n != "head.bias"}, slot


@af.transform
class CountsTwice:
    """Moves the number of updates, and with it the schedule."""

    def after_update(self, state, slot, update):
        return attrs.evolve(state, step=state.step + 1), slot


@af.transform
class AnotherSeed:
    """Moves the seed."""

    def after_update(self, state, slot, update):
        return attrs.evolve(state, seed=state.seed + 1), slot


@af.transform
class FadesAsItIsEvaluated:
    """Moves its slot whenever it is evaluated."""

    def init(self, state):
        return {name: param.clone() for name, param in state.params.items()}

    def after_update(self, state, slot, update):
        for name, param in state.params.items():
            slot[name].lerp_(param, 0.5)
        return state, slot

    def eval_params(self, params, slot, update):
        for average in slot.values():
            average.mul_(0.75)
        return slot, slot


@af.transform
class HalvesAtTheEnd:
    """Owes something at the end, however often it is paid."""

    def finalize(self, state, slot, update):
        return state.with_params({n: p / 2 for n, p in state.params.items()}), slot


@af.transform
class OneShareForAll:
    """Lets all ranks read the first one's share."""

    def data(self, plan):
        return attrs.evolve(plan, rank=0)


@af.transform
class AShareForNobody:
    """Cuts a batch into one share more than there are ranks."""

    def data(self, plan):
        return attrs.evolve(plan, num_shares=plan.num_shares + 1)


@af.transform
class ForgetsItsSlot:
    """Gives back nothing for its slot."""

    def init(self, state):
        return {"sum": torch.zeros(())}

    def grads(self, grads, slot, update):
        return grads.map(lambda g: g / 2), None


@af.transform
class MergesOne:
    """Has a number of its own on each rank, and merges as if there were one rank."""

    tells: ClassVar[dict[str, Any]] = {"by_rank": ("seen",)}

    def init(self, state):
        return {"seen": torch.zeros(())}

    def after_update(self, state, slot, update):
        return state, {"seen": slot["seen"] + 1 + state.world.rank}

    def merge(self, slots, world):
        return [1.0], slots[0]


@af.transform
class CannotMerge:
    """Has a number of its own on each rank, and raises when they are merged."""

    tells: ClassVar[dict[str, Any]] = {"by_rank": ("seen",)}

    def init(self, state):
        return {"seen": torch.zeros(())}

    def after_update(self, state, slot, update):
        return state, {"seen": slot["seen"] + 1 + state.world.rank}

    def merge(self, slots, world):
        raise KeyError(slots)


@af.transform
class NotOnFewer:
    """Knows on how many ranks it was, and cannot go on with fewer."""

    def init(self, state):
        return {"ranks": torch.tensor(state.world.size)}

    def after_update(self, state, slot, update):
        if state.world.size < slot["ranks"]:
            message = "fewer ranks"
            raise ValueError(message)
        return state, slot


@af.transform
class NotOnMore:
    """Knows on how many ranks it was, and cannot go on with more."""

    def init(self, state):
        return {"ranks": torch.tensor(state.world.size)}

    def after_update(self, state, slot, update):
        if state.world.size > slot["ranks"]:
            message = "more ranks"
            raise ValueError(message)
        return state, slot


@af.transform
class AddsToNothing:
    """Takes gradients anew for each micro-batch."""

    def value_and_grad(self, inner, slot, update):
        def anew(state, batch, *extras, sync=True, **_):
            return inner(state, batch, *extras, sync=sync)

        return anew, slot


@af.transform
class AlwaysTalks:
    """Lets every micro-batch cross the ranks."""

    def value_and_grad(self, inner, slot, update):
        def talking(state, batch, *extras, into=None, **_):
            return inner(state, batch, *extras, into=into)

        return talking, slot


@af.transform
class TakesNoExtras:
    """Wraps losses of a model and a batch only."""

    def loss(self, loss_fn, slot, update):
        def plain(model, batch):
            return loss_fn(model, batch)

        return plain, slot


@af.transform
class LosesExtras:
    """Keeps what the step was given for the loss."""

    def loss(self, loss_fn, slot, update):
        return (lambda model, batch, *_: loss_fn(model, batch)), slot


@af.transform
class ReportsOnOneRank:
    """Reports a value on one rank only."""

    def grads(self, grads, slot, update):
        return (grads.with_metrics(seen=1.0) if update.world.is_main else grads), slot


@af.transform
class SetsADtype:
    """Leaves another default dtype to all."""

    def hyper(self, hyper, slot, update):
        torch.set_default_dtype(torch.float64)
        return {"lr": 0.1}, slot


@af.transform
class SetsThreads:
    """Leaves another number of threads."""

    def hyper(self, hyper, slot, update):
        torch.set_num_threads(3)
        return {"lr": 0.1}, slot


@af.transform
class SetsDeterminism:
    """Leaves torch deterministic."""

    def hyper(self, hyper, slot, update):
        torch.use_deterministic_algorithms(mode=True)
        return {"lr": 0.1}, slot


@af.transform
class SetsPrecision:
    """Leaves products of float32 in fewer bits, by the newer of torch's two ways."""

    def hyper(self, hyper, slot, update):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return {"lr": 0.1}, slot


@af.transform
class RateOfTheFirstGroup:
    """Halves the rate of the first group, for all groups."""

    def hyper(self, hyper, slot, update):
        return {"lr": hyper.get((0, "lr"), 0.1) / 2}, slot


@af.transform
class EvaluatesTheState:
    """Evaluates half of the state's parameters, whatever another made of them before."""

    def eval_params(self, params, slot, update):
        return {n: p / 2 for n, p in update.state.params.items()}, slot


@af.transform
class HalvesTheFirstGrads:
    """Halves the update's gradients, whatever another made of them before."""

    def grads(self, grads, slot, update):
        return update.grads.map(lambda g: g / 2), slot


@pytest.fixture(autouse=True)
def _settings_kept() -> Iterator[None]:
    precision = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "law"),
    [
        (ScalesTheMicroBatches(), "inputs_unchanged"),
        (RemembersByStep(), "forks_apart"),
        (DropsAGradient(), "drops_nothing"),
        (EvaluatesLess(), "drops_nothing"),
        (CountsTwice(), "drops_nothing"),
        (AnotherSeed(), "drops_nothing"),
        (FadesAsItIsEvaluated(), "evaluates_purely"),
        (HalvesAtTheEnd(), "owes_once"),
        (RateOfTheFirstGroup(), "groups_apart"),
        (EvaluatesTheState(), "takes_what_it_is_given"),
        (HalvesTheFirstGrads(), "takes_what_it_is_given"),
        (OneShareForAll(), "splits_alike"),
        (AShareForNobody(), "splits_alike"),
        (ForgetsItsSlot(), "own_slot"),
        (MergesOne(), "loads_anywhere"),
        (CannotMerge(), "loads_anywhere"),
        (NotOnFewer(), "loads_anywhere"),
        (NotOnMore(), "loads_anywhere"),
        (AddsToNothing(), "passes_on"),
        (AlwaysTalks(), "passes_on"),
        (TakesNoExtras(), "passes_on"),
        (LosesExtras(), "passes_on"),
        (ReportsOnOneRank(), "replicas_agree"),
        (SetsADtype(), "leaves_settings"),
        (SetsThreads(), "leaves_settings"),
        (SetsDeterminism(), "leaves_settings"),
        (SetsPrecision(), "leaves_settings"),
        (OpenOption(["a"]), "value"),
        (DecaysParams(), "inputs_unchanged"),
        (DecaysBuffers(), "inputs_unchanged"),
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
        (LosesItsSlot(), "forks_apart"),
        (CannotBeSaved(), "resumes"),
        (KeepsWhatItGivesUp(), "replicas_agree"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_planted_bugs_are_refused_by_their_law(planted, law, monkeypatch):
    if isinstance(planted, NeedsTheRank):  # so that the plain run can begin
        monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(LawError) as caught:
        check_transform(planted, sizes=(1, 2))
    assert f"{law!r}" in str(caught.value)
    assert repr(planted) in str(caught.value)


@af.transform
class ClipsByItsPart:
    """Clips by the norm of what this rank has seen of an update."""

    def value_and_grad(self, inner, slot, update):
        def clipped(state, batch, *extras, **how):
            metrics, grads = inner(state, batch, *extras, **how)
            norm = torch.nn.utils.get_total_norm(grads.tensors.values())
            return metrics, grads.map(lambda g: g * (0.5 / norm).clamp(max=1.0))

        return clipped, slot


@af.transform
class RootOfTheLoss:
    """Is no mean over samples."""

    def loss(self, loss_fn, slot, update):
        return (
            lambda model, batch, *extras: loss_fn(model, batch, *extras).sqrt()
        ), slot


@af.transform
class NormOfItsRows:
    """Takes a norm of the rows that this rank has."""

    def grads(self, grads, slot, update):
        rows = [getattr(g, "_local_tensor", g) for g in grads.tensors.values()]
        norm = torch.nn.utils.get_total_norm(rows)
        return grads.map(lambda g: g * float((0.5 / norm).clamp(max=1.0))), slot


@af.transform
class RateByRanks:
    """Scales the learning rate by the number of ranks."""

    def hyper(self, hyper, slot, update):
        return {"lr": 0.05 * update.world.size}, slot


@af.transform
class AverageOfOneRank:
    """Keeps an average on rank 0 alone."""

    def init(self, state):
        return {name: param.clone() for name, param in state.params.items()}

    def after_update(self, state, slot, update):
        if update.world.is_main:
            slot = {n: each.lerp(state.params[n], 0.5) for n, each in slot.items()}
        return state, slot

    def eval_params(self, params, slot, update):
        return dict(slot), slot


class _Calls:
    count = 0
    first: ClassVar[dict[str, float]] = {}


@af.transform
class WarmsUpOnce:
    """Counts on a class, up to a bound."""

    def hyper(self, hyper, slot, update):
        _Calls.count = min(_Calls.count + 1, 4)
        return {"lr": 0.025 * _Calls.count}, slot


@af.transform
class LatchesTheFirst:
    """Divides by the norm of the first gradients of all."""

    def grads(self, grads, slot, update):
        norm = float(torch.nn.utils.get_total_norm(grads.tensors.values()))
        first = _Calls.first.setdefault("norm", norm)
        return grads.map(lambda g: g / first), slot


@af.transform
class VotesForNothing:
    """Gives up the mean, and returns zeros."""

    gives_up: ClassVar[dict[str, str]] = {"reduces_to_mean": "a vote"}

    def reduce(self, grads, slot, update):
        return grads.with_sums(grads.map(torch.zeros_like).tensors, 1), slot


@af.transform
class VotesByRanks:
    """Divides a vote by the number of ranks, once too often."""

    gives_up: ClassVar[dict[str, str]] = {"reduces_to_mean": "a vote"}

    def reduce(self, grads, slot, update):
        votes = af.all_reduce(grads.map(torch.sign).tensors, update.world, "mean")
        return grads.with_sums(votes, update.world.size), slot


@af.transform
class ForgetsTheRest:
    """Sends half of each gradient's numbers, and forgets the others."""

    gives_up: ClassVar[dict[str, str]] = {"reduces_to_mean": "a part is sent"}

    def reduce(self, grads, slot, update):
        grads = grads.map(lambda g: g * (g.abs() >= g.abs().median()))
        weight = weight_of(grads, update.world)
        return grads.with_sums(
            *af.all_reduce((grads.tensors, weight), update.world)
        ), slot


@af.transform
class AveragesRanks:
    """Averages ranks every third update; correct if it weights both places."""

    weights_average: bool = True
    weights_merge: bool = True
    reduce: ClassVar[None] = None
    gives_up: ClassVar[dict[str, str]] = {"replicas_agree": "between averages"}
    tells: ClassVar[dict[str, Any]] = {"by_rank": ("weight",), "sees_skips": True}

    def init(self, state):
        return {"weight": 0.0, "steps": 0, "skips": 0}

    def after_update(self, state, slot, update):
        if update.skipped:
            return state, {**slot, "skips": slot["skips"] + 1}
        weight = slot["weight"] + float(update.weight)
        slot = {**slot, "weight": weight, "steps": slot["steps"] + 1}
        return state, slot if slot["steps"] < 3 else self._average(state, slot, update)

    def finalize(self, state, slot, update):
        return state, self._average(state, slot, update) if slot["steps"] else slot

    def _average(self, state, slot, update):
        means = self._means(state.params, slot, update)
        for name in state.trainable:
            state.params[name].copy_(means[name])
        return {**self.init(state), "skips": slot["skips"]}

    def eval_params(self, params, slot, update):
        return (self._means(params, slot, update) if slot["steps"] else params), slot

    def _means(self, params, slot, update):
        weight = slot["weight"] if self.weights_average else 1.0
        weight = torch.tensor(weight, dtype=torch.float64)
        part = weight / af.all_reduce(weight, update.world)
        parts = {n: params[n] * float(part) for n in update.state.trainable}
        return {**params, **af.all_reduce(parts, update.world)}

    def merge(self, slots, world):
        weights = [slot["weight"] if self.weights_merge else 1.0 for slot in slots]
        weight = sum(slot["weight"] for slot in slots) / world.size
        return weights, {**slots[0], "weight": weight}


@af.transform
class Rounds:
    """Rounds gradients, and adds the rest to the next; correct if it divides by new ranks."""

    by_new: bool = True
    gives_up: ClassVar[dict[str, str]] = {"reduces_to_mean": "the rest comes later"}
    tells: ClassVar[dict[str, Any]] = {"by_rank": ("rest",)}

    def init(self, state):
        return {"rest": {n: torch.zeros_like(state.params[n]) for n in state.trainable}}

    def reduce(self, grads, slot, update):
        owed = {n: g + slot["rest"][n] for n, g in grads.tensors.items()}
        sent = {n: o.div(0.05).round() * 0.05 for n, o in owed.items()}
        rest = {n: owed[n] - sent[n] for n in owed}
        sums = af.all_reduce((sent, weight_of(grads, update.world)), update.world)
        return grads.with_sums(*sums), {"rest": rest}

    def merge(self, slots, world):
        number = world.size if self.by_new else len(slots)
        rests = [slot["rest"] for slot in slots]
        rest = {n: sum(each[n] for each in rests) / number for n in rests[0]}
        return [1.0] * len(slots), {"rest": rest}


@pytest.mark.slow
@pytest.mark.parametrize("transform", [AveragesRanks(), Rounds()])
def test_methods_that_count_samples_pass(transform):
    """D: the twins of the planted ones below, without their faults, keep all laws."""
    check_transform(transform, sizes=(2,))


@af.transform
class MergesTheFirst:
    """Loads what rank 0 owed, and loses what others did."""

    tells: ClassVar[dict[str, Any]] = {"by_rank": ("owed",)}

    def init(self, state):
        return {"owed": torch.zeros(())}

    def after_update(self, state, slot, update):
        return state, {"owed": slot["owed"] + 1 + state.world.rank}

    def merge(self, slots, world):
        return [1.0] * len(slots), slots[0]


@af.transform
class MergesSums(MergesTheFirst):
    """Adds up on each rank what all owed, however many there are."""

    def merge(self, slots, world):
        return [1.0] * len(slots), {"owed": sum(slot["owed"] for slot in slots)}


@af.transform
class SendsTheLargest:
    """Sends a third of each gradient's numbers, and the others later; loses some in `merge`."""

    gives_up: ClassVar[dict[str, str]] = {"reduces_to_mean": "the rest is sent later"}
    tells: ClassVar[dict[str, Any]] = {"by_rank": ("rest",)}

    def init(self, state):
        return {"rest": {n: torch.zeros_like(state.params[n]) for n in state.trainable}}

    def reduce(self, grads, slot, update):
        owed = {n: g + slot["rest"][n] for n, g in grads.tensors.items()}
        sent = {n: o * (o.abs() >= o.abs().quantile(2 / 3)) for n, o in owed.items()}
        weight = weight_of(grads, update.world)
        grads = grads.with_sums(*af.all_reduce((sent, weight), update.world))
        return grads, {"rest": {n: owed[n] - each for n, each in sent.items()}}

    def merge(self, slots, world):
        rests = [slot["rest"] for slot in slots]
        rest = {n: sum(each[n] for each in rests) / len(rests) for n in rests[0]}
        return [1.0] * len(slots), {"rest": rest}


@af.transform
class MovesAtOnce:
    """Writes into its slot before it is known whether the update is skipped."""

    def init(self, state):
        return {"seen": torch.zeros(())}

    def grads(self, grads, slot, update):
        slot["seen"].add_(1)
        return grads.map(lambda g: g / (1 + slot["seen"])), slot


@af.transform
class CountsLooks:
    """Counts how often it is asked, in place, as `state.lrs` asks."""

    tells: ClassVar[dict[str, Any]] = {"sees_skips": True}

    def init(self, state):
        return {"asked": torch.zeros(())}

    def hyper(self, hyper, slot, update):
        slot["asked"].add_(1)
        return {"lr": 0.1 * 0.9 ** float(slot["asked"])}, slot


@af.transform
class LosesPrecision:
    """Begins in float64, and goes on in float32."""

    def init(self, state):
        return {"norm": torch.zeros((), dtype=torch.float64)}

    def grads(self, grads, slot, update):
        norm = torch.nn.utils.get_total_norm(grads.tensors.values())
        return grads.map(lambda g: g / 2), {"norm": norm}


@af.transform
class DecaysAll:
    """Changes parameters that are not trained."""

    def after_update(self, state, slot, update):
        return state.with_params({n: p / 2 for n, p in state.params.items()}), slot


@af.transform
class IgnoresAnOption:
    """Averages each update, whatever `averaged_every` is."""

    averaged_every: int = 2

    def init(self, state):
        return {name: param.clone() for name, param in state.params.items()}

    def after_update(self, state, slot, update):
        return state, {n: s.lerp(state.params[n], 0.5) for n, s in slot.items()}

    def eval_params(self, params, slot, update):
        return dict(slot), slot


_norms: dict[str, torch.Tensor] = {}


@af.transform
class SharesNorms:
    """Keeps norms where all ranks find them, and those of split parameters are DTensors."""

    def grads(self, grads, slot, update):
        for name, grad in grads.tensors.items():
            if name not in _norms or update.num_tried % 4 == 0:
                _norms[name] = grad.norm().detach()
        shares = {n: g / (1 + _norms[n]) for n, g in grads.tensors.items()}
        return grads.with_tensors(shares), slot


@af.transform
class AveragesTooEarly:
    """Averages by the count before the update, and believes at the end that it did after."""

    gives_up: ClassVar[dict[str, str]] = {"replicas_agree": "between averages"}
    reduce: ClassVar[None] = None

    def after_update(self, state, slot, update):
        return self._averaged(state) if update.state.step % 2 == 0 else state, slot

    def finalize(self, state, slot, update):
        return self._averaged(state) if state.step % 2 else state, slot

    def _averaged(self, state: Any) -> Any:
        return state.with_params(af.all_reduce(state.params, state.world, "mean"))


@af.transform
class MovesWhenSkipped:
    """Counts skips, and moves parameters in updates 2 and 4, also where that was skipped."""

    tells: ClassVar[dict[str, Any]] = {"sees_skips": True}

    def init(self, state):
        return {"skips": 0}

    def after_update(self, state, slot, update):
        if update.num_tried == (4 if update.skipped else 2):
            for name in state.trainable:
                state.params[name].mul_(0.75)
        return state, {"skips": slot["skips"] + update.skipped}


@af.transform
class NumbersOfNorms:
    """Divides by a norm, as a number, which is that of a part where a tensor is split."""

    def grads(self, grads, slot, update):
        return grads.map(lambda g: g / (1 + float(g.norm()))), slot


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "law", "told"),
    [
        (
            SharesNorms(),
            "splits_alike",
            "in another thread: simulated",
        ),
        (AveragesTooEarly(), "owes_once", "and of another rank after finalize"),
        (MovesWhenSkipped(), "skips_whole", "In after_update, check update.skipped."),
        (NumbersOfNorms(), "splits_alike", "tensor.norm().full_tensor(), or"),
        (ClipsByItsPart(), "splits_alike", 'refuses = {"micro_batches": "..."}.'),
        (
            ClipsByItsPart(),
            "splits_alike",
            "2 ranks in two micro-batches, differ after",
        ),
        (RootOfTheLoss(), "splits_alike", "elements differ, the first at"),
        (NormOfItsRows(), "splits_alike", "the same run on 2 ranks under wrap_fsdp, "),
        (RateByRanks(), "splits_alike", "the same run on 2 ranks with their shares, "),
        (AverageOfOneRank(), "replicas_agree", "slots['average_of_one_rank']"),
        (
            WarmsUpOnce(),
            "new_process",
            "a run that continues in a new process, and the",
        ),
        (
            LatchesTheFirst(),
            "new_process",
            "a run that continues in a new process, and the",
        ),
        (VotesForNothing(), "trains", "no parameter changed in updates 2 to 4"),
        (VotesByRanks(), "splits_alike", "2 ranks that all take the same samples"),
        (
            ForgetsTheRest(),
            "sends_all_later",
            "over 201 updates, the sum of reduce's results",
        ),
        (SendsTheLargest(), "splits_alike", "divide it by world.size"),
        (
            AveragesRanks(weights_average=False),
            "splits_alike",
            "on ranks with all samples on rank 0, differ after update 4",
        ),
        (
            AveragesRanks(weights_merge=False),
            "splits_alike",
            "saved after 1 updates and resumed on one rank",
        ),
        (Rounds(by_new=False), "splits_alike", "divide it by world.size"),
        (MergesTheFirst(), "merges_all", "does not use rank 1's value of 'owed'"),
        (MergesSums(), "merges_all", "merge changes its own result: it merged 2"),
        (MovesAtOnce(), "skips_whole", "['seen']: 1.0 and 2.0, difference 1"),
        (CountsLooks(), "evaluates_purely", "Change nothing in hyper: state.lrs"),
        (DecaysAll(), "keeps_frozen", "frozen: 3 of 3 elements differ, the first at"),
        (LosesPrecision(), "own_slot", "['norm'] from torch.float64 to"),
        (IgnoresAnOption(), "options_read", "no code reads IgnoresAnOption().aver"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_depends_on_how_it_is_run_is_told(planted, law, told):
    """By the law, the place and the split: ranks, micro-batches, rows, runs, skips or looks.

    Nothing hangs.
    """
    faulthandler.dump_traceback_later(300, exit=True)
    with pytest.raises(LawError) as caught:
        check_transform(planted, sizes=(2,), problems=(Problem(),))
    faulthandler.cancel_dump_traceback_later()
    assert f"{law!r}" in str(caught.value)
    assert told in str(caught.value)


@af.transform
class StartsFromZero:
    """Changes the parameters when its slot is made."""

    def init(self, state):
        for param in state.params.values():
            param.zero_()
        return {}


@af.transform
class HalvesTheModel:
    """Changes the model that a loss is of."""

    def loss(self, loss_fn, slot, update):
        def halved(model, *given):
            for param in model.parameters():
                param.data.mul_(0.5)
            return loss_fn(model, *given)

        return halved, slot


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (OpenOption(["a"]), "). Use hashable options, such as a tuple"),
        (StartsFromZero(), ".init changed params['frozen'] in place. Return new"),
        (HalvesTheModel(), ".loss changed parameter 'frozen' in place. Return"),
        (DecaysParams(), ".grads changed params['frozen'] in place. Return new"),
        (ScalesTheBatch(), ".loss changed tensor 0 of the batch in place. Return new"),
        (WritesAnotherSlot(), "it added the slots 'somebody'. Store values"),
        (ForgetsItsSlot(), "the slot 'forgets_its_slot', but after an update"),
        (DropsAGradient(), ".grads returns no gradient for 'head.bias', so this"),
        (EvaluatesLess(), ".eval_params does not return the parameter 'head.bias'."),
        (CountsTwice(), ".after_update changes state.step. Only the step may"),
        (AnotherSeed(), ".after_update changes state.seed. Only the step may"),
        (OneShareForAll(), "the same run on 2 ranks with their shares, differ"),
        (TakesNoExtras(), "must accept the arguments (model, batch, *extras)"),
        (LosesExtras(), "the loss did not get the step's extras. Pass *extras"),
        (AddsToNothing(), "gradients of earlier micro-batches were lost. Pass into="),
        (AlwaysTalks(), "communicated in every micro-batch. Pass sync= to"),
        (HalvesAtTheEnd(), "the states after one and after two calls of finalize"),
        (FadesAsItIsEvaluated(), "Return new tensors from eval_params."),
        (CountsInAClosure(), "two runs from the same state"),
        (SetsThreads(), "to 3 for the whole process."),
        (ReadsTheRank(), "Read the rank from the world,"),
        (DrawsFromPython(), "Draw random numbers inside the loss, or in a block"),
        (MovesAGenerator(), "it advanced Python's global generator. Draw random"),
        (
            KeepsWhatItGivesUp(),
            "'replicas_agree' in gives_up (now and then), but keeps",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_law_says_what_was_done(planted, told):
    """The error names the method or the entry, or what to do instead."""
    with pytest.raises(LawError) as caught:
        check_transform(planted, sizes=(2,), problems=(Problem(),), updates=4)
    assert told in str(caught.value)


def run_of(*transforms: Any) -> Subject:
    """Return three updates on two ranks, in a setup of some transforms."""
    return Subject(
        name="a run",
        size=2,
        updates=3,
        begin=Problem().state,
        advance=lambda state, _, number: Problem().updates(state, number),
        members=transforms,
        setup=af.chain(*transforms),
    )


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (NotOnFewer(), "loaded with 1 ranks, the run raised ValueError: fewer"),
        (NotOnMore(), "loaded with 3 ranks, the run raised ValueError: more"),
    ],
    ids=["fewer", "more"],
)
def test_a_slot_of_one_number_of_ranks_is_told(planted, told):
    """What is saved is loaded on one rank and on one more, and the error says where it is not."""
    subject = run_of(af.shard_data(), planted, af.wrap_ddp())
    assert told in str(loads_anywhere(subject))


@af.transform
class LooksAtRates:
    """Raises a rate that is small, as `state.lrs` says, and squashes gradients by a tanh."""

    def hyper(self, hyper, slot, update):
        return {"lr": 0.05 + update.state.lrs[0] / 2}, slot

    def grads(self, grads, slot, update):
        return grads.map(torch.tanh), slot


@pytest.mark.slow
def test_rates_and_layers_may_be_asked_anywhere():
    """In `hyper` `state.lrs` has the rates so far; a tanh of gradients is no module run again."""
    check_transform(LooksAtRates(), sizes=(2,), problems=(Problem(),))
    setup = af.chain(LooksAtRates(), LooksAtRates(name="again"))
    state = Problem().state(af.World(), setup)
    assert state.lrs == (0.05 + (0.05 + 0.1 / 2) / 2,)


def of_products(precision: str) -> None:
    """Set it by the newer of torch's ways; the older then refuses to say what it is."""
    torch.backends.cuda.matmul.fp32_precision = precision


@pytest.mark.slow
@pytest.mark.parametrize(
    ("put", "value"),
    [
        (of_products, "tf32"),
        (torch.set_default_dtype, torch.float64),
        (torch.set_num_threads, 2),
        (torch.use_deterministic_algorithms, True),
    ],
)
def test_a_program_may_have_settings_of_its_own(put, value):
    """Of which no rank is said to have set what another found."""
    put(value)
    check_transform(af.identity(), sizes=(2,), problems=(Problem(),))


@af.transform
class DriftsAtLast:
    """Moves the parameters by the rank, every so many updates."""

    every: int

    def after_update(self, state, slot, update):
        if state.step % self.every == 0:
            moved = {n: p + state.world.rank for n, p in state.params.items()}
            state = state.with_params(moved)
        return state, slot


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, 8, 32])
def test_what_happens_late_is_seen(every):
    """D: updates are taken until each method has acted, and so is `local_sgd(8)`'s average."""
    with pytest.raises(LawError, match="'replicas_agree'"):
        check_transform(DriftsAtLast(every), sizes=(2,))


@af.transform
class DriftsAfterwards:
    """Acts once, on all ranks alike, and by the rank in the update behind that."""

    at: int

    def after_update(self, state, slot, update):
        moves = {self.at: 1, self.at + 1: state.world.rank}.get(state.step, 0)
        if moves:
            moved = {n: p + moves for n, p in state.params.items()}
            state = state.with_params(moved)
        return state, slot


@pytest.mark.parametrize("at", [4, 5, 7])
def test_what_happens_behind_the_first_act_is_seen(at):
    """D: another update follows the one in which the last of the methods first acted."""
    with pytest.raises(LawError, match="'replicas_agree'"):
        check_transform(DriftsAfterwards(at), sizes=(2,), problems=(Problem(),))


def test_an_average_is_seen(monkeypatch):
    """D: `local_sgd(8)` is checked through an average, and with an update owed at the end."""
    seen: list[int] = []
    plain = af.local_sgd.finalize

    def finalize(self, state, slot, update):
        seen.append(state.step)
        return plain(self, state, slot, update)

    monkeypatch.setattr(af.local_sgd, "finalize", finalize)
    check_transform(af.local_sgd(sync_every=8), sizes=(2,), problems=(Problem(),))
    assert {8, 9} <= set(seen)


def test_what_never_acts_is_named():
    """D: a method that changed nothing in all updates is named, with what to write."""
    late = DriftsAtLast(40)
    with pytest.raises(
        LawError, match=r"'acts'.*DriftsAtLast\(40\).after_update"
    ) as caught:
        check_transform(late, sizes=(2,), problems=(Problem(),))
    assert "in 33 updates" in str(caught.value)
    assert "updates=" in str(caught.value)
    with pytest.raises(LawError, match="in 3 updates"):
        check_transform(DriftsAtLast(4), sizes=(2,), problems=(Problem(),), updates=3)
    with pytest.raises(LawError, match="'acts'"):
        check_transform(
            af.clip_grad_value(float("inf")), sizes=(2,), problems=(Problem(),)
        )
    with pytest.raises(ArgumentError, match="updates=0"):
        check_transform(late, updates=0)


@af.transform
class AveragesEvery:
    """Lets ranks train apart, counts in its slot, and averages every so many updates."""

    gives_up: ClassVar[dict[str, str]] = {"replicas_agree": "between averages"}
    reduce: ClassVar[None] = None
    every: int

    def init(self, state):
        return {}

    def after_update(self, state, slot, update):
        slot = {"seen": slot.get("seen", 0) + 1}
        if slot["seen"] % self.every == 0:
            state = state.with_params(af.all_reduce(state.params, state.world, "mean"))
        return state, slot


@pytest.mark.parametrize(("every", "when"), [(1, {1, 2, 3}), (2, {2}), (8, None)])
def test_to_count_until_ranks_meet_is_not_to_act(every, when):
    """Where ranks train apart, a slot that fills is not yet what the method is there for."""
    found: dict[str, set[int]] = {}
    observe_acts(found, run_of(af.shard_data(), AveragesEvery(every)))
    assert found.get(f"AveragesEvery({every}).after_update") == when


def test_one_that_only_looks_says_so():
    """D: that a method changes nothing can be given up, as other laws can."""

    @af.transform
    class Looks:
        gives_up: ClassVar[dict[str, str]] = {"acts": "it only looks"}

        def after_update(self, state, slot, update):
            return state, slot

    check_transform(Looks(), sizes=(2,), problems=(Problem(),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        af.autocast("fp16"),
        af.skip_nonfinite(),
        af.chain(af.wrap_ddp(), af.compress_grads("fp16")),
        af.chain(
            af.wrap_ddp(),
            af.compress_grads(
                "powersgd", start_powerSGD_iter=1, min_compression_rate=0
            ),
        ),
        af.check_replicas(every=7),
    ],
    ids=repr,
)
def test_what_acts_seldom_or_by_rank_is_not_refused(transform):
    """D: a skip is provoked, a slot that says how it is merged may differ by rank."""
    check_transform(transform, sizes=(2,), problems=(Problem(),))


class TestReducing:
    """A7: what takes the place of `wrap_ddp` gives the mean over all ranks."""

    @pytest.mark.slow
    @pytest.mark.parametrize("kept", [SumAll(), GatherAll(), HalfPrecision()], ids=repr)
    def test_a_users_reduce_keeps_the_laws(self, kept):
        """One that is written with public names only passes as `wrap_ddp` does."""
        check_transform(kept, sizes=(1, 2, 4), problems=(Problem(weighted=True),))

    def test_what_leaves_something_for_later_says_so(self):
        """Error feedback gives up that each update's mean is near, and no more."""
        with pytest.raises(LawError, match="'reduces_to_mean'"):
            check_transform(ErrorFeedback(), sizes=(2,), problems=(Problem(),))

        @af.transform
        class Honest:
            gives_up: ClassVar[dict[str, str]] = {"reduces_to_mean": "in time it is"}
            tells: ClassVar[dict[str, Any]] = {"by_rank": ("rest",)}

            def init(self, state):
                return ErrorFeedback().init(state)

            def merge(self, slots, world):
                return ErrorFeedback().merge(slots, world)

            def reduce(self, grads, slot, update):
                return ErrorFeedback().reduce(grads, slot, update)

        check_transform(Honest(), sizes=(2,), problems=(Problem(),))

    @pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
    @pytest.mark.parametrize("sums", SUMS, ids=lambda sums: sums.__name__)
    def test_a_wrong_sum_is_refused(self, sums, problem):
        """Whoever forgets a rank, a weight, a parameter or the order is told, by any problem."""
        with pytest.raises((LawError, ReplicaMismatchError, GradsError)):
            check_transform(Reduces(sums), sizes=(4,), problems=(problem,))


def test_what_is_no_transform_is_refused():
    with pytest.raises(ArgumentError, match="expected a transform"):
        check_transform(lambda state: state)


def test_an_unknown_law_cannot_be_given_up():
    @af.transform
    class Odd:
        gives_up: ClassVar[dict[str, str]] = {"gravity": "at times"}

        def grads(self, grads, slot, update):
            return grads, slot

    with pytest.raises(ArgumentError, match="gravity"):
        check_transform(Odd())


def _same(_self: Any, value: Any, *_given: Any) -> Any:
    return value


def _same_pair(_self: Any, value: Any, slot: Any, _update: Any) -> Any:
    return value, slot


IDLE = {
    "data": _same,
    **dict.fromkeys(
        ("loss", "value_and_grad", "grads", "hyper", "after_update", "eval_params"),
        _same_pair,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("field", IDLE)
def test_a_method_that_does_nothing_is_told(field):
    """Whatever field it is: what gives back what it was given has shown nothing of itself."""
    idle = af.transform(type("Idle", (), {field: IDLE[field]}))()
    with pytest.raises(LawError, match=rf"'acts'.*Idle\(\).{field} changed nothing"):
        check_transform(idle, sizes=(2,), problems=(Problem(),), updates=4)
