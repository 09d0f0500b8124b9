# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at random instants of real loops: `python -m tests.laws.interrupting 100`.

The number is that of interrupts of each kind of loop in one process; two ranks, of which
each pair takes only one, are started a tenth as often. A line of JSON is printed at the end:
by kind, how many interrupts there were, and how many states were lost, had to be salvaged,
or were wrong.
"""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import accelfn as af
from tests.strategies import differences, tensors
from tests.waiting import HANGS, heard

FORK = multiprocessing.get_context("fork")
SETUPS = {
    "plain": af.ema(0.5),
    "accumulate": af.accumulate(num_micro_batches=3),
    "optimizer_in_backward": af.optimizer_in_backward(),
    "run": None,
    "saving": None,
    "ddp": af.chain(af.shard_data(), af.wrap_ddp()),
}
UPDATES = 12
X = torch.linspace(-1, 1, 8 * 8 * UPDATES).reshape(-1, 8)
Found = dict[str, torch.Tensor]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))


def loss_fn(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return net(batch).square().mean()


def create(kind: str, world: af.World | None = None) -> af.TrainState:
    return af.TrainState.create(
        model=model,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        data=af.Data(X, global_batch_size=8),
        setup=SETUPS[kind],
        world=world,
    )


def same(one: Found, two: Found) -> bool:
    return differences(one, two) == []


def undisturbed(state: af.TrainState) -> list[Found]:
    """Return what a state is after each number of updates; the state stays."""
    step, state = af.make_step(loss_fn), state.copy()
    found = [tensors(state)]
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)
        found.append(tensors(state))
    return found


def loop(kind: str, holder: SimpleNamespace, folder: str) -> None:
    """Train to the end of an epoch, and forever again, holding what a notebook would."""
    step = af.make_step(loss_fn)
    for turn in itertools.count():
        if holder.state.cursor.epoch:
            holder.state = holder.first.copy()
        if kind == "run":
            given = holder.state
            holder.state = af.run(given, step, until=UPDATES)
            continue
        for batch in af.batches(holder.state, until_epoch=1):
            holder.state, _ = step(holder.state, batch)
            if kind == "saving":
                path = Path(folder) / f"{turn}-{holder.state.step}"
                shutil.rmtree(path, ignore_errors=True)
                af.save(holder.state, path)
                holder.saved = path


def judged(holder: SimpleNamespace, expected: list[Found], kind: str) -> str:
    """Return what an interrupt has left of a state: nothing wrong, and it goes on."""
    state = holder.state
    word = "kept"
    if state.lease.is_over:
        try:  # the loop of af.run stands in a function
            state, word = af.salvage(state), "kept" if kind == "run" else "salvaged"
        except af.errors.StateDonatedError:
            holder.state = holder.first.copy()
            return "lost"
    if not same(expected[state.step], tensors(state)):
        return "wrong"
    holder.state = state
    if holder.saved is not None:
        loaded = af.load(holder.first.copy(), holder.saved)
        if not same(expected[loaded.step], tensors(loaded)):
            return "wrong"
    if state.world.size == 1 and state.step < UPDATES:
        step = af.make_step(loss_fn)
        batch = next(iter(af.batches(state, until_epoch=1)))
        after, _ = step(state, batch, donate=False)
        if not same(expected[after.step], tensors(after)):
            return "wrong"
    return word


def trainer(kind: str, count: int, folder: str, pipe: Connection) -> None:
    """Be interrupted `count` times; say each time when to begin, and what was left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    first = create(kind)
    expected = undisturbed(first)
    holder = SimpleNamespace(first=first, state=first.copy(), saved=None)

    def swallowed(ignored: Any) -> None:
        if ignored.exc_type is KeyboardInterrupt:
            pipe.send(f"swallowed in {ignored.object}")

    # CPython ignores an interrupt that it takes in a callback of the garbage collector, and
    # its own modules have such: threading's, the import system's. Who sits there presses
    # again. That ours have none is a law of its own, in test_interrupts.
    sys.unraisablehook = swallowed
    for _ in range(count):
        try:
            pipe.send("go")
            loop(kind, holder, folder)
        except (KeyboardInterrupt, SystemExit):  # which is how af.run ends
            pipe.send(judged(holder, expected, kind))


def interrupt(process: Any, pipe: Connection, seconds: float) -> Iterator[Any]:
    """Yield what a trainer says of one interrupt after another, at moments that are drawn."""
    draws = random.Random(0)  # noqa: S311 - nobody is to be surprised
    while True:
        try:
            if heard(pipe) != "go":
                raise AssertionError(kind_of_end(process))
        except EOFError:
            return
        said = "swallowed"
        while said.startswith("swallowed"):
            time.sleep(draws.uniform(0, seconds))
            os.kill(process.pid, signal.SIGINT)
            said = heard(pipe)
        yield said


def kind_of_end(process: Any) -> str:
    return f"{process.name} said something else, exit code {process.exitcode}"


def alone(kind: str, count: int) -> list[str]:
    """Interrupt a loop in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = FORK.Pipe()
        process = FORK.Process(
            target=trainer, args=(kind, count, folder, theirs), name=kind
        )
        process.start()
        theirs.close()
        told = list(interrupt(process, ours, 0.02))
        process.join(HANGS)
    return told


def rank(number: int, port: int, pipe: Connection) -> None:
    """Train as one of two until an interrupt, or until the other is gone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with af.World.from_env(device="cpu", timeout=60) as world:
        first = create("ddp", world)
        expected = undisturbed(first)
        holder = SimpleNamespace(first=first, state=first.copy(), saved=None)
        try:
            pipe.send("go")
            loop("ddp", holder, "")
        except (KeyboardInterrupt, af.errors.Error):
            # its own may come after it has heard of the other's
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            pipe.send(judged(holder, expected, "ddp"))


def pair(seconds: float, *, both: bool) -> list[str]:
    """Interrupt two ranks, or one of them; return what each says of its state."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [FORK.Pipe() for _ in range(2)]
    processes = [
        FORK.Process(target=rank, args=(i, port, theirs), name=f"rank {i}")
        for i, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for ours, theirs in pipes:
        theirs.close()
        if heard(ours) != "go":
            raise AssertionError(ours)
    time.sleep(seconds)
    for process in processes[: 2 if both else 1]:
        os.kill(process.pid, signal.SIGINT)
    told = [heard(ours) for ours, _ in pipes]
    for process in processes:
        process.join(HANGS)
    return told


def main(count: int) -> dict[str, dict[str, int]]:
    """Interrupt loops of all kinds; return what became of their states."""
    draws = random.Random(1)  # noqa: S311 - as above
    found: dict[str, list[str]] = {}
    for kind in SETUPS:
        if kind == "ddp":
            times = range(max(1, count // 10))
            pairs = (pair(draws.uniform(0, 0.1), both=bool(i % 2)) for i in times)
            found[kind] = [each for told in pairs for each in told]
        else:
            found[kind] = alone(kind, count)
    return {
        kind: {"interrupts": len(told), **{word: told.count(word) for word in WORDS}}
        for kind, told in found.items()
    }


WORDS = ("lost", "wrong", "salvaged")

if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))  # noqa: T201 - the answer
