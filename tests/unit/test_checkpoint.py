# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: bitwise, or refused with what differs."""

import errno
import fcntl
import itertools
import math
import os
import re
import shutil
import sys
import tempfile
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import (
    AccelfnWarning,
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    DataError,
    PlainDataError,
    WorldError,
)
from accelfn.testing import simulate
from tests.checkpoints import FILE, STEP, X, damage, fresh, made, net, refused
from tests.internals import background, codec, files, manifest
from tests.states import values


@pytest.fixture
def saved(tmp_path):
    """Return the directory of a saved state."""
    af.save(made(), tmp_path / "saved")
    return tmp_path / "saved"


def test_objects_with_a_state(tmp_path):
    """An object in a slot is saved by its state_dict(), and loaded into one of its kind."""

    def scheduler(updates):
        optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
        made = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(updates):
            optimizer.step()
            made.step()
        return made

    mine = {"of": [scheduler(3)], "keys": {1: "one", "two": 2}}
    af.save(made().with_slot("mine", mine), tmp_path / "saved")
    target = made().with_slot("mine", {"of": [scheduler(0)]})
    loaded = af.load(target, tmp_path / "saved").slots["mine"]
    assert loaded["of"][0].state_dict() == mine["of"][0].state_dict()
    assert loaded["keys"] == mine["keys"]
    assert target.slots["mine"]["of"][0].last_epoch == 0
    with refused(r"slots\.mine\.of\[0\].*with_slot"):
        af.load(made(), tmp_path / "saved")


def test_ranks_that_see_no_common_directory(tmp_path):
    """Ranks that name different directories are refused, and nothing is left."""

    def save(world):
        af.save(fresh(world=world), tmp_path / str(world.rank) / "saved")

    words = "rank 1 could not.*does not exist on this rank.*one directory"
    with refused(words, CheckpointWriteError):
        simulate(2, save)
    assert not list(tmp_path.rglob("*saved"))


@pytest.mark.parametrize("directory", [".", "..", "/"])
def test_directory_without_a_name(directory, tmp_path, monkeypatch):
    """A path that names no new directory is refused."""
    monkeypatch.chdir(tmp_path)
    with refused("directory"):
        af.save(made(), directory)
    assert list(tmp_path.iterdir()) == []


def test_relative_directory(tmp_path, monkeypatch):
    """A relative path, with parents to be made, is taken."""
    monkeypatch.chdir(tmp_path)
    af.save(made(), "runs/one")
    assert values(made()) == values(af.load(fresh(), "runs/one"))


# States that are saved together.


PAIR = {"actor": made(), "critic": made(seed=1)}


@pytest.fixture
def both(tmp_path):
    """Return the directory of two states that were saved together."""
    af.save(PAIR, tmp_path / "both")
    return tmp_path / "both"


TOGETHER = {
    "alone": lambda both: af.load(fresh(), both),
    "one": lambda both: af.load({"actor": fresh()}, both),
    "other names": lambda both: af.load({"actor": fresh(), "judge": fresh()}, both),
    "a part of it": lambda both: af.load(fresh(), both / "actor"),
    "fields": lambda both: af.load_part(fresh(), both, "params"),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_states_saved_together_are_loaded_together(both, case):
    """Another number or other names of states is an error with the code to write."""
    code = f'af.load({{"actor": ..., "critic": ...}}, {str(both)!r})'
    with refused("has states named actor, critic") as caught:
        TOGETHER[case](both)
    assert code in str(caught.value)
    assert f"af.load_part(state, {str(both / 'actor')!r}, only)" in str(caught.value)


def test_fields_of_one_of_several_states(both):
    """`load_part` takes the directory of one of them, as the error says."""
    found = af.load_part(fresh(), both / "critic", ["params", "buffers"]).state
    whole = af.load({"actor": fresh(), "critic": fresh()}, both)["critic"]
    for unit in ("params", "buffers"):
        assert values(whole)[unit] == values(found)[unit]


@pytest.mark.parametrize("gone", ["critic", "critic/manifest.json"])
def test_a_store_names_an_older_pair(tmp_path, gone):
    """Where a part of the newest pair is missing, the pair before it is named."""
    with af.CheckpointStore(tmp_path, async_=False) as store:
        store.save({n: attrs.evolve(state, step=1) for n, state in PAIR.items()})
        store.save(PAIR)
    path = tmp_path / "step-00000002" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with refused("critic", CheckpointCorruptError) as caught:
        store.restore({"actor": fresh(), "critic": fresh()})
    assert "step=1" in "".join(caught.value.__notes__)
    found = store.restore({"actor": fresh(), "critic": fresh()}, step=1)
    assert values(found["critic"])["params"] == values(PAIR["critic"])["params"]


def test_a_lone_state_is_loaded_alone(saved):
    """Several states by name are no way to load one that was saved alone."""
    code = re.escape(f"single state. Load it with af.load(state, {str(saved)!r}).")
    with refused(f"expected states named actor, but the checkpoint has a {code}"):
        af.load({"actor": fresh()}, saved)


CALLS_WITH_STATES = {
    "af.save": af.save,
    "af.load": af.load,
    "store.save": lambda states, path: af.CheckpointStore(path).save(states),
    "store.restore": lambda states, path: af.CheckpointStore(path).restore(states),
    "store.due": lambda states, path: af.CheckpointStore(path, every=1).due(states),
}


@pytest.mark.parametrize("call", CALLS_WITH_STATES)
def test_names_of_states_are_words(call, tmp_path):
    """They are directories' names; nothing else is taken, nor no state at all."""
    act, state, runs = CALLS_WITH_STATES[call], small(), tmp_path / "runs"
    names = "", "a/b", "..", "a.b", 3, None
    for states in (*({"actor": state, name: state} for name in names), {}):
        with refused(f"{call}.*not a valid name for a state", ArgumentError):
            act(states, runs)
    with refused(rf"{call}.*expected a TrainState", ArgumentError):
        act({"actor": state, "critic": net()}, runs)


@pytest.mark.parametrize("call", CALLS_WITH_STATES)
def test_states_of_several_worlds_are_rejected(call, tmp_path):
    """On every rank, before anything is written."""

    def fn(world):
        actor, critic = (
            fresh(setup=af.shard_data(), world=each)
            for each in (world, world.split(size=2))
        )
        states = {"actor": actor, "critic": critic}
        with refused(f"{call}.*actor, critic are in diff", WorldError):
            CALLS_WITH_STATES[call](states, tmp_path / "runs")

    simulate(4, fn)
    assert not list(tmp_path.glob("runs/step*")) + list(tmp_path.glob("runs/*.json"))


# Loading what does not fit.


def test_missing_directory(tmp_path):
    """A directory that is not there is named, and which checkpoints are beside it."""
    with refused(r"no such.*af\.save\(state, directory\)"):
        af.load(fresh(), tmp_path / "nowhere")
    for number in range(4):
        af.save(fresh(), tmp_path / f"update-{number}")
    with refused("Checkpoints next to it: update-0, .*-2, "):
        af.load(fresh(), tmp_path / "update-9")
    with refused("manifest.*Checkpoints in it: update-0"):
        af.load(fresh(), tmp_path)


@pytest.mark.parametrize("load", [af.load, partial(af.load_part, only=["params"])])
def test_directory_of_a_store(tmp_path, load):
    """Where a store's directory is given, its newest checkpoint is named, and the way to it."""
    state = fresh()
    with af.CheckpointStore(tmp_path) as store:
        store.save(state)
    with refused(r"a store of 1 .*step-00000000, or") as e:
        load(state, tmp_path)
    assert f"af.CheckpointStore({str(tmp_path)!r}).restore(state)" in str(e.value)


def stored(directory, *metrics, **options):
    """Save as often as there are metrics, to a store that keeps one checkpoint, or a best."""
    with af.CheckpointStore(directory, keep=1, async_=False, **options) as store:
        for step, numbers in enumerate(metrics):
            store.save(attrs.evolve(fresh(), step=step), metrics=numbers)
        return store.steps


def test_metric_of_keep_best_that_is_nowhere(tmp_path, capsys):
    """As a checkpoint is removed, one line names what was asked for, and what there is."""
    given = [{"accuracy": 1.0, "loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}]
    assert stored(tmp_path, *given, keep_best="acc") == (2,)
    (line,) = capsys.readouterr().err.splitlines()
    assert "keep_best='acc' keeps no checkpoint" in line
    assert line.endswith("passed to save: accuracy, loss.")


def test_metric_of_keep_best_that_is_somewhere(tmp_path, capsys):
    """Where a checkpoint has it, or none is removed, there is nothing to say."""
    # it is measured more rarely than saved; it is no number; nothing is removed
    for at, losses in enumerate(([1.0, None, None], [math.nan, None], [None])):
        given = [None if each is None else {"acc": each} for each in losses]
        stored(tmp_path / str(at), *given, keep_best="acc")
    assert capsys.readouterr().err == ""


def test_nothing_older_is_removed_for_a_save_that_is_not_read_back(
    tmp_path, monkeypatch
):
    """One that the disk has changed meanwhile is none: the error is told, and the older stays."""
    stored(tmp_path, None)
    rename, new = files.rename, tmp_path / "step-00000001"

    def damaging(path, to):
        rename(path, to)
        if to == new:
            damage(new / FILE)

    monkeypatch.setattr(files, "rename", damaging)
    with af.CheckpointStore(tmp_path, keep=1, async_=False) as store:
        with refused("rank-00000", CheckpointWriteError):
            store.save(attrs.evolve(fresh(), step=1))
        assert store.steps == (0,)
        assert store.restore(fresh()).step == 0


def test_a_store_that_cannot_be_looked_through(tmp_path, monkeypatch):
    """Where rank 0 is not let in, all ranks are told so, and none goes on from the start."""
    stored(tmp_path, None)
    reason = os.strerror(errno.EACCES)
    closed = PermissionError(errno.EACCES, reason, str(tmp_path))
    monkeypatch.setattr(manifest, "steps_in", mock.Mock(side_effect=closed))
    said = rf"{re.escape(str(tmp_path))}: cannot find the newest checkpoint: .*{reason}"

    def restore(world):
        with refused(said):
            af.CheckpointStore(tmp_path).restore(small(world))

    simulate(2, restore)


@pytest.mark.parametrize("count", [10, 14])
@pytest.mark.parametrize("what", ["missing", "unexpected", "of another shape"])
def test_what_differs_often_is_counted(tmp_path, count, what):
    """Of many names the first ten are told, and how many more there are."""

    def having(count, width=1):
        layers = {f"layer_{at:02d}": torch.ones(width) for at in range(count)}
        return fresh(model=lambda: nn.ParameterDict(layers), setup=None)

    one, other = having(1), having(1 + count)
    if what == "of another shape":
        one, other = having(count, 2), having(count)
    saved, state = (one, other) if what == "missing" else (other, one)
    af.save(saved, tmp_path / "saved")
    with pytest.raises(CheckpointError) as caught:
        af.load(state, tmp_path / "saved")
    rows = [row.strip() for row in str(caught.value).splitlines()]
    assert len([row for row in rows if "layer_" in row]) == 10
    more = [f"and {count - 10} more"] if count > 10 else []
    assert [row for row in rows if row.startswith("and ")] == more


@af.transform
class Merging:
    """A transform that says what ranks trained apart come to, by a function of its own."""

    merging: Any

    def init(self, state):
        return {"rank": torch.tensor(float(state.world.rank))}

    def merge(self, slots, world):
        return self.merging(slots)


MERGES = [
    (lambda slots: slots[9], "could not merge the slots that .* saved: IndexError"),
    (lambda slots: ([1.0], slots[0]), "returned 1 weights for the slots of 2 ranks"),
    (lambda slots: ([0.5] * 3, slots[0]), "returned 3 weights for the slots of 2"),
]


@pytest.mark.parametrize(("merge", "said"), MERGES, ids=["raises", "few", "many"])
def test_a_merge_of_ones_own_that_fails_is_named(tmp_path, merge, said):
    """What it raised, or how many weights it gave and for how many ranks."""
    state = partial(fresh, setup=Merging(merge), data=None)
    simulate(2, lambda world: af.save(state(world=world), tmp_path / "saved"))
    with refused(f"(?i)merging.* {said}"):
        af.load(state(), tmp_path / "saved")


def test_a_checkpoint_in_which_there_is_a_store(tmp_path):
    """What is saved into a checkpoint's directory is no reason not to load that one."""
    af.save(made(), tmp_path / "saved")
    stored(tmp_path / "saved", None)
    assert values(af.load(fresh(), tmp_path / "saved")) == values(made())


@pytest.mark.parametrize("async_", [True, False])
def test_a_disk_without_locks_is_written_to(tmp_path, monkeypatch, async_):
    """Where no file can be held, a save is done as anywhere."""

    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    class Now(threading.Thread):
        def start(self):  # what is raised there is seen here
            self.run()

    class Done(threading.Event):
        def wait(self, timeout=None):  # and nothing is waited for that never comes
            assert self.is_set()
            return super().wait(timeout)

    monkeypatch.setattr(fcntl, "flock", flock)
    own = SimpleNamespace(Thread=Now, Lock=threading.Lock, Event=Done)
    monkeypatch.setattr(background, "threading", own)
    with af.CheckpointStore(tmp_path, async_=async_) as kept:
        kept.save(fresh())
        assert kept.restore(fresh(seed=3)).seed == fresh().seed
    assert kept.steps == (0,)


def test_what_ranks_of_a_copy_have_alike_is_written_once(tmp_path):
    """Of copies that differ, each one's first rank writes it, and all of them load it."""
    axes = {"dp_replicate": 2, "dp_shard": 2}

    def start(world):
        model = partial(nn.Linear, 3, 2)
        setup = af.chain(af.wrap_fsdp(), af.local_sgd(sync_every=2))
        return fresh(model=model, setup=setup, world=world, data=None)

    def save(world):
        own = {"copy": torch.tensor([world.rank // 2]), "all": torch.tensor([7])}
        own |= {"rank": torch.tensor([world.rank])}
        af.save(start(world).with_slot("mine", own), tmp_path / "saved")

    def load(world):
        loaded = af.load(start(world), tmp_path / "saved").slots["mine"]
        return {name: int(each) for name, each in loaded.items()}

    simulate(4, save, axes=axes)
    for rank, found in enumerate(simulate(4, load, axes=axes)):
        assert found == {"copy": rank // 2, "all": 7, "rank": rank}
    written = [
        safetensors.torch.load_file(tmp_path / "saved" / f"rank-{rank:05d}.safetensors")
        for rank in range(4)
    ]
    has = {
        name: [f"slots.mine.{name}" in each for each in written]
        for name in ("copy", "rank", "all")
    }
    assert has["copy"] == [True, False, True, False]
    assert has["rank"] == [True] * 4
    assert sum(has["all"]) == 1


def small(world=None):
    """Return a state that is soon saved."""
    return fresh(model=partial(nn.Linear, 3, 1), setup=None, world=world)


@pytest.mark.parametrize("every", [1, 3, timedelta(microseconds=1)])
def test_nothing_is_due_before_the_first_update(every, tmp_path):
    """What was drawn, or loaded from elsewhere, is not saved by a loop that asks first."""
    store = af.CheckpointStore(tmp_path, every=every)
    assert not store.due(small(af.World.single()))
    assert store.due(attrs.evolve(small(af.World.single()), step=3))


@given(
    waits=st.lists(st.sampled_from([0, 4, 6, 10, 25]), min_size=1, max_size=5),
    size=st.integers(1, 3),
)
def test_a_save_is_due_when_its_period_is_over(waits, size):
    """By `every=timedelta`: on all ranks or on none, however far their clocks are apart."""
    own = threading.local()
    clock = SimpleNamespace(monotonic=lambda: own.now)

    def train(world):
        own.now, last, first = 0.0, 0.0, small(world)
        store = af.CheckpointStore(root, every=timedelta(seconds=10), async_=False)
        with store:
            for step, waited in enumerate(waits, start=1):
                state = attrs.evolve(first, step=step)
                own.now += waited * (1 + world.rank)
                last += waited
                assert store.due(state) == (last >= 10)
                if store.due(state):
                    store.save(state)
                    last = 0.0

    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelfn.checkpoint.store.time", clock)
        simulate(size, train)


OTHERS = {
    "both": (
        {"model": lambda: net(5).double()},
        r"weight saved as \(4, 3\) torch.float32, expected \(5, 3\) torch.float64",
    ),
    "no ema": ({"setup": None}, r"not in this setup: 'ema'.*with_setup"),
    "another": (
        {"setup": af.chain(af.ema(0.9), af.ema(0.5, name="b"))},
        r"but not saved: 'b'",
    ),
    "SGD": ({"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}, "SGD"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_loading_into_another_state(saved, case):
    """Another model, setup or optimizer is refused with what differs."""
    options, words = OTHERS[case]
    with refused(words):
        af.load(fresh(**options), saved)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(X)


@pytest.mark.parametrize("sources", [(X, Stream()), (Stream(), X)])
def test_going_on_with_another_kind_of_data(tmp_path, sources):
    """A stream for what has a length, or the other way round: what one alone says is told."""
    options = {"global_batch_size": 3, "remainder": "drop", "fingerprint": "digits"}
    one, other = (fresh(data=af.Data(source, **options)) for source in sources)
    af.save(one, tmp_path / "it")
    with refused("was saved with other data") as raised:
        af.load(other, tmp_path / "it")
    told = [line.split(":")[0].strip() for line in str(raised.value).splitlines()[1:-1]]
    assert sorted(told) == ["order", "samples"]


def test_loading_without_data(saved):
    """A state that only evaluates needs none; a name that no fact has is refused."""
    assert af.load(fresh(data=None), saved).step == 2
    with refused("allow=", ArgumentError):
        af.load(fresh(), saved, allow=("size",))


class Noisy(list):
    def __getitem__(self, index):
        return X[index] + torch.randn(3)


class Counting(list):
    def __getitem__(self, index):
        return X[index], next(counter)


counter = itertools.count()


@pytest.mark.parametrize("kind", [Noisy, Counting])
def test_data_that_is_augmented_has_one_fingerprint(kind):
    """What draws is seeded, and what differs each time that it is read tells nothing."""
    one, other = (af.Data(kind(range(8)), global_batch_size=3).facts for _ in range(2))
    assert one == other
    named = af.Data(kind(range(8)), global_batch_size=3, fingerprint="noisy 1")
    assert named.facts["fingerprint"] == "noisy 1"


class Unreadable(list):
    """Rows of which one cannot be read, so many times."""

    def __init__(self, at, times):
        super().__init__(range(8))
        self.at, self.times = at, times

    def __getitem__(self, index):
        if index == self.at and self.times:
            self.times -= 1
            raise OSError("no such shard")
        return X[index]


@given(at=st.integers(0, 7), times=st.integers(1, 2))
def test_a_sample_that_cannot_be_read_is_told(tmp_path_factory, at, times):
    """A11: the save fails and names the sample; the next one knows all the data.

    Data with a name need not be read.
    """
    folder = tmp_path_factory.mktemp("unread") / "saved"
    data = partial(af.Data, global_batch_size=3)
    state = fresh(data=data(Unreadable(at, times)))
    words = rf"(?s)sample {at} .*OSError: no such shard.*fingerprint="
    for _ in range(times):
        with refused(words, CheckpointWriteError):
            af.save(state, folder)
    af.save(state, folder)
    assert af.load(fresh(data=data(Unreadable(at, 0))), folder).step == 0
    with refused(f"sample {at} of the dataset", DataError):
        _ = data(Unreadable(at, 9)).facts
    named = data(Unreadable(at, 9), fingerprint="crawl")
    assert named.facts["fingerprint"] == "crawl"


@pytest.mark.parametrize("layout", ["sparse", "meta"])
def test_a_sample_without_bytes_has_a_fingerprint(layout):
    """What has no bytes to hash tells nothing, and is no failure."""
    leaf = torch.eye(2).to_sparse() if layout == "sparse" else X[0].to("meta")
    data = partial(af.Data, [leaf, leaf, X[0]], global_batch_size=1)
    assert data().facts == data().facts


CALLS = {
    "af.save": partial(af.save, fresh()),
    "af.load": partial(af.load, fresh()),
    "af.CheckpointStore": af.CheckpointStore,
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_path_is_refused(call):
    """C: half a character, NUL, or another kind: named, before anything is done."""
    for path in ("\ud800", "runs/\udfff", "a\0b", 3, None, b"runs", ["runs"]):
        with refused(rf"{call}\(.*expected the path of a dir", ArgumentError):
            CALLS[call](path)


@pytest.mark.parametrize("size", [1, 2])
def test_a_path_of_other_bytes(tmp_path, size):
    """C: a name that is no UTF-8 is a name all the same, in errors too."""
    folder = tmp_path / os.fsdecode(b"runs-\xff")

    def train(world):
        state = fresh(world=world, setup=af.chain())
        af.save(state, folder / "saved")
        with refused(r"runs-\\udcff.*already exists", CheckpointWriteError):
            af.save(state, folder / "saved")
        with af.CheckpointStore(folder / "runs") as store:
            store.save(state)
        assert store.restore(state).step == af.load(state, folder / "saved").step

    simulate(size, train)


def test_metrics_of_a_save_are_numbers_by_name(tmp_path):
    """Texts, truths and names that are none are refused with what was given."""
    wrong = 3, {"a": "3"}, {"a": True}, {1: 2.0}, {"a": None}, [("a", 1.0)]
    with af.CheckpointStore(tmp_path) as store:
        for metrics in wrong:
            words = "metrics=.*expected a dict from names to numbers"
            with refused(words, ArgumentError):
                store.save(small(), metrics=metrics)


SPLIT = af.accumulate(num_micro_batches=2)
CLIPPED = af.clip_grad_norm(1.0)
CHANGES = {
    "an average": (af.ema(0.5), af.ema(0.9), r"ema: af\.ema\(0\.5\), now .*0\.9\)"),
    "a bound": (CLIPPED, af.clip_grad_norm(2.0), "now af.*2.0"),
    "a bound more": (None, CLIPPED, "clip_grad_norm: absent, now"),
    "a bound less": (CLIPPED, None, r"clip_grad_norm\(1\.0\), now absent"),
    "micro-batches": (SPLIT, af.accumulate(num_micro_batches=4), None),
    "no micro-batches": (SPLIT, None, None),
    "another layout": (af.wrap_ddp(), af.wrap_fsdp(), None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_options_of_transforms(case, tmp_path):
    """`load` warns of options that change an update, and not of those that divide its work."""
    before, after, words = CHANGES[case]
    af.save(fresh(setup=before), tmp_path / "saved")
    state = fresh(setup=after)
    if words:
        with pytest.warns(AccelfnWarning, match=words):
            af.load(state, tmp_path / "saved")
    af.load(state, tmp_path / "saved", allow="options" if words else ())


def test_entries_that_an_optimizer_could_not_use(tmp_path):
    """`load` refuses an optimizer's entries that its step would fail with."""
    adam = torch.optim.AdamW
    af.save(made(optimizer=adam), tmp_path / "saved")
    for make in (adam, partial(adam, foreach=True)):
        STEP(af.load(fresh(optimizer=make), tmp_path / "saved"), X)
    with refused("max_exp_avg_sq: missing"):
        af.load(fresh(optimizer=partial(adam, amsgrad=True)), tmp_path / "saved")


@pytest.mark.parametrize("step", [None, 2])
def test_all_ranks_restore_what_rank_0_sees(tmp_path, monkeypatch, step):
    """A disk of several machines may list a checkpoint on one before it does on another."""
    own, listed = threading.local(), manifest.steps_in
    for number in (1, 2):
        af.save(attrs.evolve(small(), step=number), tmp_path / manifest.name_of(number))
    late = lambda folder: listed(folder)[: 2 - own.rank]  # noqa: E731

    def train(world):
        own.rank = world.rank
        return af.CheckpointStore(tmp_path).restore(small(world), step=step).step

    monkeypatch.setattr(manifest, "steps_in", late)
    assert simulate(2, train).results == (2, 2)


@given(sizes=st.lists(st.integers(0, 9), max_size=12), piece=st.integers(1, 12))
def test_a_piece_goes_to_the_disk_while_the_next_is_written(sizes, piece):
    """Each part of a file is begun once, in order, as soon as a piece is there."""
    chunks = [bytes([i]) * size for i, size in enumerate(sizes)]
    begun, given_ = [], [0]

    def handed():
        for chunk in chunks:
            yield chunk
            given_.append(given_[-1] + len(chunk))

    def begin(_handle, start, end):
        # the chunk that ends here was handed over, and the next was not asked for
        assert end == given_[-1] + len(chunks[len(given_) - 1])
        begun.append((start, end))

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_PIECE", piece)
        patch.setattr(files, "_begin_flush", begin)
        files.write(Path(folder, "file"), handed())
        assert Path(folder, "file").read_bytes() == b"".join(chunks)
    assert [start for start, _ in begun] == [0, *(end for _, end in begun)][:-1]
    assert all(end - start >= piece for start, end in begun)
    assert sum(sizes) - (begun[-1][1] if begun else 0) < piece


@pytest.mark.parametrize("has_it", [True, False])
def test_a_system_begins_early_if_it_can(has_it, tmp_path, monkeypatch):
    """What it is asked is of the file's own bytes; without it the file is the same."""
    asked = []
    call = (lambda *words: asked.append(words)) if has_it else None
    monkeypatch.setattr(files, "_sync_file_range", call)
    monkeypatch.setattr(files, "_PIECE", 4)
    files.write(tmp_path / "file", [b"abc", b"defg", b"hijk", b"l"])
    assert (tmp_path / "file").read_bytes() == b"abcdefghijkl"
    assert [words[1:] for words in asked] == ([(0, 7, 2), (7, 4, 2)] if has_it else [])


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has the call")
def test_linux_begins_early(tmp_path):
    """The kernel takes what it is asked."""
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(b"abc")
        assert files._sync_file_range(file.fileno(), 0, 3, files._WRITE) == 0
        assert files._sync_file_range(file.fileno(), -1, 3, files._WRITE) == -1


@pytest.mark.parametrize("kind", ["set", ""])
def test_what_no_version_wrote_is_not_read(kind):
    """An entry of an unknown kind in a manifest is named, however deep it stands."""
    coded = {kind: []}
    for within in (
        *(coded, {"list": [1, coded]}, {"dict": {"a": None, "b": coded}}),
        *({"pairs": [[1, None], [2, coded]]}, {"object": coded}),
    ):
        with refused(f"unknown kind '{kind}'", PlainDataError):
            codec.decode(within, {})
