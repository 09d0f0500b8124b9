# SPDX-License-Identifier: Apache-2.0
"""A call that is broken off, wherever it calls others' code, leaves nothing half done."""

import functools
import gc
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import Crash, simulate
from tests.laws.broken_calls import (
    CALLS,
    OPTIMIZERS,
    OVER_RANKS,
    SETUPS,
    STEPS,
    TOGETHER,
    Scene,
    created,
    finalize,
    follow,
    load,
    mean_loss,
    save,
    told,
    tree,
    with_world,
)
from tests.laws.broken_off import (
    KINDS,
    Breaking,
    Place,
    around,
    causes,
    is_told,
    left_behind,
    threads,
)
from tests.laws.elastic import Training
from tests.states import bits, values

WRITES = {"save", "export", "stored", "stored_behind"}
"""Calls of which a folder has nothing, or all."""
DEAR = {
    *("memory_estimate", "find_batch_size", "run", "stored", "stored_behind"),
    *("placed", "read_ahead"),
}
"""Calls that take a hundredth of a second or more."""
NOT_OF = {"in backward": {"gradients", "more_gradients", "older_gradients", "apply"}}
"""What a setup refuses."""
NEEDS = {"observe": "in halves"}


def setups_of(call: str) -> list[str]:
    """Return the setups in which a call has a meaning."""
    found = [NEEDS[call]] if call in NEEDS else [*SETUPS]
    return [each for each in found if call not in NOT_OF.get(each, ())]


@attrs.frozen(kw_only=True)
class Case:
    """A call in a setup, and how it is broken off.

    Attributes:
        places: how many are tried, of those where the call may be broken off.
        first: which is the first of them, as a part of all.
        behind: whether they are of threads that the call starts, and not of its own.
        which: which of the calls that one place makes, as a part of them.
    """

    call: str
    setup: str
    optimizer: str
    loss: Any
    updates: int
    kind: str
    under: Any
    by_one: bool
    behind: bool = False
    places: int
    first: float
    which: float

    def state(self) -> af.TrainState:
        """Return a state whose engine is there."""
        state = created(self.setup, self.optimizer, by_one=self.by_one)
        for batch, _ in zip(af.batches(state), range(self.updates), strict=False):
            state, _ = STEPS[self.loss](state, batch)
        return state

    def problems(self, folder: Path) -> list[str]:
        """Return what is wrong after the call was broken off, at each of its places."""
        made = itertools.count()

        def act(scene: Scene) -> Any:
            with self.under():
                return CALLS[self.call](scene)

        def scene(state: af.TrainState) -> Scene:
            own = folder / str(next(made))
            own.mkdir()
            return Scene(state.copy(), self.loss, own, optimizer=self.optimizer)

        twin, first = self.state(), self.state()
        at_once = scene(twin)
        expected, whole = told(act(at_once)), tree(at_once.folder)
        went_on = follow(twin, self.loss)
        told(act(scene(first)))  # what is made once is there
        counted_in = scene(first)
        kind = KINDS[self.kind]
        with Breaking(kind=kind, behind=self.behind) as counted:
            act(counted_in)
        found: list[str] = []
        for place in self._chosen([*counted.counts]):
            number = int(self.which * counted.counts[place])
            breaking = Breaking(place, number, kind, behind=self.behind)
            hit = scene(first)
            problems = self._broken(breaking, hit, went_on)
            left = tree(hit.folder)
            if self.kind == "KeyboardInterrupt":  # the next save removes what it began
                left = {n: each for n, each in left.items() if ".tmp-" not in n}
            if self.call in WRITES and left not in ({}, whole):
                problems.append(f"files are left: {[*left]}")
            if told(act(scene(first))) != expected:
                problems.append("another call gives something else")
            file, line, name = place
            where = f"{file.rpartition('accelfn/')[2]}:{line} {name}"
            found += [f"{where}: {each}" for each in problems]
        return found

    def _chosen(self, places: list[Place]) -> list[Place]:
        """Return some places, as far apart as can be."""
        stride = max(1, len(places) // self.places)
        start = int(self.first * len(places))
        turned = places[start:] + places[:start]
        return turned[::stride][: self.places]

    def _broken(self, breaking: Breaking, scene: Scene, went_on: Any) -> list[str]:
        """Return what is wrong after a call, but for what was not called at all."""
        state, found = scene.state, list[str]()
        before, held, net = values(state), Held(state), looks(scene.net)
        with self.under():
            found += self._left_by(breaking, scene)
        torch.set_grad_enabled(mode=True)  # or all that follows is wrong
        if self.call != "import_onto" and looks(scene.net) != net:
            found.append("the model is another")
        if not state.lease.is_over:
            if values(state) != before:
                found.append("the state is another")
            elif follow(state, self.loss) != went_on:
                found.append("the state goes on otherwise")
        elif self.call != "finalize" and not held.has_changed():
            found.append("the state is over, and nothing was changed")
        return found

    def _left_by(self, breaking: Breaking, scene: Scene) -> list[str]:
        """Break the call off; return what of the process is not as it was."""
        there, was, found, error = threads(), around(), list[str](), None
        try:
            with breaking:
                CALLS[self.call](scene)
        except BaseException as caught:  # noqa: BLE001 - it is judged
            error = caught
        if breaking.raised is not None and not is_told(breaking.raised, error):
            found.append(f"nobody heard of it, but of {error!r}")
        error = breaking.raised = None  # with the frames that they hold
        return found + [f"left behind: {each}" for each in left_behind(was, there)]


def looks(net: nn.Module) -> Any:
    """Return what a model is: its values, where they are, and its hooks."""
    hooks = [
        [repr(each._forward_pre_hooks), repr(each._forward_hooks), sorted(vars(each))]
        for each in net.modules()
    ]
    where = [(id(each), each.device) for each in net.parameters()]
    return bits(net.state_dict()), where, hooks


class Held:
    """What a state has, to be looked at when it is over."""

    def __init__(self, state: af.TrainState) -> None:
        fields = ("params", "buffers", "opt_state", "slots")
        # not what is shown of it, which is refused when it is over
        self._fields = [dict(getattr(state, each)) for each in fields]
        self._before = self._bits()

    def has_changed(self) -> bool:
        return self._bits() != self._before

    def _bits(self) -> Any:
        return [bits(each) for each in self._fields]


@contextmanager
def lent() -> Iterator[Path]:
    """Lend a folder; and one for temporary files, in which no other process writes."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("own", "temporary"):
            (Path(folder) / name).mkdir()
        patch.setattr(tempfile, "tempdir", f"{folder}/temporary")
        yield Path(folder) / "own"


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no garbage be collected: what breaks off in a callback of that, nobody hears of."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# between the opening of a file and the block that closes it: it is closed with its last reference
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

PARTS = st.floats(0, 1, exclude_max=True)


DRAWN = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "loss": st.sampled_from([*STEPS]),
        "updates": st.integers(0, 2),
        "kind": st.sampled_from(sorted(KINDS)),
        "under": st.sampled_from([torch.no_grad, nullcontext]),
        "by_one": st.booleans(),
        "first": PARTS,
        "which": PARTS,
    }
)


UPDATING = (
    *("step", "step_on_a_copy", "gradients", "more_gradients", "older_gradients"),
    *("apply", "finalize", "batches"),
)


ONE = {
    "optimizer": "momentum",
    "loss": mean_loss,
    "updates": 1,
    "kind": "KeyboardInterrupt",
    "under": nullcontext,
    "by_one": False,
    "first": 0.0,
    "which": 0.0,
}


@pytest.mark.parametrize("call", UPDATING)
@given(setup=st.integers(0, len(SETUPS) - 1), drawn=DRAWN)
@example(setup=[*SETUPS].index("in backward"), drawn=ONE)
def test_an_update_that_is_broken_off_was_not_begun_or_says_so(call, setup, drawn):
    """Its state is as before and goes on so, in the same engine, or was changed and is over."""
    check(call, setup, drawn, places=60)


@pytest.mark.slow
@pytest.mark.parametrize("call", sorted(CALLS.keys() - UPDATING))
@given(setup=st.integers(0, len(SETUPS) - 1), drawn=DRAWN)
def test_what_is_broken_off_leaves_nothing_half_done(call, setup, drawn):
    """What is of the process is as before, the state too; made again, the call is made whole."""
    check(call, setup, drawn, places=1 if call in DEAR else 8)


@given(setup=st.integers(0, len(SETUPS) - 1), drawn=DRAWN)
def test_a_save_that_is_broken_off_behind_the_training_says_so(setup, drawn):
    """In the thread that writes: whoever waits has the error, and nothing is half there."""
    check("stored_behind", setup, {**drawn, "behind": True}, places=2)


def check(call: str, setup: int, drawn: dict[str, Any], *, places: int) -> None:
    setups = setups_of(call)
    case = Case(call=call, setup=setups[setup % len(setups)], places=places, **drawn)
    with lent() as folder, uncollected():
        assert case.problems(folder) == []


# Over ranks

Meeting = tuple[Counter[Place], list[Any]]


@attrs.frozen
class Attempt:
    """A call that is broken off on one of two ranks, and how it ended on each."""

    hit: int
    breaking: Breaking = attrs.field(factory=Breaking)
    ended: dict[int, str] = attrs.field(factory=dict)

    def make(self, state: af.TrainState, act: Callable[[], Any], *, changes: bool):
        """Make the call on a rank; a state that it leaves is as before, or was changed."""
        rank, before, held = state.world.rank, values(state), Held(state)
        try:
            with self.breaking if rank == self.hit else nullcontext():
                found = act()
        except BaseException as error:
            is_it = self.breaking.raised in causes(error)
            self.ended[rank] = "broken off" if is_it else str(error)
            if not state.lease.is_over:
                assert values(state) == before
            elif changes:
                assert held.has_changed()
            raise
        self.ended[rank] = "done"
        return found


def meet(setup: str, act: Callable[[Scene], Any], broken: Attempt) -> list[Any]:
    """Let two ranks make a call."""

    def on_rank(world: af.World) -> Any:
        state, steps = created(setup, "momentum", world), STEPS[mean_loss]
        state, _ = steps(state, next(iter(af.batches(state))))
        scene = Scene(state, mean_loss, folder)
        if act is load:
            af.save(state, folder.parent / "kept" / "saved")
        changes = act is not finalize
        return broken.make(state, lambda: told(act(scene)), changes=changes)

    with lent() as folder, torch.random.fork_rng():
        (folder.parent / "kept").mkdir()
        return list(simulate(2, on_rank).results)


GO_ON = {"ddp": af.wrap_ddp(), "apart": af.local_sgd(sync_every=1)}


def go_on(setup: str, broken: Attempt) -> list[Any]:
    """Let two of three ranks go on without the third."""
    training = Training(setup=GO_ON[setup], every=1, updates=3, optimizer="momentum")

    def on_rank(world: af.World) -> Any:
        state = training.train(training.state(world), 1)
        with pytest.raises(af.errors.PeerFailedError):
            training.train(state.copy(), 2)
        state = broken.make(state, lambda: af.regroup(state), changes=False)
        return values(training.train(state, 1))

    with torch.random.fork_rng():
        return list(simulate(3, on_rank, faults=[Crash(2, step=1)], elastic=2))


@functools.cache
def undisturbed(act: Callable[..., list[Any]], hit: int, *args: Any) -> Meeting:
    """Return the places of a call on a rank, and what it gives on both."""
    act(*args, Attempt(hit))  # what is made once is there
    counted = Breaking(but="testing")
    return counted.counts, act(*args, Attempt(hit, counted))


def check_told(act: Callable[[Attempt], Any], broken: Attempt) -> Any:
    """Break a call off; return what it gave all ranks if none heard of it."""
    hit, found, error = broken.hit, None, None
    there, was = threads(), around()
    try:
        found = act(broken)
    except BaseException as caught:  # noqa: BLE001 - it is judged
        error = caught
    if error is not None:
        notes = "\n".join(getattr(error, "__notes__", []))
        assert f"rank {hit}" in f"{error} {notes}".lower()
        assert broken.ended[hit] == "broken off"
        other = broken.ended.get(1 - hit, "done")
        assert other == "done" or f"rank {hit}" in other.lower()
    error = broken.breaking.raised = None
    assert left_behind(was, there) == []
    return found


@given(
    setup=st.sampled_from(sorted(OVER_RANKS)),
    act=st.sampled_from(TOGETHER),
    hit=st.integers(0, 1),
    kind=st.sampled_from(sorted(KINDS)),
    place=PARTS,
    which=PARTS,
)
@example(setup="apart", act=save, hit=1, kind="Broken", place=0.75, which=0.0)
@example(setup="parts", act=with_world, hit=1, kind="Broken", place=0.82, which=0.0)
def test_what_is_broken_off_on_a_rank_is_told_to_the_other(
    setup: str, act: Any, hit: int, kind: str, place: float, which: float
) -> None:
    """All ranks end; the other has made the call, or its error names the rank that did not.

    Each has its state as before, or one that is over for it was changed; the process is as
    before, and so is what other ranks do in it.
    """
    with lent():
        counts, expected = undisturbed(meet, hit, setup, act)
        assume(counts)  # a call may have nothing to do
        at = [*counts][int(place * len(counts))]
        breaking = Breaking(at, int(which * counts[at]), KINDS[kind], but="testing")
        found = check_told(functools.partial(meet, setup, act), Attempt(hit, breaking))
        assert found in (None, expected)  # it was about what is only looked at
        assert meet(setup, act, Attempt(hit)) == expected


@given(
    setup=st.sampled_from(sorted(GO_ON)),
    hit=st.integers(0, 1),
    kind=st.sampled_from(sorted(KINDS)),
    file=PARTS,
    line=PARTS,
    which=PARTS,
)
@example(setup="apart", hit=0, kind="Broken", file=0.216, line=0.216, which=0.82)
def test_ranks_that_go_on_are_told_who_does_not(setup, hit, kind, file, line, which):
    """Where a regroup is broken off on one, the other has gone on, or hears of that rank."""
    with lent():
        counts, expected = undisturbed(go_on, hit, setup)
        files = sorted({each[0] for each in counts})
        lines = [each for each in counts if each[0] == files[int(file * len(files))]]
        at = lines[int(line * len(lines))]
        breaking = Breaking(at, int(which * counts[at]), KINDS[kind], but="testing")
        broken = Attempt(hit, breaking)
        assert check_told(functools.partial(go_on, setup), broken) is None
        assert go_on(setup, Attempt(hit)) == expected
