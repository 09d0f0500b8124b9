# SPDX-License-Identifier: Apache-2.0
"""`accelfn launch`: the script as Python would run it, on each rank; then its end."""

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.internals import MachinePlan as Plan
from tests.internals import launch_script, main
from tests.ranks.commands import run
from tests.waiting import HANGS, is_gone, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
ARGS = ["--lr", "$local_rank ${x} $$", "", "--", "-h", "--nproc"]

pytestmark = pytest.mark.ranks(2)


def launch(*words):
    return main(["launch", "--nproc", *map(str, words)])


def report(capfd):
    _, _, text = capfd.readouterr().err.rpartition("accelfn launch: ")
    return text.splitlines()


@pytest.mark.parametrize("script", ["scripts/tells.py", "-m scripts.tells"])
def test_script_finds_what_python_gives_it(capfd, monkeypatch, script):
    """`__main__`, `__file__`, `sys.argv`, `sys.path` are those of `python script`."""
    monkeypatch.chdir(SCRIPTS.parent)
    words = [*script.split(), *ARGS]
    _, plain, _ = run(sys.executable, *words)
    assert launch(1, *words) == 0
    expected, found = json.loads(plain), json.loads(capfd.readouterr().out)
    for details in (expected, found):
        del details["env"]
        details["main"][2] = re.sub("object at 0x.*?>", "", str(details["main"][2]))
    assert found == expected


def test_processes_of_the_script_find_its_functions(capfd):
    """Workers, spawned or forked from a server, import the script's functions."""
    assert launch(1, SCRIPTS / "spawns.py") == 0
    assert capfd.readouterr().out == "spawn [2, 4]\nforkserver [2, 4]\n"


@pytest.mark.slow
def test_raising_rank_ends_the_run_and_is_named_first(capfd):
    """D: the cause comes first, its traceback once, then who lost it in a collective."""
    assert launch(2, SCRIPTS / "fails.py", "raise") == 1
    text = "".join(capfd.readouterr())
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count("ValueError: rank 1 is out of luck") == 1
    lines = text.rpartition("accelfn launch: ")[2].splitlines()
    assert re.fullmatch(
        r"rank 1 failed first \(exit code 1, pid \d+\) after \d+\.\d s", lines[0]
    )
    assert lines[1] == "Traceback (most recent call last):"
    assert f'File "{SCRIPTS / "fails.py"}"' in lines[2]
    assert lines[-2] == "ValueError: rank 1 is out of luck"
    assert re.match("rank 0 (followed: [A-Z].*Error|was ended by SIGTERM)", lines[-1])


def test_a_hook_of_the_programs_own_is_called(capfd, tmp_path):
    """And what it shows is shown, beside the launcher's report."""
    script = tmp_path / "hooks.py"
    script.write_text(
        "import sys\n"
        "sys.excepthook = lambda *_: print('seen by a hook', file=sys.stderr)\n"
        "raise ValueError('out of luck')\n"
    )
    assert launch(1, script) == 1
    errors = capfd.readouterr().err
    assert errors.count("seen by a hook") == 1
    assert errors.count("ValueError: out of luck") == 1


@pytest.mark.slow
def test_ranks_in_different_collectives(capfd):
    """Where Gloo aborts a rank, the report says what may be the cause, and how to see it."""
    assert launch(2, SCRIPTS / "fails.py", "part") == 128 + signal.SIGABRT
    lines = report(capfd)
    assert "failed first (killed by SIGABRT, pid " in lines[0]
    assert "ranks were in different collectives" in lines[1]
    assert "accelfn.testing.simulate(2, train)" in lines[1]
    assert "World.from_env(checked=True) only finds calls such as" in lines[1]


@pytest.mark.parametrize(
    ("way", "code", "ending", "detail"),
    [
        ("exit", 7, "exit code 7", "SystemExit: 7"),
        ("_exit", 5, "exit code 5", "It left no traceback"),
        ("kill", 137, "killed by SIGKILL", "It left no traceback"),
    ],
)
def test_exit_code_is_that_of_the_first_to_fail(capfd, way, code, ending, detail):
    """However a rank ends, the command ends so, and the other rank is ended."""
    assert launch(2, SCRIPTS / "fails.py", way) == code
    lines = report(capfd)
    assert lines[0].startswith(f"rank 1 failed first ({ending}, pid ")
    assert lines[-2].startswith(detail)
    assert lines[-1] == "rank 0 was ended by SIGTERM"


def test_ranks_have_torchruns_environment_and_this_process_its_own(monkeypatch, capfd):
    """Signal handlers, variables and torch's log are here as before; rank 1 has a prefix."""
    log = logging.getLogger("torch.distributed.elastic")
    of_log = [*log.handlers], log.propagate
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ACCELFN_AXES", "dp_shard=1")
    environment = dict(os.environ)
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    handlers = [signal.getsignal(number) for number in signals]
    script = str(SCRIPTS / "tells.py")
    assert launch_script(script, [], Plan(nproc=2, axes="dp_shard=-1")) == 0
    assert [signal.getsignal(number) for number in signals] == handlers
    assert dict(os.environ) == environment
    assert (log.handlers, log.propagate) == of_log
    lines = capfd.readouterr().out.splitlines()
    (first,) = (json.loads(line) for line in lines if line.startswith("{"))
    (second,) = (json.loads(line[9:]) for line in lines if line.startswith("[rank 1] "))
    assert len(lines) == 2
    for rank, found in enumerate([first["env"], second["env"]]):
        assert int(found.pop("MASTER_PORT")) > 0
        numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}
        numbers |= {"LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        expected = {name: str(number) for name, number in numbers.items()}
        assert found == {**expected, "MASTER_ADDR": "127.0.0.1"}


def test_the_one_report_is_ours(capfd, caplog):
    """What torch's launcher logs of a failure reaches no handler, and logs on afterwards."""
    log = logging.getLogger("torch.distributed.elastic.agent")
    with caplog.at_level(logging.INFO):
        assert launch(2, SCRIPTS / "fails.py", "_exit") != 0
        assert [each for each in caplog.records if each.name.startswith("torch.")] == []
        log.error("told again")
    assert caplog.messages[-1] == "told again"
    assert "failed first" in "\n".join(report(capfd))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_and_rank_0_has_the_terminal(number):
    """Ctrl-C and SIGTERM end every rank, without a traceback of the launcher."""
    here, there = pty.openpty()
    words = ["-m", "accelfn", "launch", "--nproc", "2", SCRIPTS / "waits.py"]
    command = subprocess.Popen(
        [sys.executable, *words], stdout=there, stderr=there, start_new_session=True
    )
    os.close(there)
    text = ""
    while text.count("waits") < 2:
        text += os.read(here, 4096).decode()
    command.send_signal(number)
    text += "".join(iter(lambda: read_or_end(here), ""))
    os.close(here)
    assert command.wait(HANGS) == 128 + number
    assert text.count("terminal True") == 1
    assert "[rank 1] terminal False" in text
    assert "cli.py" not in text
    for pid in re.findall(r"process (\d+)", text):
        wait_until(partial(is_gone, int(pid)))


def read_or_end(terminal):
    """Read from a terminal; it raises at its end where a file gives nothing."""
    try:
        return os.read(terminal, 4096).decode()
    except OSError:
        return ""


def only_loopback(texts):
    return all(
        addresses and all(ip_address(each).is_loopback for each in addresses)
        for addresses in texts
    )


IS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the tables are Linux's")


@IS_LINUX
@pytest.mark.slow
def test_a_launch_on_one_machine_listens_on_the_loopback(capfd):
    """C: neither the launcher's store nor a rank can be reached from another machine."""
    assert launch(2, SCRIPTS / "listens.py", "launcher") == 0
    captured = capfd.readouterr()
    assert only_loopback(json.loads(captured.out))
    assert captured.err == ""  # it is nothing to speak of


@IS_LINUX
@pytest.mark.slow
def test_ranks_that_open_their_own_store():
    """C: without a launcher, rank 0's store is where MASTER_ADDR says, and nowhere else."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "GLOO_SOCKET_IFNAME": "lo"}
    code, out, error = run(sys.executable, SCRIPTS / "listens.py", **place, **meet)
    assert code == 0, error
    assert only_loopback(json.loads(out))
