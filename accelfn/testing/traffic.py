# SPDX-License-Identifier: Apache-2.0
"""`communication`: predict the bytes that a program sends and their time, in simulation."""

import importlib.util
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from importlib import import_module
from itertools import accumulate, chain
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

import attrs
import torch

from accelfn import World, all_reduce
from accelfn.errors import ArgumentError, WorldError
from accelfn.plug import arguments, collectives
from accelfn.testing.simulate import simulate
from accelfn.testing.simulation.calls import PART_FOR_EACH, Entry, check_choice
from accelfn.testing.simulation.group import Algorithm, Cost, Payload, cost, payload_of

# Prediction of a program's collective calls for another number of ranks than in its runs.
#
# The prediction has the same calls as the simulated runs. The payload of each call must be a
# linear function of the number of ranks. Otherwise `foreseen` raises an error that names the
# call.


def foreseen(logs: Mapping[int, Sequence[Entry]], ranks: int) -> list[Payload]:
    """Predict the payload of each collective on a number of ranks, in order.

    Args:
        logs: the logs of at least three runs, by the number of ranks.
        ranks: the number of ranks to predict for.

    Raises:
        ArgumentError: the runs do not determine the payloads.
    """
    if len(logs) < 3:
        sizes = " and ".join(map(str, logs))
        why = f"the program ran only on {sizes} ranks, and three numbers of ranks are needed"
        _refuse(ranks, why)
    _check_same_calls(logs, ranks)
    return [
        _foreseen(dict(zip(logs, entries, strict=True)), ranks)
        for entries in zip(*logs.values(), strict=True)
    ]


def _check_same_calls(logs: Mapping[int, Sequence[Entry]], ranks: int) -> None:
    """Raise an error if a program calls other collectives on another number of ranks."""
    (first, calls), *rest = logs.items()
    for size, entries in logs.items():
        for entry in entries:
            if len(entry.ranks) < size:
                among = f"the axis {entry.group!r}" if entry.group else "two ranks"
                call = _describe_call(entry)
                _refuse(ranks, f"{call} is a call among {among}, not among all ranks")
    for size, entries in rest:
        for a, b in zip(calls, entries, strict=False):
            if _known_by(a) != _known_by(b):
                call = f"{_describe_call(a)} on {first} ranks, but {_describe_call(b)}"
                _refuse(ranks, f"the program calls {call} on {size}")
        more, fewer = (first, size) if len(calls) > len(entries) else (size, first)
        for extra in (*calls[len(entries) :], *entries[len(calls) :]):
            call = f"{_describe_call(extra)} on {more} ranks, but not on {fewer}"
            _refuse(ranks, f"the program calls {call}")


def _known_by(entry: Entry) -> tuple[object, ...]:
    return entry.kind, entry.op, entry.label, entry.step


def _foreseen(entries: Mapping[int, Entry], ranks: int) -> Payload:
    """Predict the payload of one collective on a number of ranks."""
    loads = {size: payload_of(entry) for size, entry in entries.items()}
    like = next(iter(loads.values()))
    kind = like.kind
    pieces = {n: Fraction(e.most, _num_pieces(kind, n)) for n, e in loads.items()}
    piece = _on_a_line(pieces, ranks)
    most = None if piece is None else piece * _num_pieces(kind, ranks)
    if all(load.most * size == load.total for size, load in loads.items()):
        total = None if most is None else most * ranks  # ranks send equally many
    elif all(load.most == load.total for load in loads.values()):
        total = most  # only one rank sends
    else:
        total = _on_a_line({n: Fraction(e.total) for n, e in loads.items()}, ranks)
    if total is None or most is None:
        text = ", ".join(f"{load.total:,} on {size}" for size, load in loads.items())
        call = _describe_call(next(iter(entries.values())))
        why = f"the bytes of {call} do not grow linearly with the number of ranks"
        _refuse(ranks, f"{why} ({text} ranks)")
    return attrs.evolve(like, ranks=ranks, most=int(most), total=int(total))


def _num_pieces(kind: str, size: int) -> int:
    """Return the number of equal pieces that a rank sends in a collective of `size` ranks."""
    if kind in PART_FOR_EACH:
        return size - 1
    return size if kind.startswith("reduce_scatter") else 1


def _on_a_line(values: Mapping[int, Fraction], at: int) -> Fraction | None:
    """Return the value at `at` on a line through all points; None if none fits or it falls.

    A payload that falls with the number of ranks is one piece of a split tensor. The padding or
    the smaller last piece depends on the number of ranks, so a line would be wrong.
    """
    (x, y), (other_x, other_y), *_ = values.items()
    slope = (other_y - y) / (other_x - x)
    if slope < 0 or any(y + slope * (n - x) != value for n, value in values.items()):
        return None
    point = y + slope * (at - x)
    return point if point.denominator == 1 else None


def _describe_call(entry: Entry) -> str:
    label = "" if entry.label is None else f" {entry.label!r}"
    step = "before any update" if entry.step is None else f"at update {entry.step}"
    return f"{entry.kind}{label} {step} ({entry.site})"


def _refuse(ranks: int, why: str) -> NoReturn:
    msg = (
        f"accelfn cannot predict the traffic on {ranks} ranks: {why}. Run the program on"
        f" {ranks} simulated ranks: communication(fn, ranks=[{ranks}])."
    )
    raise ArgumentError(msg)


# `Link`: the latency, the bandwidth and the header bytes of a rank's network link.


_LABEL = "measure the link"
_TIMES = 10
_SECONDS = 0.2
_LARGEST = 2**28


_satisfies = partial(arguments.satisfies, within="")
_is_amount = _satisfies(
    lambda value: arguments.is_number(value) and value >= 0, "a number of at least 0"
)
_is_positive = _satisfies(
    lambda value: arguments.is_number(value) and value > 0, "a number above 0"
)


@attrs.frozen
class Link:
    """The network link of each rank.

    A link sends and receives at the same time, one message at a time in each direction.

    Args:
        latency: the seconds that each message takes, whatever its size.
        bandwidth: the bytes per second in each direction. 1 Mbit/s is 125,000.
        overhead: the bytes of headers and acknowledgments per payload byte. For TCP over
            Ethernet frames of 1,514 bytes it is 0.068: 66 bytes of headers for each 1,448 bytes,
            and an acknowledgment of 66 bytes for every second frame.

    Raises:
        ArgumentError: a number is negative, or the bandwidth is 0.

    Example:
        >>> Link(latency=0.0001, bandwidth=125_000)
        Link(latency=0.0001, bandwidth=125000, overhead=0.0)
    """

    latency: float = attrs.field(validator=_is_amount, kw_only=True)
    bandwidth: float = attrs.field(validator=_is_positive, kw_only=True)
    overhead: float = attrs.field(default=0.0, validator=_is_amount, kw_only=True)

    def seconds(self, cost: Cost) -> float:
        """Return the seconds that a collective takes if each rank has this link."""
        num_bytes = cost.busiest * (1 + self.overhead)
        return cost.rounds * self.latency + num_bytes / self.bandwidth

    @classmethod
    def measured(cls, world: World) -> "Link":
        """Measure the link of a real world, with all-reduces of one number and of many numbers.

        Call `Link.measured` on all ranks. Each rank gets the link of the slowest rank. The
        measured bandwidth counts only payload bytes, so `overhead` is 0.

        Cost: one or two seconds; on a slow link, three all-reduces of 64 KiB.

        Raises:
            WorldError: the world has only one rank, or is simulated.
        """
        if world.size == 1 or world.connection.simulated is not None:
            ranks = "one rank" if world.size == 1 else "simulated ranks"
            msg = (
                f"Link.measured: a world of {ranks} has no network link. Call Link.measured on"
                " all ranks of a real world, or write Link(latency=..., bandwidth=...)."
            )
            raise WorldError(msg)
        _time_sum(1, world)
        small = min(_time_sum(1, world) for _ in range(_TIMES))
        count = 2**14
        large = _time_sum(count, world)
        while large < _SECONDS and count < _LARGEST:
            count *= 4
            large = _time_sum(count, world)
        large = min(large, *(_time_sum(count, world) for _ in range(2)))
        rounds = 2 * (world.size - 1)
        busiest = 4 * (count - 1) * rounds / world.size
        latency = max(small, 0.0) / rounds
        return cls(latency=latency, bandwidth=busiest / max(large - small, 1e-9))


def _time_sum(count: int, world: World) -> float:
    """Return the seconds that the slowest rank needs for an all-reduce of `count` floats."""
    values = torch.zeros(count, device=world.device)
    collectives.sum_(torch.zeros(1, device=world.device), world, label=_LABEL)
    start = time.perf_counter()
    collectives.sum_(values, world, label=_LABEL)
    values[:1].tolist()  # wait for the device
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    return float(all_reduce(seconds.to(world.device), world, "max", label=_LABEL))


Label: TypeAlias = str | None
Log: TypeAlias = tuple[Entry, ...]

_BESIDE_BACKWARD = "DistributedDataParallel backward"


@attrs.frozen(kw_only=True)
class Traffic:
    """The bytes that a program sends on any number of ranks, and the seconds that this takes.

    For a number of ranks that was simulated, the bytes are those of the simulated run. For
    another number of ranks, the bytes are a prediction: the same calls, with payloads that are
    linear in the number of ranks.

    Attributes:
        logs: the collectives of each run, by the number of ranks.
        updates: the number of updates of the program. It is 0 for a program without accelfn's
            steps; all its bytes then count as one update.
    """

    logs: Mapping[int, Log] = attrs.field(repr=lambda logs: f"on {[*logs]} ranks")
    updates: int

    def bytes(self, ranks: int, *, algorithm: Algorithm = "ring") -> dict[Label, int]:
        """Return the bytes that all ranks together send in all updates, by label.

        Network headers and bytes before the first update are not counted.

        Args:
            ranks: the number of ranks, 1 or more.
            algorithm: the algorithm of collectives, as in `Run.sent`.

        Law: the sum of `bytes` and `start` is exactly `simulate(ranks, fn).sent()`. It is 0 for
            one rank. `local_sgd(sync_every=k)` sends in k updates as many bytes as `wrap_ddp`
            sends in one update.

        Raises:
            ArgumentError: the bytes of a call cannot be predicted. The message names the call.
        """
        return _bytes_by_label(self._calls(ranks, algorithm, of_updates=True))

    def start(self, ranks: int, *, algorithm: Algorithm = "ring") -> dict[Label, int]:
        """Return the bytes that all ranks together send before the first update, by label.

        Raises:
            ArgumentError: the bytes of a call cannot be predicted.
        """
        return _bytes_by_label(self._calls(ranks, algorithm, of_updates=False))

    def seconds(
        self,
        link: Link,
        *,
        ranks: int,
        algorithm: Algorithm = "ring",
        compute: float = 0.0,
        overlap: float = 0.0,
    ) -> float:
        """Return the average seconds of an update of the program.

        Args:
            link: the link of each rank.
            ranks: the number of ranks.
            algorithm: the algorithm of collectives, as in `Run.sent`.
            compute: the seconds that a rank computes per update.
            overlap: the backward pass's fraction of `compute`, commonly 2/3. During the backward
                pass, DistributedDataParallel sends its buckets. For example, the bucket that
                completes 40 % of all bytes starts after 40 % of the pass. With 0, communication
                starts only after the computation.

        Law: a larger latency or a smaller bandwidth never gives fewer seconds. The result is
            never less than `compute`.

        Raises:
            ArgumentError: a number is out of range, or the bytes of a call cannot be predicted.
        """
        if not arguments.is_number(compute) or not compute >= 0:
            msg = f"Traffic.seconds(compute={compute!r}): expected seconds, 0 or more."
            raise ArgumentError(msg)
        if not arguments.is_number(overlap) or not 0 <= overlap <= 1:
            msg = f"Traffic.seconds(overlap={overlap!r}): expected a fraction from 0 to 1."
            raise ArgumentError(msg)
        calls = self._calls(ranks, algorithm, of_updates=True)
        # in a prediction, and often in a run, all ranks take part in each call
        is_global = all(len(entry.ranks) == ranks for entry, _ in calls)
        backward = compute * overlap
        slowest = max(
            _wait_seconds([c for c in calls if rank in c[0].ranks], link, backward)
            for rank in range(ranks if ranks in self.logs and not is_global else 1)
        )
        return compute + slowest / max(1, self.updates)

    def table(
        self,
        ranks: Iterable[int],
        *,
        link: Link | None = None,
        algorithm: Algorithm = "ring",
        compute: float = 0.0,
        overlap: float = 0.0,
    ) -> str:
        """Return a table of bytes per update by label, one column per number of ranks.

        With a link, the table has one more line: the seconds per update.

        Raises:
            ArgumentError: for the same reasons as in `bytes` and `seconds`.
        """
        columns = {size: self.bytes(size, algorithm=algorithm) for size in ranks}
        totals = {size: sum(column.values()) for size, column in columns.items()}
        updates = max(1, self.updates)
        rows = [("bytes per update", *(f"{n} rank{'s' * (n != 1)}" for n in columns))]
        for label in dict.fromkeys(chain.from_iterable(columns.values())):
            counts = (column.get(label, 0) for column in columns.values())
            cells = (_per_update(count, updates) for count in counts)
            rows.append(("no label" if label is None else label, *cells))
        rows.append(("all", *(_per_update(t, updates) for t in totals.values())))
        shares = (_per_update(total, updates * n) for n, total in totals.items())
        rows.append(("per rank", *shares))
        if link is not None:
            seconds = partial(self.seconds, link, algorithm=algorithm, compute=compute)
            cells = (f"{seconds(ranks=n, overlap=overlap):.3g}" for n in columns)
            rows.append(("seconds per update", *cells))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines: list[str] = []
        for first, *rest in rows:
            cells = (o.rjust(w) for o, w in zip(rest, widths[1:], strict=True))
            lines.append("  ".join([first.ljust(widths[0]), *cells]))
        return "\n".join(lines)

    _repr_html_ = arguments.text_as_html

    def __str__(self) -> str:
        """Return the table for the numbers of ranks of the runs."""
        return self.table(self.logs)

    def _calls(
        self, ranks: int, algorithm: Algorithm, *, of_updates: bool
    ) -> list[tuple[Entry, Cost]]:
        """Return the collectives of a run, each with its cost on this number of ranks."""
        if not arguments.is_integer(ranks, 1):
            msg = f"Traffic: expected a number of ranks, 1 or more, got {ranks!r}."
            raise ArgumentError(msg)
        check_choice("Traffic", "algorithm", algorithm, Algorithm)
        # without updates, the whole log counts as one update
        logs = {
            size: [
                e for e in log if (e.step is not None or not self.updates) is of_updates
            ]
            for size, log in self.logs.items()
        }
        entries = logs.get(ranks, next(iter(logs.values())))
        if ranks in logs:
            payloads = [payload_of(entry) for entry in entries]
        elif ranks == 1:  # a single rank sends nothing
            payloads = [attrs.evolve(payload_of(entry), ranks=1) for entry in entries]
        else:
            payloads = foreseen(logs, ranks)
        costs = (cost(payload, algorithm) for payload in payloads)
        return list(zip(entries, costs, strict=True))


def _bytes_by_label(calls: Iterable[tuple[Entry, Cost]]) -> dict[Label, int]:
    totals: defaultdict[Label, int] = defaultdict(int)
    for entry, share in calls:
        totals[entry.label] += share.num_bytes
    return dict(totals)


def _per_update(total: int, parts: int) -> str:
    quotient, rest = divmod(total, parts)
    return f"{quotient:,}" if not rest else f"{total / parts:,.1f}"


def _wait_seconds(
    calls: Sequence[tuple[Entry, Cost]], link: Link, backward: float
) -> float:
    """Return the seconds that a rank waits in its collectives, over all updates."""
    buckets: defaultdict[int | None, list[Cost]] = defaultdict(list)
    seconds = 0.0
    for entry, share in calls:
        if entry.label == _BESIDE_BACKWARD:
            buckets[entry.step].append(share)
        else:
            seconds += link.seconds(share)
    return seconds + sum(
        _after_backward(costs, link, backward) for costs in buckets.values()
    )


def _after_backward(buckets: Sequence[Cost], link: Link, backward: float) -> float:
    """Return the seconds that buckets still take after the end of the backward pass."""
    total = sum(bucket.num_bytes for bucket in buckets) or 1
    sums = accumulate(bucket.num_bytes for bucket in buckets)
    now = 0.0
    for bucket, num_bytes in zip(buckets, sums, strict=True):
        now = max(now, backward * num_bytes / total) + link.seconds(bucket)
    return max(0.0, now - backward)


def communication(
    fn: Callable[[World], object],
    *,
    ranks: Iterable[int] = (2, 3, 5),
    axes: Mapping[str, int] | None = None,
    device: str | torch.device = "cpu",
) -> Traffic:
    """Run a program on a few simulated ranks, and predict its traffic on any number of ranks.

    Let the program train for a few updates, as on real machines. If a transform communicates
    only in some updates, train for whole periods: 8 updates of `local_sgd(sync_every=8)`.

    Args:
        fn: the function that each rank runs, as in `simulate`.
        ranks: the numbers of ranks to simulate. A prediction for other numbers needs at least
            three of them.
        axes: the axes of the world, as in `simulate`. Bytes that are sent along only some axes
            cannot be predicted for other numbers of ranks.
        device: with "meta", tensors have shapes but no values, for a model that does not fit in
            memory. The model's factory then runs on meta. A model that is not a factory must be
            created under `af.empty_weights`.

    Raises:
        ArgumentError: a number of ranks is below 2, or the number of updates depends on the
            number of ranks.
        ModelError: on meta, a transform compiles the model, or ranks send activations under
            `autocast`.
        SimulationError: on meta, the program or a transform reads a value.
        Exception: an error of `simulate`.

    Law: see `Traffic.bytes`. The calls on meta are the same as with values.

    Cost: one run of `simulate` per number of ranks. On meta, no memory for the model, and half a
    second of CPU time per rank and update for a Llama model of 7 billion parameters.

    Example:
        >>> import torch
        >>> import accelfn as af
        >>> from accelfn.testing import communication
        >>> def mean(world):
        ...     return af.all_reduce(torch.zeros(1000), world, "mean", label="mean of scores")
        >>> traffic = communication(mean)
        >>> traffic.bytes(64)
        {'mean of scores': 504000}
    """
    sizes = list(dict.fromkeys(ranks))
    if not sizes or not all(arguments.is_integer(size, 2) for size in sizes):
        msg = (
            f"communication(ranks={sizes}): expected numbers of ranks, each 2 or more."
        )
        raise ArgumentError(msg)
    runs = {size: simulate(size, fn, axes=axes, device=device) for size in sizes}
    updates = {size: run.updates for size, run in runs.items()}
    if len(set(updates.values())) > 1:
        text = ", ".join(f"{count} on {size} ranks" for size, count in updates.items())
        msg = (
            f"communication: the number of updates depends on the number of ranks: {text}. Let"
            " the program make the same number of updates on any number of ranks."
        )
        raise ArgumentError(msg)
    logs = {size: run.log for size, run in runs.items()}
    return Traffic(logs=logs, updates=max(updates.values()))


# `accelfn traffic`: print the traffic of functions in a file as tables.


Program = Callable[[World], object]

_MEGABIT = 125_000
_TCP = 0.068  # bytes of headers and acknowledgments per byte, over Ethernet


def foresee(programs: Sequence[str], *, ranks: str, link: str | None) -> Iterator[str]:
    """Yield the table of each program.

    Args:
        programs: names `FILE.py:FUNCTION` or `MODULE:FUNCTION` of functions that take a world.
        ranks: numbers of ranks, separated by commas.
        link: megabits per second and milliseconds of latency, separated by a comma.

    Raises:
        ArgumentError: an argument is malformed, the function does not exist, or an error of
            `communication`.
    """
    sizes, network = _sizes(ranks), None if link is None else _link(link)
    twice = {name for name in programs if programs.count(name) > 1}
    if twice:
        msg = f"{min(twice)} is named twice. Name each program once."
        raise ArgumentError(msg)
    named = {name: _program(name) for name in programs}
    traffics = {name: communication(program) for name, program in named.items()}
    for name, traffic in traffics.items():
        yield f"{name}\n{traffic.table(sizes, link=network)}\n"


def _sizes(ranks: str) -> list[int]:
    words = ranks.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        msg = f"--ranks {ranks!r}: expected numbers of ranks, such as 2,8,64."
        raise ArgumentError(msg)
    return [int(word) for word in words]


def _link(link: str) -> Link:
    try:
        megabits, milliseconds = map(float, link.split(","))
    except ValueError:
        msg = (
            f"--link {link!r}: expected megabits per second and milliseconds of latency, such as"
            " 1000,0.1."
        )
        raise ArgumentError(msg) from None
    latency, bandwidth = milliseconds / 1000, megabits * _MEGABIT
    return Link(latency=latency, bandwidth=bandwidth, overhead=_TCP)


def _program(word: str) -> Program:
    """Return the function that a command-line argument names."""
    source, _, name = word.rpartition(":")
    if not source or not name:
        msg = f"{word!r} is not a program. Write FILE.py:FUNCTION, such as train.py:train."
        raise ArgumentError(msg)
    module = _file(Path(source)) if source.endswith(".py") else _module(source)
    function: Any = getattr(module, name, None)
    if not callable(function):
        msg = (
            f"{source} has no function {name!r}. Name a function that takes a World and trains"
            " for a few updates."
        )
        raise ArgumentError(msg)
    return function


def _file(path: Path) -> ModuleType:
    module = import_script(path) if arguments.is_file(path) else None
    if module is None:
        msg = f"The file {path} does not exist. Write the path from the current directory."
        raise ArgumentError(msg)
    return module


def import_script(path: Path) -> ModuleType | None:
    """Import a script under another name, so that `if __name__ == "__main__"` does not run.

    Return None if Python cannot import files with this suffix.
    """
    name = f"script {path}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    sys.path.insert(0, str(path.parent))  # as `python script.py` does
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".", maxsplit=1)[0] and error.name != name:
            raise
        msg = f"Python finds no module {name!r}. Name a file instead, such as train.py:train."
        raise ArgumentError(msg) from None
