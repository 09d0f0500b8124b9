# SPDX-License-Identifier: Apache-2.0
"""`accelfn` in this process: what each command answers, and with which exit code."""

import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import accelfn as af
from tests.internals import OPTIONS, cli, configure, read

X = torch.linspace(-1, 1, 24).reshape(8, 3)
STEP = af.make_step(lambda model, batch: model(batch).square().mean())


class Net(nn.Module):
    """A model with running statistics, and a buffer that no export has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, batch):
        return self.norm(self.body(batch)) + self.table


def answer(*words: object) -> tuple[int, list[str], list[str]]:
    """Return a command's exit code, and the lines of its output and of its errors."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = cli.main(list(map(str, words)))
    return code, out.getvalue().splitlines(), err.getvalue().splitlines()


def states(count: int) -> Iterator[af.TrainState]:
    """Yield states, one update after the other."""
    optimizer = partial(torch.optim.Adam, lr=0.1)
    state = af.TrainState.create(model=Net, optimizer=optimizer, setup=af.ema(0.5))
    for _ in range(count):
        state, _ = STEP(state, X)
        yield state


def store_of(folder: Path, count: int) -> Path:
    """Save some updates to a store."""
    with af.CheckpointStore(folder, async_=False) as kept:
        for state in states(count):
            kept.save(state, metrics={"loss": 1 / state.step})
    return folder


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_looks_at_all_and_forgets_no_loss(tmp_path):
    """Whatever is whole behind a file that is not, the exit code is 1."""
    store = store_of(tmp_path / "runs", 3)
    assert answer("checkpoint", "verify", store)[0] == 0
    flip(store / "step-00000001" / "rank-00000.safetensors")
    code, rows, _ = answer("checkpoint", "verify", store)
    assert code == 1
    assert [row.endswith(": whole") for row in rows] == [True, False, *[True] * 4]
    first, last = (
        answer("checkpoint", "verify", store / f"step-0000000{n}") for n in (1, 3)
    )
    assert (first[0], last[0]) == (1, 0)


def test_a_store_is_its_newest_checkpoint(tmp_path):
    """To export; a list of it has a row for each, in order."""
    store = store_of(tmp_path / "runs", 3)
    for name, folder in (("a", store), ("b", store / "step-00000003")):
        assert answer("checkpoint", "export", folder, tmp_path / name)[0] == 0
    first, second = (tmp_path / name / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    _, (_, *rows), _ = answer("checkpoint", "ls", store)
    cells = [row.split() for row in rows]
    assert [row[0] for row in cells] == ["1", "2", "3"]
    assert {row[5] for row in cells} == {"yes"}
    assert [row[-1] for row in cells] == ["1", "0.5", "0.333333"]


def test_ls_tells_what_is_cut_off(tmp_path):
    """A file that is cut off or gone is named, and the row says no; so is what was left."""
    store = store_of(tmp_path / "runs", 3)
    with (store / "step-00000001" / "rank-00000.safetensors").open("ab") as file:
        file.truncate(100)
    (store / "step-00000002" / "rank-00000.safetensors").unlink()
    (store / ".tmp-step-00000009").mkdir()
    code, (_, *rows), _ = answer("checkpoint", "ls", store)
    assert (code, len(rows)) == (0, 4)
    first, second, third, left = rows
    assert [row.split()[5] for row in rows[:3]] == ["no", "no", "yes"]
    assert "rank-00000.safetensors has 100 bytes, but should have" in first
    assert "Files are missing: ['rank-00000.safetensors']" in second
    assert third.startswith("   3 ")
    assert left.startswith(".tmp-step-00000009 is being written, or was left")


def test_an_export_is_what_a_model_would_save(tmp_path):
    """Persistent buffers and parameters, of a slot where one is named, and no others."""
    (state,) = states(1)
    af.save(state, tmp_path / "saved")
    for words, params in (((), state.params), (("--slot", "ema"), state.slots["ema"])):
        out = tmp_path / f"out-{len(words)}"
        assert answer("checkpoint", "export", tmp_path / "saved", out, *words)[0] == 0
        found = safetensors.torch.load_file(out / "model.safetensors")
        buffers = {n: t for n, t in state.buffers.items() if n != "table"}
        expected = {**params, **buffers}
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in found)
    code, _, err = answer("checkpoint", "export", tmp_path / "saved", out)
    assert (code, "out-2" in "".join(err)) == (2, True)


def test_a_command_that_is_left_says_so(monkeypatch):
    """130 after Ctrl-C, 2 and one line where accelfn refuses; what is a bug is raised."""

    def left(error: BaseException):
        def env(_):
            raise error

        monkeypatch.setattr(cli, "_env", env)
        return answer("env")

    assert left(KeyboardInterrupt()) == (130, [], [])
    assert left(af.errors.LaunchError("not now.")) == (2, [], ["accelfn env: not now."])
    with pytest.raises(ZeroDivisionError):
        left(ZeroDivisionError())


def test_what_is_launched_is_what_was_said(monkeypatch):
    """Words before the script are accelfn's, those behind it the script's; its end is ours."""
    given: list[tuple] = []

    def launch(script, args, plan, *, module):
        given.append((script, args, plan.nproc, module, plan.max_restarts))
        return 3

    monkeypatch.setattr(cli, "launch_script", launch)
    words = (
        "--nproc",
        "2",
        "--max-restarts",
        "1",
        "-m",
        "train",
        "--lr=1",
        "--nproc=9",
    )
    code, _, said = answer("launch", *words)
    assert (code, len(said)) == (3, 1)
    assert "write accelfn launch --nproc=9 ... train." in said[0]
    assert given == [("train", ["--lr=1", "--nproc=9"], 2, True, 1)]
    code, _, said = answer("test", "--nproc", "4")
    assert (code, said) == (3, [])
    assert given[1:] == [("accelfn.launching.selftest", ["4"], 4, True, 0)]
    assert answer("test", "--nproc", "two")[0] == 2


def test_config_keeps_what_the_file_has(tmp_path, monkeypatch):
    """--default adds what it lacks, --set changes one setting, and an empty one goes."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "accelfn.toml"
    file.write_text("[launch]\nnproc = 3 # a GPU each\nmax_restarts = 2\n")
    assert answer("config", "--default")[0] == 0
    defaults = {n: o.default for n, o in OPTIONS.items() if o.default is not None}
    assert read(file) == {**defaults, "nproc": 3, "max_restarts": 2}
    assert "nproc = 3 # a GPU each\n" in file.read_text()
    assert answer("config", "--set", "nproc=4", "--set", "max_restarts=")[0] == 0
    kept = {**defaults, "nproc": 4}
    del kept["max_restarts"]
    assert read(file) == kept
    assert answer("config", "--set", "nproc=none")[0] == 2
    assert read(file) == kept


def test_config_asks_until_the_answer_can_be(tmp_path):
    """An empty answer keeps what there is; what one machine has no use for goes."""
    file = tmp_path / "mine.toml"
    file.write_text('[launch]\nmax_restarts = 3\nmain_address = "10.0.0.1"\n')
    answers = {"nproc": ["two", "2"], "num_machines": ["1"], "max_restarts": [""]}

    def ask(question: str) -> str:
        return answers[question.partition(":")[0]].pop(0)

    with redirect_stderr(StringIO()):
        configure(str(file), [], default=False, ask=ask)
    assert read(file) == {"nproc": 2, "num_machines": 1, "max_restarts": 3}
    assert not any(answers.values())


def test_env_tells_no_secret(tmp_path, monkeypatch):
    """Of variables those that change a run or place a rank, hidden where they are secret."""
    monkeypatch.chdir(tmp_path)
    Path("accelfn.toml").write_text("[launch]\nnproc = 3\n")
    hidden = ["TORCH_API_TOKEN", "NCCL_SECRET_ID", "TORCH_KEY_OF_MINE"]
    places = ["PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "MASTER_PORT"]
    others = ["MY_OWN", "HF_TOKEN", "SLURM_JOB_NAME"]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in places:
        monkeypatch.setenv(name, "7")
    for name in [*hidden, *others]:
        monkeypatch.setenv(name, "hush")
    code, rows, _ = answer("env", "--json")
    found = json.loads("\n".join(rows))
    assert code == 0
    shown = found["variables"]
    assert shown["NCCL_DEBUG"] == "INFO"
    assert [shown[name] for name in hidden] == ["(hidden)"] * 3
    assert [shown[name] for name in places] == ["7"] * 4
    assert not any("hush" in row for row in rows)
    assert found["machine"]["torch_version"]
    assert {"accelfn", "torch", "numpy"} <= set(found["packages"])
    assert found["settings"]["nproc"] == "3 (accelfn.toml)"
    Path("accelfn.toml").write_text("[launch]\nnproc = 0\n")
    code, rows, _ = answer("env")
    assert code == 0
    assert any("nproc is 0; expected a whole number" in row for row in rows)
    assert any("NCCL_DEBUG" in row for row in rows)


def test_a_file_that_is_named_must_be_there(tmp_path, monkeypatch):
    """The one of the current directory need not; it counts where none is named."""
    monkeypatch.chdir(tmp_path)
    assert answer("launch", "--show")[0] == 0
    assert answer("launch", "--show", "--config", "none.toml")[0] == 2
    Path("accelfn.toml").write_text("[launch]\nnproc = 3\n")
    Path("other.toml").write_text("[launch]\nnproc = 5\n")
    for words, nproc in (((), "3"), (("--config", "other.toml"), "5")):
        _, (first, *_), _ = answer("launch", "--show", *words)
        assert first.split()[:2] == ["nproc", nproc]
    assert answer("launch")[0] == 2  # there is no script
