# SPDX-License-Identifier: Apache-2.0
"""`accelfn checkpoint`: what it says of checkpoints is what is in them."""

import errno
import os
import shutil
import sys
from functools import partial

import pytest
import safetensors.torch
import torch
from rich.progress import Progress
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.checkpoints import STEP, X, damage
from tests.golden import make as golden
from tests.internals import main, read_manifest
from tests.processes import limit_files
from tests.terminal import Terminal

ONE, TWO = golden.FOLDER / "one-rank", golden.FOLDER / "two-ranks"


class Net(nn.Module):
    """A model with running statistics, and a buffer that no export has."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, batch):
        return self.norm(self.body(batch)) + self.table


def fresh(**options):
    """Return a state before its first update."""
    given = {"model": Net, "optimizer": partial(torch.optim.Adam, lr=0.1)}
    return af.TrainState.create(**given, setup=af.ema(0.5), **options)


def states(count, **options):
    """Yield states, one update after the other."""
    state = fresh(**options)
    for _ in range(count):
        state, _ = STEP(state, X)
        yield state


def made(**options):
    """Return a state an update old."""
    return next(states(1, **options))


@pytest.fixture
def store(tmp_path):
    """Return a store of three checkpoints."""
    folder = tmp_path / "runs"
    with af.CheckpointStore(folder, async_=False) as kept:
        for state in states(3):
            kept.save(state, metrics={"loss": 1 / (state.step + 2)})
    return folder


def run(capsys, *words):
    """Return the exit code and what was printed of a command."""
    code = main(["checkpoint", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


def refused(capsys, *words):
    """Return the one line with which a command was refused."""
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, [])
    assert err.startswith("accelfn checkpoint: ")
    assert err.count("\n") == 1
    return err


# progress


@pytest.mark.parametrize("act", ["verify", "export"])
def test_a_bar_shows_what_was_read(act, store, tmp_path, capsys, monkeypatch):
    """On a terminal, to the last byte; elsewhere nothing is written."""
    words = [[act, store, tmp_path / to][: 2 + (act == "export")] for to in "ab"]
    assert run(capsys, *words[0])[2] == ""
    counts, advance = [], Progress.advance

    def counted(self, task, advanced=1):
        advance(self, task, advanced)
        counts.append((self.tasks[0].completed, self.tasks[0].total))

    monkeypatch.setattr(Progress, "advance", counted)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert main(["checkpoint", *map(str, words[1])]) == 0
    assert shown.getvalue()
    done, total = counts[-1]
    assert 0 < done == total


# ls


def test_ls_has_a_row_for_each(store, capsys):
    """Steps, sizes, ages, whether whole, and metrics stand under their heads."""
    for step, age in ((1, 2 * 86400), (2, 7200), (3, 90)):
        path = store / f"step-0000000{step}" / "manifest.json"
        then = path.stat().st_mtime - age
        os.utime(path, (then, then))
    code, (head, *rows), err = run(capsys, "ls", store)
    assert (code, err) == (0, "")
    assert head.split() == ["step", "size", "age", "whole", "metrics"]
    cells = [row.split() for row in rows]
    assert [row[0] for row in cells] == ["1", "2", "3"]
    assert [row[3:5] for row in cells] == [["2", "d"], ["2", "h"], ["2", "min"]]
    losses = ["0.333333", "0.25", "0.2"]
    assert [row[5:] for row in cells] == [["yes", "loss", loss] for loss in losses]
    for row in cells:
        folder = store / f"step-0000000{row[0]}"
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert row[1:3] == [f"{size / 1000:.1f}", "kB"]


def test_ls_tells_what_is_cut_off(store, capsys):
    """A file that is cut off or gone is named, and the row says no; so is what was left."""
    with (store / "step-00000001" / "rank-00000.safetensors").open("ab") as file:
        file.truncate(100)
    (store / "step-00000002" / "rank-00000.safetensors").unlink()
    (store / ".tmp-step-00000009").mkdir()
    code, (_, *rows), _ = run(capsys, "ls", store)
    assert (code, len(rows)) == (0, 4)
    assert [row.split()[5] for row in rows[:3]] == ["no", "no", "yes"]
    assert "rank-00000.safetensors has 100 bytes, but should have" in rows[0]
    assert "Files are missing: ['rank-00000.safetensors']" in rows[1]
    assert rows[3].startswith(".tmp-step-00000009 is being written, or was left")


def test_states_that_were_saved_together(tmp_path, capsys):
    """`ls` names them, `verify` reads all, `export` takes the directory of one."""
    folder = tmp_path / "runs"
    with af.CheckpointStore(folder) as kept:
        kept.save({"actor": made(), "critic": fresh()}, metrics={"loss": 0.5})
    saved = folder / "step-00000001"
    _, rows, _ = run(capsys, "ls", folder)
    size = sum(p.stat().st_size for p in saved.rglob("*") if p.is_file())
    assert f"1  {size / 1000:.1f} kB" in rows[1]
    assert rows[1].endswith("yes  loss 0.5  actor, critic")
    assert "actor" in refused(capsys, "export", folder, tmp_path / "out")
    assert run(capsys, "export", saved / "critic", tmp_path / "out")[0] == 0
    code, rows, _ = run(capsys, "verify", folder)
    assert (code, len(rows)) == (0, 3)
    with (saved / "critic" / "rank-00000.safetensors").open("ab") as file:
        file.truncate(100)
    code, rows, _ = run(capsys, "verify", saved)
    assert (code, [": whole" in row for row in rows]) == (1, [True, True, False])
    assert " no " in run(capsys, "ls", folder)[1][1]


# verify


def test_verify_of_what_is_whole(store, capsys):
    """Every file of a checkpoint, or of all of a store, is said to be whole."""
    code, rows, err = run(capsys, "verify", TWO)
    names = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")
    assert (code, err) == (0, "")
    assert rows == [f"{TWO / name}: whole" for name in names]
    code, rows, _ = run(capsys, "verify", store)
    assert code == 0
    assert len(rows) == 6


def test_verify_names_file_and_tensor(tmp_path, capsys):
    """A flipped bit is found, with exit code 1; the files beside it are whole."""
    folder = shutil.copytree(TWO, tmp_path / "saved")
    path = folder / "rank-00001.safetensors"
    whole, tensors = path.read_bytes(), read_manifest(TWO).files[path.name].tensors
    places = {n: each.begin for n, each in tensors.items() if each.begin < each.end}
    places["its header"] = 9
    for what, at in places.items():
        path.write_bytes(whole)
        damage(path, at)
        code, rows, _ = run(capsys, "verify", folder)
        said = f"{path} has changed since it was saved: the BLAKE3 digest of {what}"
        assert said in rows[2]
        assert (code, [": whole" in row for row in rows]) == (1, [True, True, False])


def test_verify_of_a_manifest_that_has_changed(store, capsys):
    """A damaged manifest is named with exit code 1, and the other checkpoints looked at."""
    path = store / "step-00000002" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    code, rows, _ = run(capsys, "verify", store)
    assert code == 1
    assert [row.endswith("whole") for row in rows] == [True, True, False, True, True]
    assert str(path) in rows[2]


# export


def as_exported(folder):
    """Return an exported model's one file."""
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("words", "at"), [((), "train"), (("--slot", "ema"), "eval")])
def test_export_is_that_of_the_state(words, at, tmp_path, capsys):
    """The very file is written that `af.export_model` writes, of a store's newest state."""
    with af.CheckpointStore(tmp_path / "saved") as store:
        for state in states(3):
            store.save(state)
    af.export_model(state, tmp_path / "expected", at=at)
    out = tmp_path / "out"
    code, rows, err = run(capsys, "export", tmp_path / "saved", out, *words)
    assert (code, err) == (0, "")
    assert as_exported(tmp_path / "expected") == as_exported(out)
    size = (out / "model.safetensors").stat().st_size
    assert rows == [f"{out / 'model.safetensors'}: 7 tensors, {size} B"]


def test_what_a_slot_has_not_is_exported_as_it_is_trained(tmp_path):
    """Of an average of some parameters, the others are those of the state."""
    state = fresh()
    first, *others = state.params
    slot = {first: torch.zeros_like(state.params[first])}
    af.save(state.with_slot("some", slot), tmp_path / "saved")
    words = [tmp_path / "saved", tmp_path / "out", "--slot", "some"]
    assert main(["checkpoint", "export", *map(str, words)]) == 0
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() >= state.params.keys()
    assert torch.equal(found[first], slot[first])
    for name in others:
        assert torch.equal(found[name], state.params[name])


def test_export_of_what_has_no_one_model(tmp_path, capsys):
    """Ranks that differ, and parameters that were not written, are named; nothing is left."""
    said = refused(capsys, "export", TWO, tmp_path / "out")
    assert "ranks have different values of params.first.bias" in said
    assert "af.export_model" in said
    af.save(golden.fresh(af.World.single()), tmp_path / "hashed", frozen="hash")
    said = refused(capsys, "export", tmp_path / "hashed", tmp_path / "out")
    assert "frozen were not saved" in said
    assert [path.name for path in tmp_path.iterdir()] == ["hashed"]


def test_copies_that_train_apart(tmp_path, capsys):
    """Each has slices of its own, and there is no one model to export."""

    def save(world):
        setup = af.chain(af.wrap_fsdp(), af.local_sgd(sync_every=2))
        sgd, model = partial(torch.optim.SGD, lr=0.1), partial(nn.Linear, 3, 4)
        options = {"model": model, "optimizer": sgd, "setup": setup, "world": world}
        state = af.TrainState.create(**options)
        for name in ("apart", "alike"):
            state, _ = STEP(state, X + world.rank)
            af.save(state, tmp_path / name)
        return af.full_params(state, at="eval")

    expected = simulate(4, save, axes={"dp_replicate": 2, "dp_shard": 2})[0]
    said = refused(capsys, "export", tmp_path / "apart", tmp_path / "out")
    assert "ranks have different values of params.bias, params.weight" in said
    run(capsys, "export", tmp_path / "alike", tmp_path / "out")
    found = safetensors.torch.load(as_exported(tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("slot", ["nope", "mine", "slots."])
def test_export_of_a_slot_without_parameters(slot, tmp_path, capsys):
    """A slot that holds none is refused, with those that there are."""
    said = refused(capsys, "export", ONE, tmp_path / "out", "--slot", slot)
    assert "slots.ema" in said
    assert list(tmp_path.iterdir()) == []


def test_export_to_what_is_there(tmp_path, capsys):
    """Nothing is written over; a place where nothing can be written is named."""
    (tmp_path / "file").touch()
    assert "already exists" in refused(capsys, "export", ONE, tmp_path)
    assert "file" in refused(capsys, "export", ONE, tmp_path / "file" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_export_to_a_disk_that_is_full(tmp_path, capsys):
    """The path and the system's reason are told, and nothing is left of it."""
    af.save(fresh(), tmp_path / "saved")
    with limit_files(100):
        said = refused(capsys, "export", tmp_path / "saved", tmp_path / "out")
    assert f"{tmp_path / 'out'} was not written: " in said
    assert os.strerror(errno.EFBIG) in said
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_export_of_a_file_that_has_changed(tmp_path, capsys):
    """What was changed on the disk is not exported."""
    folder = shutil.copytree(ONE, tmp_path / "saved")
    path = folder / "rank-00000.safetensors"
    damage(path)
    assert str(path) in refused(capsys, "export", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What is no checkpoint, and no command.


@pytest.mark.parametrize("act", ["ls", "verify", "export"])
@pytest.mark.parametrize("kind", ["nothing", "a directory", "a file"])
def test_where_there_is_no_checkpoint(act, kind, tmp_path, capsys):
    """A path without one is named on one line, with exit code 2."""
    path = tmp_path / "path"
    if kind == "a directory":
        path.mkdir()
    if kind == "a file":
        path.touch()
    if (act, kind) == ("verify", "a file"):
        code, rows, _ = run(capsys, act, path)
        assert (code, str(path) in rows[0]) == (1, True)
        return
    others = [tmp_path / "out"] if act == "export" else []
    assert str(path) in refused(capsys, act, path, *others)


@pytest.mark.parametrize(
    "words", [[], ["drop"], ["ls"], ["export", "a"], ["verify", "a", "b"]]
)
def test_mistakes_in_the_command_line(words, capsys):
    """Other words are refused with exit code 2 and the usage."""
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *words])
    assert caught.value.code == 2
    assert "usage: accelfn" in capsys.readouterr().err
