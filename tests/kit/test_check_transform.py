# SPDX-License-Identifier: Apache-2.0
"""`check_transform` passes what keeps the laws, and refuses each planted bug by its law."""

# methods take all that they are given
# ruff: noqa: ARG001, ARG005

import faulthandler
import os
import random
from collections.abc import Callable, Iterator
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
from tests.internals import PROBLEMS, Subject, observe_acts
from tests.laws.reducing import (
    ErrorFeedback,
    HalfPrecision,
    SumAll,
    weight_of,
)

ONE = {"sizes": (2,), "problems": (Problem(),)}
norm_of = torch.nn.utils.get_total_norm


@pytest.fixture(autouse=True)
def _settings_kept() -> Iterator[None]:
    precision = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.slow
@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)
def test_public_transforms_keep_the_laws(entry):
    check_transform(entry.transform, sizes=(1, 2) if at_night() else (2,))


# What keeps the laws


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


@af.transform
class LooksAtRates:
    """Raises a rate that is small, as `state.lrs` says, and squashes gradients by a tanh."""

    def hyper(self, hyper, slot, update):
        return {"lr": 0.05 + update.state.lrs[0] / 2}, slot

    def grads(self, grads, slot, update):
        return grads.map(torch.tanh), slot


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
class Later(ErrorFeedback):
    """Says what it leaves for later; correct if it divides that by the new ranks."""

    by_new: bool = True
    gives_up: ClassVar[dict[str, str]] = {"reduces_to_mean": "in time it is"}

    def merge(self, slots, world):
        weights, slot = ErrorFeedback.merge(self, slots, world)
        factor = 1 if self.by_new else world.size / len(slots)
        return weights, {"rest": {n: r * factor for n, r in slot["rest"].items()}}


@af.transform
class OnlyLooks:
    """Changes nothing, and says so."""

    gives_up: ClassVar[dict[str, str]] = {"acts": "it only looks"}

    def after_update(self, state, slot, update):
        return state, slot


@pytest.mark.slow
@pytest.mark.parametrize(
    "kept",
    [
        *(SharedNoise(), Momentum(), NoisyInputs(), LooksAtRates(), OnlyLooks()),
        *(AveragesRanks(), Later()),
        af.chain(af.clip_grad_norm(0.5), af.ema(0.5)),
        # a skip is provoked, and a slot that says how it is merged may differ by rank
        *(af.autocast("fp16"), af.skip_nonfinite(), af.check_replicas(every=7)),
        af.chain(af.wrap_ddp(), af.compress_grads("fp16")),
        af.chain(
            af.wrap_ddp(),
            af.compress_grads(
                "powersgd", start_powerSGD_iter=1, min_compression_rate=0
            ),
        ),
    ],
    ids=repr,
)
def test_what_is_right_keeps_the_laws(kept):
    check_transform(kept, **ONE)


def test_rates_may_be_asked_anywhere():
    """In `hyper` `state.lrs` has the rates so far."""
    setup = af.chain(LooksAtRates(), LooksAtRates(name="again"))
    assert Problem().state(af.World(), setup).lrs == (0.05 + (0.05 + 0.1 / 2) / 2,)


# What breaks one

PLANTED: list[tuple[Any, str, str]] = []
"""Transforms with a bug, the law that refuses each, and words of the refusal."""


def planted(field: str, law: str, words: str, **body: Any) -> Callable[[Any], None]:
    """Return a decorator that lists a transform with a method, beside the class's body."""

    def add(method: Any) -> None:
        name = method.__name__.title().replace("_", "")
        cls = type(name, (), {field: method, **body})
        PLANTED.append((af.transform(cls)(), law, words))

    return add


IN_PLACE = "in place. Return new"


@planted("init", "inputs_unchanged", f".init changed params['frozen'] {IN_PLACE}")
def starts_from_zero(_, state):
    for param in state.params.values():
        param.zero_()
    return {}


@planted("grads", "inputs_unchanged", f".grads changed params['frozen'] {IN_PLACE}")
def decays_params(_, grads, slot, update):
    for param in update.state.params.values():
        param.mul_(0.5)
    return grads, slot


@planted("hyper", "inputs_unchanged", ".hyper changed buffers[")
def decays_buffers(_, hyper, slot, update):
    for buffer in update.state.buffers.values():
        buffer.mul_(2)
    return hyper, slot


@planted("loss", "inputs_unchanged", f".loss changed tensor 0 of the batch {IN_PLACE}")
def scales_the_batch(_, loss_fn, slot, update):
    def scaled(model, batch):
        batch[0].mul_(0.5)
        return loss_fn(model, batch)

    return scaled, slot


@planted("loss", "inputs_unchanged", ".loss changed parameter 'frozen' in place. Re")
def halves_the_model(_, loss_fn, slot, update):
    def halved(model, *given):
        for param in model.parameters():
            param.data.mul_(0.5)
        return loss_fn(model, *given)

    return halved, slot


@planted("value_and_grad", "inputs_unchanged", ".value_and_grad changed ")
def scales_the_micro_batches(_, inner, slot, update):
    def scaled(state, batch, *extras, **how):
        batch.micro_batches[0][0].mul_(0.5)
        return inner(state, batch, *extras, **how)

    return scaled, slot


@planted("after_update", "own_slot", "it added the slots 'somebody'. Store values")
def writes_another_slot(_, state, slot, update):
    return state.with_slot("somebody", 1), slot


@planted(
    *("grads", "own_slot", "the slot 'forgets_its_slot', but after an update"),
    init=lambda _, state: {"sum": torch.zeros(())},
)
def forgets_its_slot(_, grads, slot, update):
    return grads.map(lambda g: g / 2), None


@planted(
    *("grads", "own_slot", "['norm'] from torch.float64 to"),
    init=lambda _, state: {"norm": torch.zeros((), dtype=torch.float64)},
)
def loses_precision(_, grads, slot, update):
    return grads.map(lambda g: g / 2), {"norm": norm_of(grads.tensors.values())}


_seen: list[int] = []


@planted("grads", "memory_in_state", "two runs from the same state")
def counts_in_a_closure(_, grads, slot, update):
    _seen.append(1)
    return grads.map(lambda g: g / len(_seen)), slot


@planted("grads", "no_environment", "Read the rank from the world,")
def reads_the_rank(_, grads, slot, update):
    rank = int(os.environ.get("RANK", "0"))
    return grads.map(lambda g: g * (1 + rank)), slot


@planted("grads", "no_environment", "KeyError: 'WORLD_SIZE'")
def needs_the_rank(_, grads, slot, update):
    assert int(os.environ["WORLD_SIZE"]) > 0
    return grads, slot


@af.transform
class ScalesBy:
    """Draws where no stream of the state's is at work, from a generator of the process."""

    draw: Callable[..., Any]

    def value_and_grad(self, inner, slot, update):
        def noisy(state, batch, *extras, **how):
            metrics, grads = inner(state, batch, *extras, **how)
            factor = 1 + float(self.draw())
            return metrics, grads.map(lambda g: g * factor)

        return noisy, slot


def of_torch() -> torch.Tensor:
    return torch.rand(())


WITHIN = "Draw random numbers inside the loss, or in a block"
PLANTED += [
    (ScalesBy(draw), "own_randomness", WITHIN)
    for draw in (random.random, np.random.rand, of_torch)
]


@planted("value_and_grad", "own_randomness", "it advanced Python's global generator.")
def moves_a_generator(_, inner, slot, update):
    def drawing(*given, **how):
        random.random()  # noqa: S311
        return inner(*given, **how)

    return drawing, slot


@planted("grads", "replicas_agree", "the states of rank 0 and of another rank differ")
def noise_by_rank(_, grads, slot, update):
    seed = update.state.step + 100 * update.world.rank
    drawn = torch.Generator().manual_seed(seed)
    return grads.map(lambda g: g + torch.randn(g.shape, generator=drawn).to(g)), slot


@planted("grads", "replicas_agree", "'seen'")
def reports_on_one_rank(_, grads, slot, update):
    return (grads.with_metrics(seen=1.0) if update.world.is_main else grads), slot


@planted(
    *("grads", "replicas_agree", "in gives_up (now and then), but keeps"),
    gives_up={"replicas_agree": "now and then"},
)
def keeps_what_it_gives_up(_, grads, slot, update):
    return grads, slot


def copies(_: Any, state: af.TrainState) -> dict[str, torch.Tensor]:
    """Return a slot of parameters."""
    return {name: param.clone() for name, param in state.params.items()}


class Noted(dict):
    """A dict with an attribute, which no checkpoint holds."""

    count = 0


@planted("grads", "forks_apart", "", init=lambda _, state: Noted(a=torch.zeros(1)))
def loses_its_slot(_, grads, slot, update):
    after = Noted(slot)
    after.count = getattr(slot, "count", 0) + 1
    return grads.map(lambda g: g / after.count), after


_by_step: dict[tuple[int, ...], Any] = {}


@planted("grads", "forks_apart", "")
def remembers_by_step(_, grads, slot, update):
    """Keep the last gradients where a run from the start finds its own."""
    place = (update.world.size, update.world.rank, update.state.step)
    last = _by_step.get((*place[:2], update.state.step - 1), grads.tensors)
    _by_step[place] = grads.map(torch.clone).tensors
    moved = {n: g + last[n] / 2 for n, g in grads.tensors.items()}
    return grads.with_tensors(moved), slot


@planted("init", "resumes", "")
def cannot_be_saved(_, state):
    return {"generator": torch.Generator()}


_first: dict[str, float] = {}


@planted("grads", "new_process", "a run that continues in a new process, and the")
def latches_the_first(_, grads, slot, update):
    first = _first.setdefault("norm", float(norm_of(grads.tensors.values())))
    return grads.map(lambda g: g / first), slot


@planted(
    "grads", "drops_nothing", ".grads returns no gradient for 'head.bias', so this"
)
def drops_a_gradient(_, grads, slot, update):
    kept = {n: g for n, g in grads.tensors.items() if n != "head.bias"}
    return grads.with_tensors(kept), slot


@planted(
    *("eval_params", "drops_nothing"),
    ".eval_params does not return the parameter 'head.bias'.",
)
def evaluates_less(_, params, slot, update):
    return {n: p for n, p in params.items() if n != "head.bias"}, slot


@planted("after_update", "drops_nothing", "changes state.step. Only the step may")
def counts_twice(_, state, slot, update):
    return attrs.evolve(state, step=state.step + 1), slot


def follow(_: Any, state: af.TrainState, slot: Any, update: af.Update) -> Any:
    for name, param in state.params.items():
        slot[name].lerp_(param, 0.5)
    return state, slot


@planted(
    *("eval_params", "evaluates_purely", "Return new tensors from eval_params."),
    init=copies,
    after_update=follow,
)
def fades_as_it_is_evaluated(_, params, slot, update):
    for average in slot.values():
        average.mul_(0.75)
    return slot, slot


@planted(
    *("hyper", "evaluates_purely", "Change nothing in hyper: state.lrs"),
    init=lambda _, state: {"asked": torch.zeros(())},
    tells={"sees_skips": True},
)
def counts_looks(_, hyper, slot, update):
    slot["asked"].add_(1)
    return {"lr": 0.1 * 0.9 ** float(slot["asked"])}, slot


@planted(
    "finalize", "owes_once", "the states after one and after two calls of finalize"
)
def halves_at_the_end(_, state, slot, update):
    return state.with_params({n: p / 2 for n, p in state.params.items()}), slot


def averaged(state: af.TrainState) -> af.TrainState:
    return state.with_params(af.all_reduce(state.params, state.world, "mean"))


@planted(
    *("after_update", "owes_once", "and of another rank after finalize"),
    gives_up={"replicas_agree": "between averages"},
    reduce=None,
    finalize=lambda _, state, slot, update: (
        averaged(state) if state.step % 2 else state,
        slot,
    ),
)
def averages_too_early(_, state, slot, update):
    """Average by the count before the update, and believe at the end that it did after."""
    return averaged(state) if update.state.step % 2 == 0 else state, slot


@planted("hyper", "groups_apart", "")
def rate_of_the_first_group(_, hyper, slot, update):
    return {"lr": hyper.get((0, "lr"), 0.1) / 2}, slot


@planted("eval_params", "takes_what_it_is_given", "")
def evaluates_the_state(_, params, slot, update):
    return {n: p / 2 for n, p in update.state.params.items()}, slot


@planted("grads", "takes_what_it_is_given", "")
def halves_the_first_grads(_, grads, slot, update):
    return update.grads.map(lambda g: g / 2), slot


@planted("data", "splits_alike", "the same run on 2 ranks with their shares, differ")
def one_share_for_all(_, plan):
    return attrs.evolve(plan, rank=0)


@planted("value_and_grad", "splits_alike", "2 ranks in two micro-batches, differ after")
def clips_by_its_part(_, inner, slot, update):
    def clipped(state, batch, *extras, **how):
        metrics, grads = inner(state, batch, *extras, **how)
        norm = norm_of(grads.tensors.values())
        return metrics, grads.map(lambda g: g * (0.5 / norm).clamp(max=1.0))

    return clipped, slot


PLANTED.append((*PLANTED[-1][:2], 'refuses = {"micro_batches": "..."}.'))


@planted("grads", "splits_alike", "the same run on 2 ranks under wrap_fsdp, ")
def norm_of_its_rows(_, grads, slot, update):
    rows = [getattr(g, "_local_tensor", g) for g in grads.tensors.values()]
    return grads.map(lambda g: g * float((0.5 / norm_of(rows)).clamp(max=1.0))), slot


@planted("grads", "splits_alike", "tensor.norm().full_tensor(), or")
def numbers_of_norms(_, grads, slot, update):
    return grads.map(lambda g: g / (1 + float(g.norm()))), slot


_norms: dict[str, torch.Tensor] = {}


@planted("grads", "splits_alike", "in another thread: simulated")
def shares_norms(_, grads, slot, update):
    """Keep norms where all ranks find them; those of split parameters are DTensors."""
    for name, grad in grads.tensors.items():
        if name not in _norms or update.num_tried % 4 == 0:
            _norms[name] = grad.norm().detach()
    shares = {n: g / (1 + _norms[n]) for n, g in grads.tensors.items()}
    return grads.with_tensors(shares), slot


VOTE = {"reduces_to_mean": "a vote"}


@planted(*("reduce", "trains", "no parameter changed in updates 2 to 4"), gives_up=VOTE)
def votes_for_nothing(_, grads, slot, update):
    return grads.with_sums(grads.map(torch.zeros_like).tensors, 1), slot


@planted(
    *("reduce", "splits_alike", "2 ranks that all take the same samples"), gives_up=VOTE
)
def votes_by_ranks(_, grads, slot, update):
    """Divide a vote by the number of ranks, once too often."""
    votes = af.all_reduce(grads.map(torch.sign).tensors, update.world, "mean")
    return grads.with_sums(votes, update.world.size), slot


@planted(
    *("reduce", "sends_all_later", "over 201 updates, the sum of reduce's results"),
    gives_up=VOTE,
)
def forgets_the_rest(_, grads, slot, update):
    """Send half of each gradient's numbers, and forget the others."""
    grads = grads.map(lambda g: g * (g.abs() >= g.abs().median()))
    given = grads.tensors, weight_of(grads, update.world)
    return grads.with_sums(*af.all_reduce(given, update.world)), slot


PLANTED += [
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
    (Later(by_new=False), "splits_alike", "divide it by world.size"),
]


OWES = {
    "tells": {"by_rank": ("owed",)},
    "init": lambda _, state: {"owed": torch.zeros(())},
    "after_update": lambda _, state, slot, update: (
        state,
        {"owed": slot["owed"] + 1 + state.world.rank},
    ),
}


@planted("merge", "loads_anywhere", "", **OWES)
def merges_one(_, slots, world):
    return [1.0], slots[0]


@planted("merge", "loads_anywhere", "KeyError", **OWES)
def cannot_merge(_, slots, world):
    raise KeyError(slots)


@planted("merge", "merges_all", "does not use rank 1's value of 'owed'", **OWES)
def merges_the_first(_, slots, world):
    return [1.0] * len(slots), slots[0]


@planted(*("merge", "merges_all", "merge changes its own result: it merged 2"), **OWES)
def merges_sums(_, slots, world):
    return [1.0] * len(slots), {"owed": sum(slot["owed"] for slot in slots)}


RANKS = {"init": lambda _, state: {"ranks": torch.tensor(state.world.size)}}


@planted(
    *("after_update", "loads_anywhere"),
    "loaded with 1 ranks, the run raised ValueError: fewer",
    **RANKS,
)
def not_on_fewer(_, state, slot, update):
    if state.world.size < slot["ranks"]:
        raise ValueError("fewer")
    return state, slot


@planted(
    *("after_update", "loads_anywhere"),
    "loaded with 3 ranks, the run raised ValueError: more",
    **RANKS,
)
def not_on_more(_, state, slot, update):
    if state.world.size > slot["ranks"]:
        raise ValueError("more")
    return state, slot


@planted(
    *("value_and_grad", "passes_on"),
    "gradients of earlier micro-batches were lost. Pass into=",
)
def adds_to_nothing(_, inner, slot, update):
    def anew(state, batch, *extras, sync=True, **_):
        return inner(state, batch, *extras, sync=sync)

    return anew, slot


@planted(
    *("value_and_grad", "passes_on"),
    "communicated in every micro-batch. Pass sync= to",
)
def always_talks(_, inner, slot, update):
    def talking(state, batch, *extras, into=None, **_):
        return inner(state, batch, *extras, into=into)

    return talking, slot


@planted("loss", "passes_on", "must accept the arguments (model, batch, *extras)")
def takes_no_extras(_, loss_fn, slot, update):
    return (lambda model, batch: 1 * loss_fn(model, batch)), slot


@planted("loss", "passes_on", "the loss did not get the step's extras. Pass *extras")
def loses_extras(_, loss_fn, slot, update):
    return (lambda model, batch, *_: loss_fn(model, batch)), slot


@planted(
    *("grads", "skips_whole", "['seen']: 1.0 and 2.0, difference 1"),
    init=lambda _, state: {"seen": torch.zeros(())},
)
def moves_at_once(_, grads, slot, update):
    """Write into its slot before it is known whether the update is skipped."""
    slot["seen"].add_(1)
    return grads.map(lambda g: g / (1 + slot["seen"])), slot


@planted(
    *("after_update", "skips_whole", "In after_update, check update.skipped."),
    init=lambda _, state: {"skips": 0},
    tells={"sees_skips": True},
)
def moves_when_skipped(_, state, slot, update):
    if update.num_tried == (4 if update.skipped else 2):
        for name in state.trainable:
            state.params[name].mul_(0.75)
    return state, {"skips": slot["skips"] + update.skipped}


@planted("after_update", "keeps_frozen", "frozen: 3 of 3 elements differ, the first at")
def decays_all(_, state, slot, update):
    return state.with_params({n: p / 2 for n, p in state.params.items()}), slot


@af.transform
class Sets:
    """Leaves another setting to all."""

    put: Callable[[Any], None]
    value: Any

    def hyper(self, hyper, slot, update):
        self.put(self.value)
        return {"lr": 0.1}, slot


def of_products(precision: str) -> None:
    """Set it by the newer of torch's ways; the older then refuses to say what it is."""
    torch.backends.cuda.matmul.fp32_precision = precision


SETTINGS = [
    (of_products, "tf32", ""),
    (torch.set_default_dtype, torch.float64, ""),
    (torch.set_num_threads, 3, "to 3 for the whole process."),
    (torch.use_deterministic_algorithms, True, ""),
]
PLANTED += [
    (Sets(put, value=value), "leaves_settings", words) for put, value, words in SETTINGS
]


@af.transform
class OpenOption:
    """Has an option that is no value, and one that is not read."""

    names: Any = None
    averaged_every: int = 2

    def grads(self, grads, slot, update):
        return grads.map(lambda g: g / 2), slot


PLANTED.append((OpenOption(["a"]), "value", "). Use hashable options, such as a tuple"))
PLANTED.append((OpenOption(), "options_read", "no code reads OpenOption()."))


LATE = {"splits_alike", "new_process", "sends_all_later", "merges_all"}
LATE |= {"loads_anywhere", "options_read", "leaves_settings"}
"""Laws that are checked after others, in many runs."""
NEEDED = {
    "DecaysBuffers": Problem(norm=True),
    "RateOfTheFirstGroup": Problem(grouped=True),
}
"""Problems that have what a bug is about, by its name."""


@pytest.mark.parametrize(
    ("planted", "law", "words"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row[1] in LATE))
        for row in PLANTED
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_planted_bugs_are_refused_by_their_law(planted, law, words, monkeypatch):
    """The error has the law, the transform, and what was done or what to do instead.

    Nothing hangs.
    """
    name = type(planted).__name__
    if name == "NeedsTheRank":  # so that the plain run can begin
        monkeypatch.setenv("WORLD_SIZE", "1")
    problem = NEEDED.get(name, Problem())
    faulthandler.dump_traceback_later(300, exit=True)
    with pytest.raises(LawError) as caught:
        check_transform(planted, sizes=(2,), problems=(problem,), updates=4)
    faulthandler.cancel_dump_traceback_later()
    for each in (repr(law), repr(planted), words):
        assert each in str(caught.value)


def test_a_program_may_have_settings_of_its_own():
    """Of which no rank is said to have set what another found."""
    for put, value, _ in SETTINGS:
        put(value)
    check_transform(af.identity(), **ONE)


# When a method acts


@af.transform
class DriftsAtLast:
    """Moves the parameters by the rank, every so many updates."""

    every: int

    def after_update(self, state, slot, update):
        if state.step % self.every == 0:
            moved = {n: p + state.world.rank for n, p in state.params.items()}
            state = state.with_params(moved)
        return state, slot


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


@pytest.mark.parametrize(
    "late",
    [
        *(DriftsAtLast(32), DriftsAfterwards(7)),
        af.chain(af.clip_grad_norm(0.5), DriftsAtLast(1)),
    ],
    ids=repr,
)
def test_what_happens_late_is_seen(late):
    """D: updates are taken until each method has acted, and one more; of a chain, of all."""
    with pytest.raises(LawError, match="'replicas_agree'"):
        check_transform(late, **ONE)


def test_an_average_is_seen(monkeypatch):
    """D: `local_sgd(8)` is checked through an average, and with an update owed at the end."""
    seen: list[int] = []
    plain = af.local_sgd.finalize

    def finalize(self, state, slot, update):
        seen.append(state.step)
        return plain(self, state, slot, update)

    monkeypatch.setattr(af.local_sgd, "finalize", finalize)
    check_transform(af.local_sgd(sync_every=8), **ONE)
    assert {8, 9} <= set(seen)


def test_what_never_acts_is_named():
    """D: a method that changed nothing in all updates is named, with what to write."""
    late = DriftsAtLast(40)
    named = r"'acts'.*DriftsAtLast\(40\).after_update"
    with pytest.raises(LawError, match=named) as caught:
        check_transform(late, **ONE)
    assert "in 33 updates" in str(caught.value)
    assert "updates=" in str(caught.value)
    with pytest.raises(LawError, match="in 3 updates"):
        check_transform(DriftsAtLast(4), **ONE, updates=3)
    with pytest.raises(LawError, match="'acts'"):
        check_transform(af.clip_grad_value(float("inf")), **ONE)
    with pytest.raises(ArgumentError, match="updates=0"):
        check_transform(late, updates=0)


def _same(_self: Any, value: Any, *given: Any) -> Any:
    return (value, given[0]) if given else value


FIELDS = ("data", "loss", "value_and_grad", "grads", "hyper", "after_update")


@pytest.mark.slow
@pytest.mark.parametrize("field", [*FIELDS, "eval_params"])
def test_a_method_that_does_nothing_is_told(field):
    """Whatever field it is: what gives back what it was given has shown nothing of itself."""
    idle = af.transform(type("Idle", (), {field: _same}))()
    with pytest.raises(LawError, match=rf"'acts'.*Idle\(\).{field} changed nothing"):
        check_transform(idle, **ONE, updates=4)


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
        return averaged(state) if slot["seen"] % self.every == 0 else state, slot


@pytest.mark.parametrize(("every", "when"), [(1, {1, 2, 3}), (2, {2}), (8, None)])
def test_to_count_until_ranks_meet_is_not_to_act(every, when):
    """Where ranks train apart, a slot that fills is not yet what the method is there for."""
    found: dict[str, set[int]] = {}
    members = (af.shard_data(), AveragesEvery(every))
    subject = Subject(
        name="a run",
        size=2,
        updates=3,
        begin=Problem().state,
        advance=lambda state, _, number: Problem().updates(state, number),
        members=members,
        setup=af.chain(*members),
    )
    observe_acts(found, subject)
    assert found.get(f"AveragesEvery({every}).after_update") == when


# A7: what takes the place of `wrap_ddp` gives the mean over all ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "sizes"), [(SumAll(), (1, 4)), (HalfPrecision(), (2,))], ids=repr
)
def test_a_users_reduce_keeps_the_laws(kept, sizes):
    """One that is written with public names only passes as `wrap_ddp` does."""
    check_transform(kept, sizes=sizes, problems=(Problem(weighted=True),))


def test_what_leaves_something_for_later_says_so():
    """Error feedback gives up that each update's mean is near, and no more: see `Later`."""
    with pytest.raises(LawError, match="'reduces_to_mean'"):
        check_transform(ErrorFeedback(), **ONE)


def the_first_twice(grads, world, *_):
    times = 2 if world.is_main else 1
    given = grads.map(lambda g: g * times).tensors, weight_of(grads, world) * times
    return af.all_reduce(given, world)


def from_this_rank_on(grads, world, _, weight):
    """Add up in an order that differs by rank, and so in the last bits."""
    sums = {}
    for name, grad in grads.tensors.items():
        first, *others = af.all_gather(grad[None], world).roll(-world.rank, 0)
        sums[name] = sum(others, first)
    return sums, weight


BIAS = "head.bias"
SUMS: dict[str, Callable[..., Any]] = {
    "a rank's own parameter": lambda grads, _, sums, weight: (
        {**sums, BIAS: grads.tensors[BIAS]},
        weight,
    ),
    "without a parameter": lambda grads, _, sums, weight: (
        {n: s for n, s in sums.items() if n != BIAS},
        weight,
    ),
    "the first twice": the_first_twice,
    "from this rank on": from_this_rank_on,
}


@af.transform
class Reduces:
    """Makes of gradients and their right sums what a function says."""

    sums: str

    def reduce(self, grads, slot, update):
        world = update.world
        right = af.all_reduce((grads.tensors, weight_of(grads, world)), world)
        return grads.with_sums(*SUMS[self.sums](grads, world, *right)), slot


@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
@pytest.mark.parametrize("sums", SUMS)
def test_a_wrong_sum_is_refused(sums, problem):
    """Whoever forgets a rank, a weight, a parameter or the order is told, by any problem."""
    with pytest.raises((LawError, ReplicaMismatchError, GradsError)):
        check_transform(Reduces(sums), sizes=(4,), problems=(problem,))


def test_what_is_no_transform_is_refused():
    """Nor may one give up a law that there is not."""
    with pytest.raises(ArgumentError, match="expected a transform"):
        check_transform(lambda state: state)
    body = {"gives_up": {"gravity": "at times"}, "grads": _same}
    with pytest.raises(ArgumentError, match="gravity"):
        check_transform(af.transform(type("Odd", (), body))())
