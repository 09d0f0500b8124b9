# SPDX-License-Identifier: Apache-2.0
"""`accelfn` in this process: what each command answers, and what settings it refuses."""

import io
import json
import os
import subprocess
import sys
import tomllib
import tracemalloc
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import LaunchError
from tests.internals import OPTIONS, cli, configure, edit_settings, read
from tests.states import linear_state
from tests.terminal import Terminal
from tests.waiting import HANGS

FILE = Path("accelfn.toml")
DEFAULTS = {n: o.default for n, o in OPTIONS.items() if o.default is not None}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def answer(*words):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = cli.main(list(words))
        except SystemExit as exit_:
            code = exit_.code
    return code, out.getvalue(), err.getvalue()


def refused(*words):
    code, out, err = answer(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def shown(*words):
    code, out, err = answer("launch", "--show", *words)
    assert (code, err) == (0, "")
    return out.splitlines()


OF_TWO = "--num-machines 2 --machine-rank 1 --main-address 127.0.0.1"
MEETING = "--rdzv-endpoint localhost:29400 --rdzv-id r --axes dp_shard=4"
ONE = "--num-machines 1 --machine-rank 0"
REFUSED = {
    # options that there are not, by their own subcommand, with the nearest one
    "launch --nprocs 2 x.py": (
        "accelfn launch: unknown option --nprocs; did you mean --nproc?\n"
    ),
    "launch --num_machines=2": "--num_machines; did you mean --num-machines?\n",
    "env --jsn": "accelfn env: unknown option --jsn; did you mean --json?\n",
    "config --foo": "config: unknown option --foo; see accelfn config --help.\n",
    "checkpoint export a b --slo": (
        "export: unknown option --slo; did you mean --slot?\n"
    ),
    "--foo env": "accelfn: unknown option --foo; see accelfn --help.\n",
    "launch --multi_gpu x.py": " or --nproc auto for one rank on each GPU.\n",
    "x.py": "there is no command 'x.py'; write accelfn launch train.py.\n",
    # what is missing, has no effect or contradicts
    "launch": "the script is missing",
    "launch --nproc 0 x.py": "from 1 to 4096",
    "launch --nproc two x.py": "'two'; expected a whole number from 1 to 4096, or 'auto'",
    "launch --nproc 2 nowhere/train.py": "no file 'nowhere/train.py'",
    "launch --nproc 2 .": "is a directory; pass a Python script",
    "launch --num-machines 2": "needs --machine-rank and --main-address too",
    "launch --num-machines 2 --machine-rank 0": "needs --main-address too",
    "launch --machine-rank 0": "--machine-rank needs --num-machines",
    "launch --num-machines 1:2": "needs --rdzv-endpoint",
    "launch --rdzv-endpoint h:1": "needs --rdzv-id too",
    "launch --rdzv-endpoint h:1 --rdzv-id a --machine-rank 0": "cannot be used with",
    "launch --rdzv-endpoint h --rdzv-id a": "expected HOST:PORT",
    "launch --rdzv-endpoint h:99999 --rdzv-id a": "'h:99999'; expected HOST:PORT",
    "launch --rdzv-endpoint h:\u00b2 --rdzv-id a": "a port from 1 to 65535",
    f"launch {ONE} --main-address 192.0.2.1": "that is not its address",
    "launch --max-restarts -1": "--max-restarts is -1; expected a whole number from 0",
    # axes, by the sentence that a world has for them
    f"launch --nproc 2 {OF_TWO} --axes dp_shard=0 x.py": "'dp_shard' is 0",
    "launch --nproc 2 --axes dp_shard=3 x.py": (
        "--axes dp_shard=3: the product of the sizes, 3, is not the number of ranks, 2"
    ),
    "launch --nproc 2 --axes dp_shards=2 x.py": (
        "--axes dp_shards=2: 'dp_shards' is not an axis; the axes are dp_replicate, "
    ),
    "launch --nproc 2 --axes dp_shard=1.5 x.py": (
        "--axes dp_shard=1.5: 'dp_shard' is '1.5'; expected a number of ranks"
    ),
    "launch --nproc 2 --axes dp_shard=1,dp_shard=2 x.py": (
        "each name once, such as dp_replicate=2,dp_shard=4"
    ),
    "launch --nproc 2 --axes 2 x.py": "--axes 2: expected sizes by name",
    "config --set axes=dp=2": "'dp' is not an axis",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_command_that_cannot_be_is_refused_in_a_line(words):
    """Nothing is started, and the line says what is wrong, or what was meant."""
    err = refused(*words.split())
    assert err.startswith("accelfn")
    assert REFUSED[words] in err


def test_an_unexpected_word_shows_the_usage_of_its_subcommand():
    """What is no option is refused with the usage of the words before it."""
    code, _, err = answer("env", "more")
    assert (code, err.startswith("usage: accelfn env ")) == (2, True)
    assert err.endswith("accelfn env: error: unexpected argument 'more'; see --help.\n")


def test_a_command_that_is_left_says_so(monkeypatch):
    """130 after Ctrl-C, 2 and one line where accelfn refuses; what is a bug is raised."""

    def left(error, *words):
        def command(_):
            raise error

        command.__name__ = f"_{words[0]}"  # the parser's name for it
        monkeypatch.setattr(cli, command.__name__, command)
        return answer(*words)

    assert left(KeyboardInterrupt(), "env") == (130, "", "")
    refusal = af.errors.LaunchError("not now.")
    assert left(refusal, "env") == (2, "", "accelfn env: not now.\n")
    # a broken pipe of what a command does, and not of what it prints, is not hidden
    for error in (ZeroDivisionError(), BrokenPipeError("of a step that is run again")):
        with pytest.raises(type(error)):
            left(error, "replay", "somewhere")


# launch


def test_what_is_launched_is_what_was_said(monkeypatch):
    """Words before the script are accelfn's, those behind it the script's; its end is ours."""
    given: list[tuple] = []

    def launch(script, args, plan, *, module):
        given.append((script, args, plan.nproc, module, plan.max_restarts))
        return 3

    monkeypatch.setattr(cli, "launch_script", launch)
    words = "--nproc 2 --max-restarts 1 -m train --lr=1 --nproc=9"
    code, _, said = answer("launch", *words.split())
    assert (code, said.count("\n")) == (3, 1)
    assert "write accelfn launch --nproc=9 ... train." in said
    assert given.pop() == ("train", ["--lr=1", "--nproc=9"], 2, True, 1)
    assert answer("test", "--nproc", "4")[::2] == (3, "")
    assert given.pop() == ("accelfn.launching.selftest", ["4"], 4, True, 0)
    assert answer("test", "--nproc", "two")[0] == 2
    FILE.write_text("[launch]\nnproc = 3\nmax_restarts = 2\n")
    _, _, said = answer("launch", "--nproc", "2", "train.py")
    assert said == f"accelfn launch: max_restarts=2 ({FILE.absolute()}).\n"


def test_a_file_that_is_named_must_be_there():
    """The one of the current directory need not; it counts where none is named."""
    assert shown()
    assert "no file 'none.toml'" in refused("launch", "--show", "--config", "none.toml")
    FILE.write_text("[launch]\nnproc = 3\n")
    Path("other.toml").write_text("[launch]\nnproc = 5\n")
    assert shown()[0].split() == ["nproc", "3", "accelfn.toml"]
    found = shown("--config", "other.toml")[0]
    assert found.split() == ["nproc", "5", "other.toml"]


def test_settings_are_shown_in_columns():
    """However long a value is, where each is from begins in the same place."""
    FILE.write_text('[launch]\naxes = "dp_replicate=1,dp_shard=1"\n')
    rows = shown("--nproc", "1")
    begins = {row.index("accelfn.toml") for row in rows if row.endswith("accelfn.toml")}
    begins |= {row.index("default") for row in rows if row.endswith("default")}
    assert len(begins) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--nproc 4 --axes dp_shard=-1,dp_replicate=2",
            "sets ACCELFN_AXES=dp_shard=-1,dp_replicate=2 (",
        ),
        # what this machine starts is a part of the world, though it may be all that comes
        (f"--nproc 2 --num-machines 2 {MEETING}", "sets ACCELFN_AXES=dp_shard=4 ("),
        (f"--nproc 2 --num-machines 1:2 {MEETING}", "sets ACCELFN_AXES=dp_shard=4 ("),
        (f"--nproc 2 {OF_TWO} --axes dp_shard=3", "sets ACCELFN_AXES=dp_shard=3 ("),
        # one machine of a script for many: its number and address may stay
        (f"{ONE} --main-address localhost", "connects as machine 0 of 1 at localhost:"),
        (f"{ONE} --main-address [::1]", "connects as machine 0 of 1 at [::1]:0"),
        (
            "--num-machines 1:2 --rdzv-endpoint [::1]:29700 --rdzv-id a",
            "waits for 1 to 2 machines at [::1]:29700",
        ),
        (
            "--num-machines 1:2 --rdzv-endpoint ::1:29700 --rdzv-id a",
            "waits for 1 to 2 machines at ::1:29700",
        ),
    ],
)
def test_show_says_what_ranks_get(words, line):
    """The variables by which ranks get settings, and where machines meet."""
    assert any(row.startswith(line) for row in shown(*words.split()))


def test_axes_in_a_file_are_refused_as_on_the_command_line():
    """What does not depend on the number of ranks is refused by `config` and `env`, too."""
    FILE.write_text('[launch]\naxes = "dp=2"\n')
    err = refused("launch", "train.py")
    assert "accelfn.toml: axes dp=2: 'dp' is not an axis" in err
    assert "'dp' is not an axis" in env_as_json()["settings"]["error"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[launch]\nnprocs = 2\n", "'nprocs' is not a setting. Did you mean 'nproc'"),
        ("[launch]\nmachine-rank = 0\n", "Did you mean 'machine_rank'"),
        ("[launch]\nzzz = 0\n", "'zzz' is not a setting. Known: nproc, "),
        ("[lunch]\nnproc = 2\n", "'lunch', which accelfn does not know. Did you mean"),
        ("nproc = 2\n", "which accelfn does not know. Write it below [launch]"),
        ("launch = 2\n", "'launch', which must be a table: a line [launch]"),
        ("[[launch]]\nnproc = 2\n", "'launch', which must be a table"),
        ('[launch]\nnproc = "2"\n', "nproc is '2'; expected a whole number from 1 to"),
        ("[launch]\nnproc = true\n", "nproc is True; expected"),
        ("[launch]\nmain_port = 70000\n", "main_port is 70000; expected a port"),
        ("[launch]\nmain_address = 7\n", "main_address is 7; expected some text"),
        ("[launch]\njoin_timeout = nan\n", "is nan; expected a number of seconds"),
        ('[launch]\nnum_machines = "2:1"\n', "num_machines is '2:1'; expected"),
        ("[launch\n", "cannot be read"),
        # its size, its depth and its numbers cost nothing before they are refused
        ("#" * 2**16 + "\n", "more than 65536 bytes"),
        ("launch=" + "[" * 5000 + "]" * 5000, "brackets and dots"),
        ("launch=" + "{a=" * 5000 + "1" + "}" * 5000, "brackets and dots"),
        (".".join("a" * 20000) + " = 1\n", "brackets and dots"),
        ('."\u2028".'.join("a" * 5000) + " = 1\n", "brackets and dots"),
        ("[launch]\nmachine_rank = 1000001\n", "machine_rank is 1000001; expected"),
        ("[launch]\nmax_restarts = 1000000000\n", "max_restarts is 1000000000; e"),
        ("[launch]\nnproc = " + "9" * 5000, "cannot be read"),
        ("a" * 60000 + " = 1\n", "which accelfn does not know"),
        (f'[launch]\nelastic = "1:{"9" * 5000}"\n', "elastic is '1:9999"),
        (f'[launch]\nnum_machines = "{"9" * 5000}:1"\n', "num_machines is '9"),
        ('[launch]\nrdzv_endpoint = "h:65536"\n', "a port from 1 to 65535"),
        (f'[launch]\nrdzv_endpoint = "h:{"9" * 5000}"\n', "a port from 1 to 65535"),
    ],
    ids=range(27),
)
def test_a_file_with_a_mistake(text, words):
    """Names that are unknown and values that cannot be are errors, with what was meant."""
    FILE.write_text(text, encoding="utf-8")
    tracemalloc.start()
    err = refused("launch", "train.py")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "accelfn.toml" in err
    assert words in err
    assert len(err) < 500
    assert peak < 5e6


@pytest.mark.parametrize("name", ["main_address", "rdzv_endpoint"])
@pytest.mark.parametrize("whose", ["another's", "everybody's", "mine"])
def test_where_machines_meet_is_said_by_no_other_user(
    tmp_path, monkeypatch, name, whose
):
    """Whoever can write the file would say where this run connects."""
    file = tmp_path / "accelfn.toml"
    file.write_text(f'[launch]\n{name} = "127.0.0.1:1"\n')
    file.chmod(0o666 if whose == "everybody's" else 0o644)
    if whose == "another's":
        monkeypatch.setattr("os.getuid", lambda: file.stat().st_uid + 1)
    if whose == "mine":
        assert read(file) == {name: "127.0.0.1:1"}
        return
    with pytest.raises(LaunchError, match=f"'{name}', and another user owns the file"):
        read(file)
    file.write_text("[launch]\nnproc = 2\n")
    assert read(file) == {"nproc": 2}


# config


def test_config_sets_and_takes_out():
    """--set changes one setting of the file and keeps the others; an empty one goes."""
    assert answer("config", "--set", "nproc=4", "--set", "rdzv-id=7")[0] == 0
    assert read(FILE) == {"nproc": 4, "rdzv_id": "7"}
    assert answer("config", "--set", "rdzv_id=", "--set", "max_restarts=1")[0] == 0
    for wrong, said in (
        (["nprocs=2"], "Did you mean 'nproc'"),
        (["nprocs="], "Did you mean 'nproc'"),
        (["nproc=two"], "nproc is 'two'"),
        (["nproc"], "NAME=VALUE"),
        (["rdzv_endpoint=h:1", "machine_rank=0"], "cannot be used with"),
    ):
        words = [word for each in wrong for word in ("--set", each)]
        assert said in refused("config", *words)
    assert read(FILE) == {"nproc": 4, "max_restarts": 1}


def test_config_writes_the_defaults():
    """--default writes what a launch does without a file, to the file that is named."""
    assert answer("config", "--default", "--config", "other.toml")[0] == 0
    assert read(Path("other.toml")) == DEFAULTS
    begun = Path("begun.toml")
    begun.write_text("[launch]\nnproc = 3\nmax_restarts = 2\n")
    assert answer("config", "--default", "--config", "begun.toml")[0] == 0
    assert read(begun) == {**DEFAULTS, "nproc": 3, "max_restarts": 2}
    assert not FILE.exists()
    said = refused("config", "--default", "--config", "no/such.toml")
    assert "no/such.toml cannot be written: " in said
    assert "No such" in said


@pytest.mark.parametrize(
    "text",
    [
        "# mine\nlaunch.nproc = 2\n",
        "launch = {nproc = 2} # mine\n",
        '# mine\n[launch]\n"nproc" = 2\n',
        "# mine\n",
    ],
)
def test_config_keeps_comments_of_any_form(text):
    """However settings are written, a change keeps what is said beside them."""
    FILE.write_text(text)
    assert answer("config", "--set", "nproc=3")[::2] == (0, "")
    assert read(FILE) == {"nproc": 3}
    assert "# mine" in FILE.read_text()


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "nproc": st.integers(1, 9) | st.just("auto"),
        "main_address": st.text(min_size=1).filter(str.isprintable),
        "join_timeout": st.floats(1, 10**6),
        "max_restarts": st.integers(0, 9),
    },
)
COMMENTS = st.text(st.characters(exclude_categories=["Cc", "Cs"]))


@given(SETTINGS, SETTINGS, st.lists(COMMENTS, min_size=5, max_size=5))
def test_what_is_edited_is_read(before, after, comments):
    """Whatever a file of ours says and is to say, it says it then, and keeps its comments."""
    lines = edit_settings("", before).splitlines()
    text = "".join(
        f"{line} # {comment}\n#{comment}\n"
        for line, comment in zip(lines, comments, strict=False)
    )
    new = edit_settings(text, after)
    assert tomllib.loads(new) == {"launch": after}
    assert all(f"\n#{each}\n" in new for each in comments[: len(lines)])
    behind = dict(zip(before, comments[1:], strict=False))
    for line in new.split("\n"):
        comment = behind.get(line.partition(" ")[0])
        assert comment is None or line.endswith(f" # {comment}")


def test_config_asks():
    """Each answer is checked and asked for again; an empty one keeps what there is."""
    FILE.write_text("[launch]\nmax_restarts = 3\n")
    answers = {
        "nproc": ["two", "2"],
        "num_machines": ["2"],
        "main_address": ["10.0.0.1"],
        "main_port": [""],
        "max_restarts": [""],
    }
    defaults = {}

    def ask(question):
        name = question.partition(":")[0]
        defaults[name] = question.rpartition("[")[2]
        return answers[name].pop(0)

    file = configure(None, [], default=False, ask=ask)
    kept = {"nproc": 2, "max_restarts": 3}
    assert read(file) == {**kept, "num_machines": 2, "main_address": "10.0.0.1"}
    assert not any(answers.values())
    assert defaults.items() >= {"nproc": "auto] ", "max_restarts": "3] "}.items()
    assert defaults["main_address"] == "none] "
    # what is about several machines goes with them
    answers = {"nproc": [""], "num_machines": ["1"], "max_restarts": [""]}
    configure(None, [], default=False, ask=ask)
    assert read(file) == {**kept, "num_machines": 1}


def test_config_whose_answers_end_writes_nothing(monkeypatch):
    """On a terminal the questions are asked there; its end is no answer."""
    for stdin, said in (
        (Terminal("3\n"), "the input ended before the last answer"),
        (io.StringIO(), "--default, or --set"),
    ):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(LaunchError, match=said):
            configure(None, [], default=False)
        assert not FILE.exists()
    monkeypatch.setattr("sys.stdin", Terminal("3\n\n2\n"))
    file = configure(None, [], default=False)
    assert read(file) == {"nproc": 3, "num_machines": 1, "max_restarts": 2}


# env and test


def env_as_json():
    code, out, _ = answer("env", "--json")
    assert code == 0
    return json.loads(out)


def test_env_tells_no_secret(monkeypatch):
    """Of variables those that change a run or place a rank, hidden where they are secret."""
    FILE.write_text("[launch]\nnproc = 3\n")
    hidden = ["TORCH_API_TOKEN", "NCCL_SECRET_ID", "TORCH_KEY_OF_MINE"]
    places = ["PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "MASTER_PORT"]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in places:
        monkeypatch.setenv(name, "7")
    for name in [*hidden, "MY_OWN", "HF_TOKEN", "SLURM_JOB_NAME"]:
        monkeypatch.setenv(name, "hush")
    found = env_as_json()
    variables = found["variables"]
    assert variables["NCCL_DEBUG"] == "INFO"
    assert [variables[name] for name in hidden] == ["(hidden)"] * 3
    assert [variables[name] for name in places] == ["7"] * 4
    assert "hush" not in json.dumps(found)
    assert found["machine"]["torch_version"]
    assert found["settings"]["nproc"] == "3 (accelfn.toml)"
    installed = {each.metadata["Name"]: each.version for each in distributions()}
    packages = ("tensorboard", "wandb", "comet_ml", "matplotlib", "mlflow-skinny")
    for name in (*packages, "accelfn", "torch", "numpy"):
        assert found["packages"].get(name) == installed.get(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[launch\n", "cannot be read"),
        ('[launch]\nmachine_rank = 0\nrdzv_id = "a"\n', "cannot be used with"),
    ],
)
def test_env_says_what_is_wrong_with_the_settings(text, said):
    """A file with a mistake is no reason to say nothing: it may be what is asked about."""
    FILE.write_text(text)
    found = env_as_json()
    assert said in found["settings"]["error"]
    assert found["packages"]["torch"]
    code, out, _ = answer("env")
    assert (code, said in out) == (0, True)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_this_machine_passes(capfd):
    """`accelfn test` prints a line for each thing that works, and a verdict."""
    assert cli.main(["test"]) == 0
    lines = capfd.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["world", "collectives", "training", "checkpoint", "This"]
    assert lines[-1] == "This machine passes the test."


# processes


def accelfn(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "accelfn", *words],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=HANGS,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("--help", ""),
        ("config --default", "1"),
        ("checkpoint ls store", ""),
    ],
)
def test_a_reader_that_leaves_is_no_error(words, unbuffered):
    """As with `head -1` there is no traceback, and the exit code is that of SIGPIPE."""
    if "store" in words:
        with af.CheckpointStore("store") as store:
            store.save(linear_state(2))
    reads, writes = os.pipe()
    os.close(reads)
    try:
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = accelfn(*words.split(), env=env, stdout=writes)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_python_runs_the_package():
    """D: `python -m accelfn` is the command, with its words and its exit codes."""
    version = accelfn("--version", stdout=subprocess.PIPE)
    assert version.stdout == f"accelfn {af.__version__}\n"
    wrong = accelfn("lunch")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage: accelfn ")
