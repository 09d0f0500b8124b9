# SPDX-License-Identifier: Apache-2.0
"""Ranks that agree by files: who is waited for, for how long, and what is said of who is not."""

import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import accelfn as af
from tests.internals import (
    Save,
    Talk,
    Writing,
    background,
    commit,
    contents_of,
    files,
    talk_directory,
)
from tests.states import linear_state


@pytest.fixture
def talks(tmp_path):
    """Return what makes a rank's part of a talk of three."""

    def talk_of(rank, patience=60.0):
        save = Save(final=tmp_path / "step-00000002", step=2, rank=rank, size=3)
        talk_directory(save.final).mkdir(exist_ok=True)
        return Talk(save=save, patience=patience)

    return talk_of


def said(talk):
    """Return how a rank's first turn fails."""
    with pytest.raises(
        (af.errors.PeerFailedError, af.errors.CheckpointWriteError)
    ) as caught:
        talk("write its file", "ok")
    return f"{caught.type.__name__}: {caught.value}"


def test_whoever_says_nothing_in_time_is_named(talks):
    """B1: within the world's timeout, with the save, and what was waited for."""
    words = (
        r"PeerFailedError: It is unknown whether the state of step 2 was saved: rank 1 of 3"
        r" waited in 'save: write its file', but ranks 0 and 2 failed, left or did not arrive"
        r" within 0\.[0-9]+ s\."
    )
    assert re.match(words, said(talks(1, patience=0.1)))


def test_a_process_that_ended_is_named_at_once(talks):
    """B1: its file is let go, whatever the timeout; one that has spoken before is not gone."""
    talks(2).begin().close()
    files.tell(talk_directory(talks(2).save.final) / "1-2", "ok")
    held, gone = talks(1).begin(), talks(0).begin()
    gone.close()
    assert "but the process of rank 0 has ended." in said(talks(1))
    held.close()


def test_a_lock_of_another_mount_tells_nothing(talks, monkeypatch):
    """B1: there it may be free, and its holder alive."""
    talks(0).begin().close()
    monkeypatch.setattr(files, "_mount", lambda _: b"elsewhere")
    assert "ranks 0 and 2 failed, left or did not" in said(talks(1, patience=0.1))


def test_who_speaks_last_as_patience_ends_has_spoken(talks, monkeypatch):
    """Between one look at who is absent and the next: then nobody is."""
    talk = talks(1, patience=0.0)
    absent = iter([[0, 2], [], []])
    monkeypatch.setattr(Talk, "_absent", lambda _: next(absent))
    monkeypatch.setattr(Talk, "_given_up", lambda *_: "nobody was missing")
    for rank in (0, 2):
        files.tell(talk_directory(talk.save.final) / f"1-{rank}", "ok")
    assert talk("write its file", "ok") == ["ok"] * 3


@pytest.mark.parametrize("text", ["rank 0 failed: ValueError: boom", ""])
def test_a_writer_that_ended_is_believed(talks, text):
    """B2: with what it said, or that there was no room to say it."""
    talks(0).end(text)
    assert said(talks(1)) == "CheckpointWriteError: " + (
        text
        or "The state of step 2 was not saved: rank 0 failed, and its disk was too full"
    )


def test_a_copy_is_of_the_kind_that_the_tensor_is_now():
    """Memory is used again for a tensor of the same shape and dtype, and for no other."""
    buffers, seen = background.Buffers(), []
    for each in (
        torch.arange(3.0) + 1 / 3,
        torch.arange(3.0) + 2 / 3,
        torch.arange(3.0, dtype=torch.float64) + 1 / 3,
        torch.arange(3),
        torch.arange(4) + 5,
    ):
        (copied,) = buffers.copies_of({"x": each}).values()
        assert copied.dtype is each.dtype
        assert torch.equal(copied, each)
        seen.append(copied)
    assert seen[0] is seen[1]


@pytest.mark.parametrize("patience", [3.0, 60.0])
@pytest.mark.parametrize("hurried", [None, 99.0, 102.0])
def test_how_long_a_rank_waits(talks, monkeypatch, patience, hurried):
    """Its patience; and once another is known to be gone, some seconds from then or its turn."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(background, "time", clock)
    talk = talks(1, patience)
    talk.hurried_at = hurried
    assert "failed, left or did not arrive" in said(talk)
    grace = patience if hurried is None else max(hurried - 100, 0) + 5
    assert clock.now - 100 == pytest.approx(min(patience, grace), abs=0.06)


def test_a_save_that_waits_for_one_that_is_lost_is_hurried(tmp_path, monkeypatch):
    """Where the block of a store ends by a lost rank, its save waits for seconds, not minutes."""
    waited, is_lost = 0.0, threading.Event()

    def sleep(seconds):
        nonlocal waited
        if is_lost.is_set():
            waited += seconds
        time.sleep(0)

    clock = SimpleNamespace(monotonic=lambda: waited, sleep=sleep)
    monkeypatch.setattr(background, "time", clock)
    saved = af.CheckpointStore(tmp_path)
    save = Save(final=tmp_path / "step-00000002", step=2, rank=1, size=2)
    talk_directory(save.final).mkdir()
    contents = contents_of(linear_state(), "write")
    writing = saved._pending.writing = Writing(
        save, partial(commit.write, save, {"": contents}), patience=None
    )
    writing.start()
    is_lost.set()
    with pytest.raises(af.errors.PeerFailedError), saved:
        raise af.errors.PeerFailedError("rank 0 is lost")
    assert 0 < waited < 60
