# SPDX-License-Identifier: Apache-2.0
"""`accelfn config`, `launch --show`, `env` and `test`: what is set, by whom, and what is wrong."""

import io
import json
import tomllib
import tracemalloc
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import LaunchError
from tests.internals import OPTIONS, configure, edit_settings, main, read


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Be in an empty directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def shown(capsys, *words):
    """Return the value and the source of each setting that `launch --show` shows."""
    assert main(["launch", "--show", *words]) == 0
    rows = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    return {name: rest for name, rest in rows if name in OPTIONS}


def refused(capsys, *words):
    """Return the one line of a command that is refused."""
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "launch --nprocs 2 x.py",
            "launch: unknown option --nprocs; did you mean --nproc?",
        ),
        ("launch --num_machines=2", "--num_machines; did you mean --num-machines?"),
        ("env --jsn", "env: unknown option --jsn; did you mean --json?"),
        ("config --foo", "config: unknown option --foo; see accelfn config --help."),
        (
            "checkpoint export a b --slo",
            "export: unknown option --slo; did you mean --slot?",
        ),
        ("--foo env", "accelfn: unknown option --foo; see accelfn --help."),
        ("launch --multi_gpu x.py", " or --nproc auto for one rank on each GPU."),
        ("x.py", "there is no command 'x.py'; write accelfn launch train.py."),
    ],
)
def test_an_unknown_option_is_one_line(capsys, words, said):
    """It is refused by its own subcommand, with the nearest option that there is."""
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.endswith(f"{said}\n")
    assert err.startswith("accelfn")
    assert err.count("\n") == 1


def test_an_unexpected_word_shows_the_usage_of_its_subcommand(capsys):
    """What is no option is refused with the usage of the words before it."""
    with pytest.raises(SystemExit, match="2"):
        main(["env", "more"])
    err = capsys.readouterr().err
    assert err.startswith("usage: accelfn env ")
    assert err.endswith("accelfn env: error: unexpected argument 'more'; see --help.\n")


def test_the_command_line_comes_before_the_file_before_the_default(capsys):
    """--show prints each value and who gave it, and starts nothing."""
    Path("accelfn.toml").write_text("[launch]\nnproc = 3\nmax_restarts = 2\n")
    found = shown(capsys, "--nproc", "2", "train.py")
    assert found["nproc"].split(None, 1) == ["2", "command line"]
    assert found["max_restarts"].split() == ["2", "accelfn.toml"]
    assert found["num_machines"].split() == ["1", "default"]
    Path("other.toml").write_text("[launch]\nnproc = 5\n")
    found = shown(capsys, "--config", "other.toml")
    assert found["nproc"].split() == ["5", "other.toml"]
    assert found["max_restarts"].split() == ["0", "default"]


def test_axes_reach_the_ranks_as_they_were_written(capsys):
    """--show has them beside their source, and the variable by which ranks get them."""
    Path("accelfn.toml").write_text('[launch]\nnproc = 4\naxes = "dp_shard=4"\n')
    assert shown(capsys)["axes"].split() == ["dp_shard=4", "accelfn.toml"]
    words = ("launch", "--show", "--axes", "dp_shard=-1,dp_replicate=2")
    assert main([*words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("sets ACCELFN_AXES=dp_shard=-1,dp_replicate=2 (")
        for line in lines
    )


@pytest.mark.parametrize("machines", ["2", "1:2"])
def test_axes_of_several_machines_are_the_worlds(capsys, machines):
    """What this machine starts is a part, though it may be all that comes."""
    where = (
        "--num-machines",
        machines,
        "--rdzv-endpoint",
        "localhost:29400",
        "--rdzv-id",
        "r",
    )
    words = ("launch", "--show", *where, "--nproc", "2", "--axes", "dp_shard=4")
    assert main([*words, "train.py"]) == 0
    assert "sets ACCELFN_AXES=dp_shard=4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("dp_shard=3", "the product of the sizes, 3, is not the number of ranks, 2"),
        ("dp_shards=2", "'dp_shards' is not an axis; the axes are dp_replicate, "),
        ("dp_shard=two", "'dp_shard' is 'two'; expected a number of ranks, 1 or more"),
        ("dp_shard=0", "'dp_shard' is 0; expected a number of ranks"),
        ("dp_shard=1.5", "'dp_shard' is '1.5'; expected a number of ranks"),
        ("dp_shard=-1,tp=-1", "only one axis can have the size -1, which means"),
        ("pp=2", "does not support pipeline parallelism"),
        ("dp_shard=1,dp_shard=2", "each name once, such as dp_replicate=2,dp_shard=4"),
        ("dp_shard:2", "expected sizes by name"),
        ("dp_shard=2,", "expected sizes by name"),
        ("2", "expected sizes by name"),
    ],
)
def test_axes_that_cannot_be_are_refused_before_anything_starts(capsys, axes, said):
    """By the sentence that a world has for them, beginning with what was written."""
    words = ("launch", "--nproc", "2", "--axes", axes, "train.py")
    err = refused(capsys, *words)
    assert f"--axes {axes}: " in err
    assert said in err


def test_axes_in_a_file_are_refused_as_on_the_command_line(capsys):
    """What does not depend on the number of ranks is refused by `config` and `env`, too."""
    assert "'dp' is not an axis" in refused(capsys, "config", "--set", "axes=dp=2")
    Path("accelfn.toml").write_text('[launch]\naxes = "dp=2"\n')
    err = refused(capsys, "launch", "train.py")
    assert "accelfn.toml: axes dp=2: 'dp' is not an axis" in err
    assert main(["env", "--json"]) == 0
    error = json.loads(capsys.readouterr().out)["settings"]["error"]
    assert "'dp' is not an axis" in error


def test_what_other_machines_start_is_theirs_to_say(capsys):
    """The ranks of several machines find out whether the sizes multiply to their number."""
    words = ("--nproc", "2", "--num-machines", "2", "--machine-rank", "1")
    axes = ("--main-address", "127.0.0.1", "--axes", "dp_shard=3")
    assert shown(capsys, *words, *axes)["axes"].split()[0] == "dp_shard=3"
    err = refused(capsys, "launch", *words, *axes, "--axes", "dp_shard=0", "x.py")
    assert "'dp_shard' is 0" in err


def test_show_says_what_ranks_get(capsys):
    """Machines, and variables that ranks get beside torchrun's, are shown with the reason."""
    words = ("--nproc", "2", "--num-machines", "2", "--machine-rank", "1")
    assert main(["launch", "--show", *words, "--main-address", "127.0.0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "connects as machine 1 of 2 at 127.0.0.1:29500" in lines
    assert any(line.startswith("sets GLOO_SOCKET_IFNAME=lo (") for line in lines)
    assert any(line.startswith("sets OMP_NUM_THREADS=") for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[launch]\nnprocs = 2\n",
            "'nprocs' is not a setting. Did you mean 'nproc'",
        ),
        ("[launch]\nmachine-rank = 0\n", "Did you mean 'machine_rank'"),
        ("[launch]\nzzz = 0\n", "'zzz' is not a setting. Known: nproc, "),
        (
            "[lunch]\nnproc = 2\n",
            "'lunch', which accelfn does not know. Did you mean 'launch'",
        ),
        ("nproc = 2\n", "which accelfn does not know. Write it below [launch]"),
        ("launch = 2\n", "'launch', which must be a table: a line [launch]"),
        ("[[launch]]\nnproc = 2\n", "'launch', which must be a table"),
        ('[launch]\nnproc = "2"\n', "nproc is '2'; expected a whole number from 1 to"),
        ("[launch]\nnproc = true\n", "nproc is True; expected"),
        ("[launch]\nnproc = 2.0\n", "nproc is 2.0; expected"),
        ("[launch]\nmain_port = 70000\n", "main_port is 70000; expected a port"),
        ("[launch]\nmain_address = 7\n", "main_address is 7; expected some text"),
        (
            "[launch]\njoin_timeout = nan\n",
            "join_timeout is nan; expected a number of seconds",
        ),
        ('[launch]\nnum_machines = "2:1"\n', "num_machines is '2:1'; expected"),
        ("[launch\n", "cannot be read"),
    ],
)
def test_a_file_with_a_mistake(capsys, text, words):
    """Names that are unknown and values that cannot be are errors, with what was meant."""
    Path("accelfn.toml").write_text(text)
    err = refused(capsys, "launch", "train.py")
    assert "accelfn.toml" in err
    assert words in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#" * 2**16 + "\n", "more than 65536 bytes"),
        ("launch=" + "[" * 5000 + "]" * 5000, "brackets and dots"),
        ("launch=" + "{a=" * 5000 + "1" + "}" * 5000, "brackets and dots"),
        (".".join("a" * 20000) + " = 1\n", "brackets and dots"),
        ('."\u2028".'.join("a" * 5000) + " = 1\n", "brackets and dots"),
        ("[launch]\nnproc = 1000000000\n", "nproc is 1000000000; expected"),
        ("[launch]\nnproc = -1\n", "nproc is -1; expected"),
        ("[launch]\nmain_port = -1\n", "main_port is -1; expected a port"),
        ("[launch]\nmachine_rank = 1000001\n", "machine_rank is 1000001; expected"),
        ("[launch]\nmax_restarts = 1000000000\n", "max_restarts is 1000000000; e"),
        ("[launch]\nnproc = " + "9" * 5000, "cannot be read"),
        ("a" * 60000 + " = 1\n", "which accelfn does not know"),
        (f'[launch]\nelastic = "1:{"9" * 5000}"\n', "elastic is '1:9999"),
        (f'[launch]\nnum_machines = "{"9" * 5000}:1"\n', "num_machines is '9"),
        ('[launch]\nrdzv_endpoint = "h:65536"\n', "a port from 1 to 65535"),
        (f'[launch]\nrdzv_endpoint = "h:{"9" * 5000}"\n', "a port from 1 to 65535"),
    ],
    ids=range(16),
)
def test_a_file_is_bounded_before_it_is_read(capsys, text, words):
    """Its size, its depth and its numbers cost nothing before they are refused."""
    Path("accelfn.toml").write_text(text, encoding="utf-8")
    tracemalloc.start()
    err = refused(capsys, "launch", "train.py")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
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


def test_a_launch_says_what_its_file_has_set(capsys, monkeypatch):
    """The settings and the file that they are from; nothing, where there is none."""
    monkeypatch.setattr("accelfn.cli.launch_script", lambda *_, **__: 0)
    assert main(["launch", "--nproc", "2", "train.py"]) == 0
    assert capsys.readouterr().err == ""
    Path("accelfn.toml").write_text("[launch]\nnproc = 3\nmax_restarts = 2\n")
    assert main(["launch", "--nproc", "2", "train.py"]) == 0
    file = Path("accelfn.toml").absolute()
    assert capsys.readouterr().err == f"accelfn launch: max_restarts=2 ({file}).\n"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--num-machines 2", "needs --machine-rank and --main-address too"),
        ("--num-machines 2 --machine-rank 0", "needs --main-address too"),
        ("--machine-rank 0", "--machine-rank needs --num-machines"),
        ("--num-machines 2 --machine-rank 2 --main-address h", "expected 0 to 1"),
        ("--num-machines 1:2", "needs --rdzv-endpoint"),
        ("--rdzv-endpoint h:1", "needs --rdzv-id too"),
        ("--rdzv-endpoint h:1 --rdzv-id a --machine-rank 0", "cannot be used with"),
        ("--rdzv-endpoint h --rdzv-id a", "expected HOST:PORT"),
        ("--rdzv-endpoint h:99999 --rdzv-id a", "'h:99999'; expected HOST:PORT"),
        ("--rdzv-endpoint h:0 --rdzv-id a", "a port from 1 to 65535"),
        ("--rdzv-endpoint h:\u00b2 --rdzv-id a", "a port from 1 to 65535"),
        (
            "--num-machines 1 --machine-rank 0 --main-address 192.0.2.1",
            "that is not its address",
        ),
        ("--num-machines 1 --machine-rank 1", "with 1 machines, expected 0 to 0"),
        ("--max-restarts -1", "--max-restarts is -1; expected a whole number from 0"),
        ("--config none.toml", "no file 'none.toml'"),
        ("", "the script is missing"),
    ],
)
def test_settings_that_cannot_be_together(capsys, words, advice):
    """What is missing, has no effect or contradicts is refused, and nothing is started."""
    assert advice in refused(capsys, "launch", *words.split())


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        ("--main-address localhost", "localhost:0"),
        ("--main-address 127.0.0.1 --main-port 29544", "127.0.0.1:29544"),
        ("--main-address [::1]", "[::1]:0"),
        ("--main-port 29544", "127.0.0.1:29544"),
    ],
)
def test_one_machine_of_a_script_for_many(capsys, words, endpoint):
    """With --num-machines 1 a machine's number and address need not be taken out."""
    words = ("--num-machines 1 --machine-rank 0 " + words).split()
    assert main(["launch", "--show", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"connects as machine 0 of 1 at {endpoint}" in lines


@pytest.mark.parametrize("host", ["[::1]", "::1", "127.0.0.1"])
def test_an_endpoint_of_ipv6(capsys, host):
    """An address in brackets is one, as torch has it."""
    words = ("--num-machines", "1:2", "--rdzv-endpoint", f"{host}:29700")
    assert main(["launch", "--show", *words, "--rdzv-id", "a"]) == 0
    assert f"waits for 1 to 2 machines at {host}:29700" in capsys.readouterr().out


def test_config_sets_and_takes_out(capsys):
    """--set changes one setting of the file and keeps the others; an empty one goes."""
    assert main(["config", "--set", "nproc=4", "--set", "rdzv-id=7"]) == 0
    assert read(Path("accelfn.toml")) == {"nproc": 4, "rdzv_id": "7"}
    assert main(["config", "--set", "rdzv_id=", "--set", "max_restarts=1"]) == 0
    assert read(Path("accelfn.toml")) == {"nproc": 4, "max_restarts": 1}
    capsys.readouterr()
    assert "Did you mean 'nproc'" in refused(capsys, "config", "--set", "nprocs=2")
    assert "Did you mean 'nproc'" in refused(capsys, "config", "--set", "nprocs=")
    assert "nproc is 'two'" in refused(capsys, "config", "--set", "nproc=two")
    assert "NAME=VALUE" in refused(capsys, "config", "--set", "nproc")
    both = ("--set", "rdzv_endpoint=h:1", "--set", "machine_rank=0")
    assert "cannot be used with" in refused(capsys, "config", *both)
    assert read(Path("accelfn.toml")) == {"nproc": 4, "max_restarts": 1}


COMMENTED = """\
# of the cluster
[launch]
nproc = 4            # one a GPU
# how the others reach it
main_address = "a#b"# and a comment

max_restarts = 1
"""


def test_config_keeps_comments(capsys):
    """What is not changed stays as it was written; a value is changed on its line."""
    file = Path("accelfn.toml")
    file.write_text(COMMENTED)
    words = ("--set", "nproc=auto", "--set", "max_restarts=", "--set", "main_port=7")
    assert main(["config", *words]) == 0
    expected = COMMENTED.replace("nproc = 4  ", 'nproc = "auto"  ')
    begun = expected.replace("\nmax_restarts = 1\n", "main_port = 7\n\n")
    assert file.read_text() == begun
    assert main(["config", "--set", "main_address=c"]) == 0
    assert 'main_address = "c"# and a comment\n' in file.read_text()
    assert capsys.readouterr().err == ""
    assert main(["config", "--default"]) == 0
    assert "# one a GPU" in file.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "# mine\nlaunch.nproc = 2\n",
        "launch = {nproc = 2} # mine\n",
        '# mine\n[launch]\n"nproc" = 2\n',
        "# mine\n",
    ],
)
def test_config_keeps_comments_of_any_form(capsys, text):
    """However settings are written, a change keeps what is said beside them."""
    file = Path("accelfn.toml")
    file.write_text(text)
    assert main(["config", "--set", "nproc=3"]) == 0
    assert read(file) == {"nproc": 3}
    assert "# mine" in file.read_text()
    assert capsys.readouterr().err == ""


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


def test_config_writes_the_defaults():
    """--default writes what a launch does without a file, to the file that is named."""
    assert main(["config", "--default", "--config", "other.toml"]) == 0
    defaults = {n: o.default for n, o in OPTIONS.items() if o.default is not None}
    assert read(Path("other.toml")) == defaults
    Path("begun.toml").write_text("[launch]\nnproc = 3\nmax_restarts = 2\n")
    assert main(["config", "--default", "--config", "begun.toml"]) == 0
    begun = {**defaults, "nproc": 3, "max_restarts": 2}
    assert read(Path("begun.toml")) == begun
    assert not Path("accelfn.toml").exists()


def test_config_asks():
    """Each answer is checked and asked for again; an empty one keeps what there is."""
    Path("accelfn.toml").write_text("[launch]\nmax_restarts = 3\n")
    answers = {
        "nproc": ["two", "2"],
        "num_machines": ["2"],
        "main_address": ["10.0.0.1"],
        "main_port": [""],
        "max_restarts": [""],
    }

    shown = {}

    def ask(question):
        name = question.partition(":")[0]
        shown[name] = question.rpartition("[")[2]
        return answers[name].pop(0)

    file = configure(None, [], default=False, ask=ask)
    assert read(file) == {
        "nproc": 2,
        "num_machines": 2,
        "main_address": "10.0.0.1",
        "max_restarts": 3,
    }
    assert not any(answers.values())
    assert {n: shown[n] for n in ("nproc", "max_restarts", "main_address")} == {
        "nproc": "auto] ",
        "max_restarts": "3] ",
        "main_address": "none] ",
    }


def test_config_whose_answers_end_writes_nothing(monkeypatch):
    """On a terminal the questions are asked there; its end is no answer."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal("3\n"))
    with pytest.raises(LaunchError, match="the input ended before the last answer"):
        configure(None, [], default=False)
    assert not Path("accelfn.toml").exists()
    monkeypatch.setattr("sys.stdin", Terminal("3\n\n2\n"))
    file = configure(None, [], default=False)
    assert read(file) == {"nproc": 3, "num_machines": 1, "max_restarts": 2}


def test_config_that_cannot_be_written_says_where():
    """A folder that is not there is named with the system's reason."""
    with pytest.raises(
        LaunchError, match=r"no/such\.toml cannot be written: .*No such"
    ):
        configure("no/such.toml", [], default=True)


def test_settings_are_shown_in_columns(capsys):
    """However long a value is, where each is from begins in the same place."""
    Path("accelfn.toml").write_text('[launch]\naxes = "dp_replicate=1,dp_shard=1"\n')
    assert main(["launch", "--show", "--nproc", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()
    begins = {row.index("accelfn.toml") for row in rows if row.endswith("accelfn.toml")}
    begins |= {row.index("default") for row in rows if row.endswith("default")}
    assert len(begins) == 1


def test_config_of_one_machine_forgets_the_others(tmp_path):
    """What is about several machines goes with them, and a launch takes the file."""
    file = tmp_path / "of-many.toml"
    file.write_text(
        '[launch]\nnum_machines = 2\nmain_address = "10.0.0.1"\nmain_port = 29511\n'
        "nproc = 2\n"
    )
    answers = {"num_machines": "1"}

    def ask(question):
        return answers.get(question.partition(":")[0], "")

    assert configure(str(file), [], default=False, ask=ask) == file
    assert read(file) == {"nproc": 2, "num_machines": 1, "max_restarts": 0}


def test_config_without_a_terminal(monkeypatch):
    """Where nobody can be asked, it says what to give instead, and writes nothing."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(LaunchError, match="--default, or --set"):
        configure(None, [], default=False)
    assert not Path("accelfn.toml").exists()


def test_text_is_written_as_it_is_read():
    """Quotes, backslashes and letters of any language survive the file."""
    file = Path("accelfn.toml")
    settings = {"main_address": 'a"b\\c é 漢 😀', "join_timeout": 1.5, "nproc": "auto"}
    file.write_text(edit_settings("", settings), encoding="utf-8")
    assert read(file) == settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[launch]\nnproc = 0\n", "nproc is 0; expected a whole number"),
        ("[launch\n", "cannot be read"),
        ('[launch]\nmachine_rank = 0\nrdzv_id = "a"\n', "cannot be used with"),
    ],
)
def test_env_says_what_is_wrong_with_the_settings(capsys, text, said):
    """A file with a mistake is no reason to say nothing: it may be what is asked about."""
    Path("accelfn.toml").write_text(text)
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert said in found["settings"]["error"]
    assert found["packages"]["torch"]
    assert main(["env"]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_env_shows_the_packages_of_trackers(capsys):
    """Those that are here are shown, with versions: a backend may be what fails."""
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["packages"]
    installed = {each.metadata["Name"]: each.version for each in distributions()}
    packages = ("tensorboard", "wandb", "comet_ml", "matplotlib", "mlflow-skinny")
    for name in packages:
        assert found.get(name) == installed.get(name)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_this_machine_passes(capfd):
    """`accelfn test` prints a line for each thing that works, and a verdict."""
    assert main(["test"]) == 0
    lines = capfd.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["world", "collectives", "training", "checkpoint", "This"]
    assert lines[-1] == "This machine passes the test."
