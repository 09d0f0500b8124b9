# SPDX-License-Identifier: Apache-2.0
"""A simulated run as a value: what was asked for, and what it gave."""

from collections.abc import Callable, Mapping, Sequence
from typing import (
    Any,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    overload,
)

import attrs
import torch

from accelfn.base.arguments import call_mismatch, qualname
from accelfn.base.devices import choose_device, parse_device
from accelfn.errors import ArgumentError
from accelfn.testing.simulation.calls import Crash, Entry, Fault, Sums
from accelfn.testing.simulation.group import (
    Algorithm,
    check_algorithm,
    cost,
    payload_of,
)
from accelfn.world import World
from accelfn.world.axes import resolve_axes

T = TypeVar("T")
By: TypeAlias = Literal["label", "kind", "step", "group", "site"]


@attrs.frozen
class Run(Sequence[T], Generic[T]):
    """What a simulated run gave: a sequence of each rank's result.

    Attributes:
        results: what each rank's function returned; None of a rank that left early.
        log: every collective in the order in which they were completed.
        clock: the virtual seconds that passed; only stalls take time.
        missed: the faults that were planned and found no place to happen.
        updates: how many updates accelfn's steps took, on the rank that took most.
    """

    results: tuple[T, ...]
    log: tuple[Entry, ...] = attrs.field(repr=False)
    clock: float = 0.0
    missed: tuple[Fault, ...] = ()
    updates: int = 0

    @overload
    def __getitem__(self, rank: int) -> T: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[T, ...]: ...
    def __getitem__(self, rank: int | slice) -> T | tuple[T, ...]:
        """Return a rank's result."""
        return self.results[rank]

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.results)

    def sent(
        self, *, by: By = "label", algorithm: Algorithm = "ring"
    ) -> dict[Any, int]:
        """Return the bytes that all ranks together sent over the wire.

        An all-reduce of n bytes among N ranks sends 2 (N - 1) n, an all-gather of as many a
        rank N (N - 1) n; the other collectives stand in the reference. Headers of the network
        are not counted.

        Args:
            by: the attribute of an `Entry` whose values tell the totals apart.
            algorithm: "ring" and "tree" send the same; "gloo" is what torch's Gloo does, which
                carries a reduce_scatter out as an all_reduce.

        Law: the totals add up to one number, whatever they are told apart by; it is 0 for one
        rank.

        Raises:
            ArgumentError: an entry has no such attribute, or the algorithm is not known.
        """
        if by not in get_args(By):
            known = ", ".join(map(repr, get_args(By)))
            msg = f"Run.sent(by={by!r}): expected one of {known}."
            raise ArgumentError(msg)
        check_algorithm("Run.sent", algorithm)
        totals: dict[Any, int] = {}
        for entry in self.log:
            key = getattr(entry, by)
            num_bytes = cost(payload_of(entry), algorithm).num_bytes
            totals[key] = totals.get(key, 0) + num_bytes
        return totals


def _device(asked: str | torch.device) -> torch.device:
    """Return the device asked for; that without values is one here, and in no real world."""
    known = parse_device(asked)
    return known if known.type == "meta" else choose_device(asked, local_rank=0)


@attrs.frozen
class Plan:
    """The arguments of a run, checked, so that an error can say how to repeat it."""

    size: int
    fn: Callable[[World], Any]
    schedule: tuple[int, ...] = attrs.field(
        default=(), converter=lambda choices: tuple(choices or ())
    )
    faults: tuple[Fault, ...] = attrs.field(default=(), converter=tuple)
    sums: Sums = "ranks"
    seed: int = 0
    axes: Mapping[str, int] = attrs.field(factory=dict[str, int])
    device: torch.device = attrs.field(
        factory=lambda: torch.device("cpu"),
        converter=_device,
    )
    elastic: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what no world can be."""
        size = self.size
        if not _is_integer(size) or size < 1:
            msg = f"simulate({size!r}, ...): expected a number of ranks, 1 or more."
            raise ArgumentError(msg)
        if self.axes:
            sizes = resolve_axes("simulate", self.axes, size)
            object.__setattr__(self, "axes", sizes)
        if not callable(self.fn):
            msg = f"simulate({size}, {self.fn!r}): expected a function of a World."
            raise ArgumentError(msg)
        error = call_mismatch(self.fn, None)
        if error is not None:
            msg = (
                f"simulate({size}, {self.fn!r}): each rank calls it as fn(world), which it does"
                f" not take: {error}. Other arguments are given by functools.partial."
            )
            raise ArgumentError(msg) from error
        if not all(_is_integer(each) and each >= 0 for each in self.schedule):
            msg = f"simulate(schedule={self.schedule}): expected integers, 0 or more."
            raise ArgumentError(msg)
        if not _is_integer(self.seed):
            msg = f"simulate(seed={self.seed!r}): expected an integer."
            raise ArgumentError(msg)
        if self.sums not in get_args(Sums):
            known = ", ".join(map(repr, get_args(Sums)))
            msg = f"simulate(sums={self.sums!r}): expected one of {known}."
            raise ArgumentError(msg)
        self._check_elastic()
        self._check_faults()

    def _check_faults(self) -> None:
        """Refuse what is none, or cannot happen in this run."""
        size, elastic = self.size, self.elastic
        for fault in self.faults:
            if not isinstance(fault, get_args(Fault)):
                msg = f"simulate(faults=[{fault!r}]): expected such as Raise(rank=1)."
                raise ArgumentError(msg)
            if fault.rank >= size:
                msg = f"simulate({size}, faults=[{fault!r}]): no such rank."
                raise ArgumentError(msg)
            if isinstance(fault, Crash) and fault.returns is not None and not elastic:
                msg = (
                    f"simulate({size}, faults=[{fault!r}]): a rank comes back where others go"
                    " on without it. Say how few may: elastic=1."
                )
                raise ArgumentError(msg)

    def _check_elastic(self) -> None:
        """Refuse a number of ranks that go on which this run does not have."""
        least = self.elastic
        if least is not None and not (_is_integer(least) and 1 <= least <= self.size):
            msg = (
                f"simulate({self.size}, elastic={least!r}): expected the fewest ranks that go on"
                f" without the others, 1 to {self.size}."
            )
            raise ArgumentError(msg)
        if least is not None and self.axes:
            msg = (
                f"simulate(axes={dict(self.axes)}, elastic={least}): of a world with axes a part"
                " of the model, or of its work, is gone with a rank. Leave out one of the two."
            )
            raise ArgumentError(msg)

    def __str__(self) -> str:
        """Return the call that repeats the run."""
        name = qualname(self.fn)
        parts = [str(self.size), name]
        if self.schedule:
            parts.append(f"schedule={list(self.schedule)}")
        if self.faults:
            parts.append(f"faults={list(self.faults)}")
        if self.sums != "ranks":
            parts.append(f"sums={self.sums!r}")
        if self.axes:
            parts.append(f"axes={dict(self.axes)}")
        if self.device.type != "cpu":
            parts.append(f"device={str(self.device)!r}")
        if self.elastic is not None:
            parts.append(f"elastic={self.elastic}")
        if self.seed:
            parts.append(f"seed={self.seed}")
        return f"accelfn.testing.simulate({', '.join(parts)})"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
