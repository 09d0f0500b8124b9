# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of one run on this machine, and say which of them failed first.

What torch's agent does is in `agent`. Here is what a person at a terminal needs: rank 0
owns the terminal, the other ranks' lines say whose they are, and a run that fails ends
with one report that begins with its cause.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager
from io import TextIOWrapper
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from accelfn.base import paths
from accelfn.errors import LaunchError
from accelfn.launching.machines import Machines, Plan, interface_of
from accelfn.world.axes import VARIABLE
from accelfn.world.regrouping import VARIABLE as ELASTIC

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from accelfn.launching.agent import Ended

_WORKER = str(Path(__file__).with_name("worker.py"))
_ALONE = "the ranks of one machine talk on its loopback"
_ASKED = "the axes that were asked for"
_MAY_GO = "ranks may be killed, and others take their places"


def launch_script(
    script: str,
    args: Sequence[str],
    plan: Plan,
    *,
    module: bool = False,
) -> int:
    """Run a script in several processes on this machine, one rank each.

    Each process runs it as `python script args…` would, with the environment that
    torchrun sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, …).
    When one fails, the others are ended, and a report on standard error begins with
    the rank that failed first.

    Args:
        script: the path of a Python file, or the name of a module.
        args: what the script finds in `sys.argv[1:]`.
        plan: how many processes, and with which other machines.
        module: whether `script` is a module's name, as after `python -m`.

    Returns:
        The exit code for the command: 0; that of the rank that failed first; or
        128 + n, where signal n ended that rank or this process.

    Raises:
        LaunchError: `script` cannot be, or the machines did not meet; no
            process was started.
    """
    _check(script, module=module)
    # Here, not above: help and mistakes need none of torch's launcher.
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415
        SignalException,
    )

    # Rank 0 writes to the terminal itself, so that progress bars see one. What the
    # others write is followed line by line, and this process must not hold it back.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    command = [*(["-m"] if module else []), script, *args]
    try:
        ended = run_here(command, plan)
    except SignalException as error:
        say(f"ended by {error.sigval.name}, and its workers with it.")
        return 128 + error.sigval
    if ended.failures:
        say(ended.report)
    return ended.exit_code


def run_here(command: Sequence[str], plan: Plan, *, follow_all: bool = False) -> Ended:
    """Run ranks as `run_ranks` does, and leave this process as it was.

    Args:
        command: what each rank runs: a file, or `-m` and a module, and arguments.
        plan: how many, and with which other machines.
        follow_all: as of `run_ranks`.
    """
    from accelfn.launching.agent import run_ranks  # noqa: PLC0415  as above

    if plan.machines.rank is None:
        say(f"{_describe_trust(plan.machines)}.")
    variables = _variables(plan)
    for name, (value, why) in variables.items():
        is_usual = f"{name}={value}" == "OMP_NUM_THREADS=1"
        if why not in (_ALONE, _ASKED, _MAY_GO) and not is_usual:
            say(f"{name}={value} ({why}).")
    lent = {name: value for name, (value, _) in variables.items()}
    with (
        tempfile.TemporaryDirectory(prefix="accelfn-launch-") as log_dir,
        _environment(lent),
        _signal_handlers_kept(),
        _torch_log_muted(),
    ):
        return run_ranks(
            [_WORKER, str(os.getpid()), *command],
            plan,
            log_dir=log_dir,
            follow_all=follow_all,
            say=say,
        )


def _check(script: str, *, module: bool) -> None:
    if module or paths.is_file(Path(script)):
        return
    if paths.is_directory(Path(script)):
        msg = f"{script!r} is a directory; name a script in it, or a module after -m."
    else:
        msg = (
            f"there is no file {script!r} in {Path.cwd()}; "
            "name a Python script, or a module after -m."
        )
    raise LaunchError(msg)


def _variables(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return the variables that ranks get beside torchrun's: each value, and why."""
    return {
        **({} if plan.axes is None else {VARIABLE: (plan.axes, _ASKED)}),
        **({} if plan.least is None else {ELASTIC: ("0", _MAY_GO)}),
        **_shared_threads(plan.nproc),
        **_gloo_interface(plan.machines),
        **_own_stores(plan.machines),
    }


def _shared_threads(nproc: int) -> dict[str, tuple[str, str]]:
    """Divide the cores among the workers, where the user has not done so.

    Left alone, each worker would start a thread for every core. torchrun says 1.
    """
    if nproc == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    num_cores = len(os.sched_getaffinity(0))
    num_threads = max(1, num_cores // nproc)
    return {
        "OMP_NUM_THREADS": (str(num_threads), f"{num_cores} cores, {nproc} workers")
    }


def _gloo_interface(machines: Machines) -> dict[str, tuple[str, str]]:
    """Have Gloo use the way to the other machines, where the user has not named one.

    Left alone, it takes the interface that the machine's own name resolves to, which is
    often the one that leads nowhere. The ranks of one machine need none that others reach.
    """
    name, interface = "GLOO_SOCKET_IFNAME", machines.interface
    if name in os.environ:
        return {}
    if machines.most == 1 and ip_address(machines.address).is_loopback:
        loopback = interface_of("127.0.0.1")
        return {} if loopback is None else {name: (loopback, _ALONE)}
    if interface is None:
        return {}
    why = f"which has {machines.address}, towards {machines.endpoint}"
    return {name: (interface, why)}


def _own_stores(machines: Machines) -> dict[str, tuple[str, str]]:
    """Have torch's rendezvous open a store for each attempt; see `rendezvous`."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if machines.rank is not None or name in os.environ:
        return {}
    return {name: ("1", "ranks that start again need a store of their own")}


def planned(plan: Plan) -> list[str]:
    """Return in lines what a launch would do."""
    machines = plan.machines
    what = "1 process" if plan.nproc == 1 else f"{plan.nproc} processes"
    lines = [f"starts {what} on this machine"]
    if machines.rank is not None and machines.endpoint != Machines().endpoint:
        lines.append(
            f"meets as {machines.rank} of {machines.most} at {machines.endpoint}"
        )
    elif machines.most > 1:
        counts = f"{machines.fewest} to {machines.most}"
        lines.append(f"meets {counts} machines at {machines.endpoint}")
    if machines.rank is None:
        lines.append(_describe_trust(machines))
    if plan.least is not None:
        lines.append(
            f"goes on where ranks are killed, as long as {plan.least} are left"
        )
    variables = _variables(plan)
    return lines + [
        f"sets {name}={value} ({why})" for name, (value, why) in variables.items()
    ]


def _describe_trust(machines: Machines) -> str:
    """Return in words who can run code in a launch whose machines meet dynamically."""
    return (
        f"machines unpickle records at {machines.endpoint}: whoever can reach that port runs"
        " code as you; --machine-rank and --main-address need no pickle"
    )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables for the ranks to inherit, and have them as they were afterwards."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _signal_handlers_kept() -> Generator[None]:
    """Put back the handlers that torch's launcher replaces and leaves replaced."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    handlers = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _torch_log_muted() -> Generator[None]:
    """Leave what torch's launcher logs about a failure to our one report."""
    log = logging.getLogger("torch.distributed.elastic")
    nowhere, propagate = logging.NullHandler(), log.propagate
    log.addHandler(nowhere)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(nowhere)
        log.propagate = propagate


def say(text: str) -> None:
    """Say something in the launcher's own name."""
    sys.stdout.flush()  # what the ranks wrote comes first
    sys.stderr.write(f"accelfn launch: {text}\n")
    sys.stderr.flush()
