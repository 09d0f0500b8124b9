# SPDX-License-Identifier: Apache-2.0
"""Use accelfn where names of Linux are hidden: `python -m tests.other_systems windows`.

It prints each use that worked.
"""

import mmap
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

_AFFINITY = "sched_getaffinity sched_setaffinity"
_WAITS = "waitid WEXITED WNOWAIT P_PID"
_UNIX = (
    "fork register_at_fork getuid geteuid killpg setsid O_NOFOLLOW O_CLOEXEC O_NONBLOCK pread"
    " pwrite preadv pwritev posix_fallocate posix_fadvise statvfs sysconf uname fchmod"
)
_SIGNALS = "SIGKILL SIGSTOP SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGCHLD SIGCONT"
_MAPS = " ".join(n for n in dir(mmap) if n.startswith(("MAP_", "MADV_", "PROT_")))
MISSING: dict[str, dict[Any, str]] = {
    "darwin": {os: f"{_WAITS} {_AFFINITY}", mmap: "MADV_HUGEPAGE"},
    "win32": {
        os: f"{_UNIX} {_WAITS} {_AFFINITY}",
        signal: f"{_SIGNALS} pthread_kill pthread_sigmask",
        mmap: _MAPS,
    },
}
"""Names of modules that a system lacks."""


def hide(system: str) -> None:
    """Remove what the system lacks, for the rest of this process."""
    sysconfig.get_config_vars()  # read under the true name of the system
    for module, names in MISSING[system].items():
        for name in filter(vars(module).__contains__, names.split()):
            delattr(module, name)
    if system == "win32":
        sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "grp"))
        open_file = os.open

        def open_(path: Any, *args: Any, **options: Any) -> int:
            if Path(path).is_dir():
                raise PermissionError(13, "Permission denied", str(path))
            return open_file(path, *args, **options)

        os.open = open_
        shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.platform = system


def uses(folder: Path) -> dict[str, Callable[[], object]]:
    """Return what a user does, by name."""
    import accelfn as af
    from accelfn.errors import LaunchError
    from accelfn.testing import simulate

    rows = torch.linspace(-1, 1, 96).reshape(96, 1)
    step = af.make_step(lambda model, x: (model(x) - 3 * x).square().mean())

    def start(world: Any = None, setup: Any = None) -> Any:
        return af.TrainState.create(
            model=lambda: nn.Linear(1, 1),
            optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            data=af.Data(rows, global_batch_size=32, shuffle=True),
            setup=setup,
            world=world or af.World.single(),
        )

    def train(state: Any) -> Any:
        for batch in af.batches(state, until_epoch=2):
            state, _ = step(state, batch)
        return state

    def save(world: Any = None, setup: Any = None, name: str = "alone") -> None:
        state = train(start(world, setup))
        af.save(state, folder / name)
        other = af.load(start(world, setup), folder / name)
        one, two = (af.full_params(each, at="train") for each in (state, other))
        assert all(torch.equal(one[name], two[name]) for name in one)

    def run() -> None:
        with (
            af.track.jsonl(folder / "log.jsonl", world=af.World.single()) as tracker,
            af.CheckpointStore(folder / "store", every=2) as store,
        ):
            losses = {2: lambda state, metrics: metrics.all_reduce_mean(state.world)}
            af.run(start(), step, until=4, actions=losses, track=tracker, store=store)
            assert len(store.steps) == 2

    def launch() -> None:
        try:
            af.launch(2, lambda world: world.rank)
        except LaunchError as error:
            assert "torchrun" in str(error)  # noqa: PT017 - no pytest here
        else:
            raise AssertionError

    sharded = af.chain(af.shard_data(), af.wrap_fsdp())
    return {
        "train": lambda: train(start()),
        "save": save,
        "run": run,
        "simulate": lambda: simulate(2, partial(save, setup=sharded, name="sharded")),
        "export": lambda: af.export_model(start(), folder / "model", at="train"),
        "reject launch": launch,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    hide(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        for use, function in uses(Path(name)).items():
            function()
            sys.stdout.write(f"{use}\n")
