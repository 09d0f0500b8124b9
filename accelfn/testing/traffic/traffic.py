# SPDX-License-Identifier: Apache-2.0
"""`communication`: what a program sends, and how long that takes, before there are machines."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import attrs
import torch

from accelfn.base.arguments import is_integer, is_number
from accelfn.base.calling import called
from accelfn.errors import ArgumentError
from accelfn.testing.simulate import simulate
from accelfn.testing.simulation.entries import Entry
from accelfn.testing.simulation.wire import (
    Algorithm,
    Cost,
    check_algorithm,
    cost,
    given,
)
from accelfn.testing.traffic.foresight import foreseen
from accelfn.testing.traffic.link import Link
from accelfn.testing.traffic.written import written
from accelfn.world import World

Label: TypeAlias = str | None
Log: TypeAlias = tuple[Entry, ...]

_BESIDE_BACKWARD = "DistributedDataParallel backward"


@attrs.frozen(kw_only=True)
class _Call:
    """A collective of a program, on the ranks that take part."""

    label: Label
    step: int | None
    ranks: Sequence[int]
    cost: Cost


@attrs.frozen(kw_only=True)
class Traffic:
    """What a program sends: bytes by label on any number of ranks, and seconds on a link.

    On the ranks on which it ran it is what they sent. On others it is foreseen: the same
    calls, with payloads that lie on a straight line in the number of ranks.

    Attributes:
        logs: what was sent, by the number of ranks.
        updates: how many updates the program took; 0 where it takes no step of accelfn's, and
            all that it sends is counted as one update's.
    """

    logs: Mapping[int, Log] = attrs.field(repr=lambda logs: f"on {[*logs]} ranks")
    updates: int

    def bytes(self, ranks: int, *, algorithm: Algorithm = "ring") -> dict[Label, int]:
        """Return what all ranks together send over the wire in all updates, by label.

        Headers of the network are not counted, nor what is sent before the first update.

        Args:
            ranks: how many there are, 1 or more.
            algorithm: as in `Run.sent`.

        Law: with `start` it is `simulate(ranks, fn).sent()`, exactly; 0 for one rank.
            `local_sgd(sync_every=k)` over k updates sends what `wrap_ddp` does in one.

        Raises:
            ArgumentError: what a call sends on so many ranks cannot be foreseen; the message
                names it.
        """
        return self._sent(ranks, algorithm, of_updates=True)

    def start(self, ranks: int, *, algorithm: Algorithm = "ring") -> dict[Label, int]:
        """Return what all ranks together send before the first update, by label.

        Raises:
            ArgumentError: it cannot be foreseen.
        """
        return self._sent(ranks, algorithm, of_updates=False)

    def seconds(
        self,
        link: Link,
        *,
        ranks: int,
        algorithm: Algorithm = "ring",
        compute: float = 0.0,
        overlap: float = 0.0,
    ) -> float:
        """Return how long an update takes, on average over those of the program.

        Args:
            link: what joins each rank to the others.
            ranks: how many there are.
            algorithm: how collectives are carried out.
            compute: seconds in which a rank computes an update.
            overlap: the share of `compute` that is the backward pass, beside which
                DistributedDataParallel's buckets are sent: 2/3 is common. A bucket is sent
                once that share of the pass is over that its bytes, and those of the buckets
                before it, are of all. With one bucket nothing is gained. 0 lets all wait.

        Law: no less for a larger latency or a smaller bandwidth; never below `compute`.

        Raises:
            ArgumentError: a number is not what it has to be, or the calls cannot be foreseen.
        """
        if not is_number(compute) or not compute >= 0:
            msg = f"Traffic.seconds(compute={compute!r}): expected seconds, 0 or more."
            raise ArgumentError(msg)
        if not is_number(overlap) or not 0 <= overlap <= 1:
            msg = (
                f"Traffic.seconds(overlap={overlap!r}): expected a share, from 0 to 1."
            )
            raise ArgumentError(msg)
        calls = self._calls(ranks, algorithm, of_updates=True)
        whole = all(len(call.ranks) == ranks for call in calls)
        slowest = max(
            _waited([c for c in calls if rank in c.ranks], link, compute * overlap)
            for rank in (range(1) if whole else range(ranks))
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
        """Return bytes an update by label as lines of text, a column for each number of ranks.

        With a link there is a line more, of the seconds an update.

        Raises:
            ArgumentError: as `bytes` and `seconds`.
        """
        sizes = list(ranks)
        columns = {size: self.bytes(size, algorithm=algorithm) for size in sizes}
        if link is None:
            return written(columns, max(1, self.updates))
        seconds = {
            size: self.seconds(
                link, ranks=size, algorithm=algorithm, compute=compute, overlap=overlap
            )
            for size in sizes
        }
        return written(columns, max(1, self.updates), seconds)

    def __str__(self) -> str:
        """Show bytes an update on the numbers of ranks on which the program ran."""
        return self.table(self.logs)

    def _sent(
        self, ranks: int, algorithm: Algorithm, *, of_updates: bool
    ) -> dict[Label, int]:
        totals: defaultdict[Label, int] = defaultdict(int)
        for call in self._calls(ranks, algorithm, of_updates=of_updates):
            totals[call.label] += call.cost.num_bytes
        return dict(totals)

    def _calls(
        self, ranks: int, algorithm: Algorithm, *, of_updates: bool
    ) -> list[_Call]:
        if not is_integer(ranks, 1):
            msg = f"Traffic: {ranks!r} ranks; expected a number of ranks, 1 or more."
            raise ArgumentError(msg)
        check_algorithm("Traffic", algorithm)
        logs = {
            size: self._part(log, of_updates=of_updates)
            for size, log in self.logs.items()
        }
        entries = logs.get(ranks, next(iter(logs.values())))
        if ranks in logs:
            calls = [given(entry) for entry in entries]
        elif ranks == 1:  # there is nobody to give it to
            calls = [attrs.evolve(given(entry), ranks=1) for entry in entries]
        else:
            calls = foreseen(logs, ranks)
        return [
            _Call(
                label=entry.label,
                step=entry.step,
                ranks=entry.ranks if ranks in logs else range(ranks),
                cost=cost(what, algorithm),
            )
            for entry, what in zip(entries, calls, strict=True)
        ]

    def _part(self, log: Log, *, of_updates: bool) -> Log:
        """Return what is sent in updates, or what is sent before."""
        if not self.updates:
            return log if of_updates else ()
        return tuple(e for e in log if (e.step is not None) is of_updates)


def _waited(calls: Sequence[_Call], link: Link, backward: float) -> float:
    """Return the seconds that a rank waits in its calls, of all updates together."""
    by_step: defaultdict[int | None, list[_Call]] = defaultdict(list)
    for call in calls:
        by_step[call.step].append(call)
    waited = 0.0
    for update in by_step.values():
        buckets = [c.cost for c in update if c.label == _BESIDE_BACKWARD]
        others = [c.cost for c in update if c.label != _BESIDE_BACKWARD]
        waited += sum(link.seconds(each) for each in others)
        waited += _after_backward(buckets, link, backward)
    return waited


def _after_backward(buckets: Sequence[Cost], link: Link, backward: float) -> float:
    """Return how much longer than the backward pass it takes to send its buckets."""
    whole = sum(bucket.num_bytes for bucket in buckets) or 1
    there = accumulate(bucket.num_bytes for bucket in buckets)
    now = 0.0
    for bucket, num_bytes in zip(buckets, there, strict=True):
        now = max(now, backward * num_bytes / whole) + link.seconds(bucket)
    return max(0.0, now - backward)


@called
def communication(
    fn: Callable[[World], object],
    *,
    ranks: Iterable[int] = (2, 3, 5),
    axes: Mapping[str, int] | None = None,
    device: str | torch.device = "cpu",
) -> Traffic:
    """Run a program on a few simulated ranks, and return what it sends on any number of them.

    The program trains for some updates, as it would on machines; whole periods of what sends
    only now and then, as 8 updates under `local_sgd(sync_every=8)`.

    Args:
        fn: what each rank does, as `simulate` takes it.
        ranks: on how many it runs; three numbers, or more, tell how it goes on.
        axes: of the world, as `simulate` takes them. What is sent along some of them only is
            known for those numbers of ranks on which the program ran, and for no other.
        device: "meta" lets tensors have shapes and no values, for a model that does not fit:
            its factory runs on meta, or it is an instance of `af.empty_weights`.

    Raises:
        ArgumentError: a number is below 2, or the program takes more updates on some numbers
            of ranks than on others.
        ModelError: on meta, a transform compiles the model; or ranks send what its layers
            compute, under `autocast`.
        SimulationError: on meta, the program or a transform asks for a value.
        Exception: what `simulate` raises.

    Law: see `Traffic.bytes`; it is additive over labels. On meta each call is the one that is
    made with values.

    Cost: as many runs of `simulate`, in this process. On meta no memory for the model, and
    half a second of CPU a rank and update of a Llama of 7 billion parameters.

    Example:
        >>> import torch
        >>> import accelfn as af
        >>> from accelfn.testing import communication
        >>> def mean(world):
        ...     return af.reduce(torch.zeros(1000), world, "mean", label="mean of scores")
        >>> traffic = communication(mean)
        >>> traffic.bytes(64)
        {'mean of scores': 504000}
    """
    sizes = list(dict.fromkeys(ranks))
    if not sizes or not all(is_integer(size, 2) for size in sizes):
        msg = (
            f"communication(ranks={sizes}): expected numbers of ranks, each 2 or more."
        )
        raise ArgumentError(msg)
    runs = {size: simulate(size, fn, axes=axes, device=device) for size in sizes}
    updates = {size: run.updates for size, run in runs.items()}
    if len(set(updates.values())) > 1:
        told = ", ".join(f"{count} on {size}" for size, count in updates.items())
        msg = (
            f"communication: the program takes another number of updates on another number of"
            f" ranks: {told}. Let it take the same, so that updates can be compared."
        )
        raise ArgumentError(msg)
    logs = {size: run.log for size, run in runs.items()}
    return Traffic(logs=logs, updates=max(updates.values()))
