# SPDX-License-Identifier: Apache-2.0
"""The checked arguments (`Plan`) and the results (`Run`) of a simulated run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args, overload

import attrs
import torch

from accelfn import World
from accelfn.errors import ArgumentError
from accelfn.plug import arguments, devices
from accelfn.plug import axes as arithmetic
from accelfn.testing.simulation.calls import Crash, Entry, Fault, Sums, check_choice
from accelfn.testing.simulation.group import Algorithm, cost, payload_of

T = TypeVar("T")
By: TypeAlias = Literal["label", "kind", "step", "group", "site"]


@attrs.frozen
class Run(Sequence[T], Generic[T]):
    """The result of a simulated run: a sequence with the result of each rank.

    Attributes:
        results: the return value of each rank's function; None for a rank that left early.
        log: all collectives, in the order of their completion.
        clock: the virtual seconds that passed. Only a `Stall` takes virtual time.
        missed: the planned faults that did not happen.
        updates: the number of updates of accelfn's steps, on the rank with the most.
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
        """Return the bytes that all ranks together sent over the network, by label or kind.

        An all-reduce of n bytes among N ranks sends 2 (N - 1) n bytes. An all-gather of n bytes
        per rank sends N (N - 1) n bytes. The reference lists the other collectives. Network
        headers are not counted.

        Args:
            by: the attribute of `Entry` to group by.
            algorithm: "ring" and "tree" send equally many bytes. "gloo" counts the bytes that
                torch's Gloo sends: it runs a reduce_scatter as an all_reduce.

        Law: the sum over all groups does not depend on `by`. On one rank it is 0.

        Raises:
            ArgumentError: `by` is not an attribute to group by, or the algorithm is unknown.
        """
        check_choice("Run.sent", "by", by, By)
        check_choice("Run.sent", "algorithm", algorithm, Algorithm)
        totals: dict[Any, int] = {}
        for entry in self.log:
            key = getattr(entry, by)
            num_bytes = cost(payload_of(entry), algorithm).num_bytes
            totals[key] = totals.get(key, 0) + num_bytes
        return totals


def _device(name: str | torch.device) -> torch.device:
    """Return the device of this name. A real world does not accept "meta", this function does."""
    device = devices.parse_device(name)
    is_meta = device.type == "meta"
    return device if is_meta else devices.choose_device(name, local_rank=0)


def check_program(call: str, size: object, fn: object) -> None:
    """Raise an error unless the arguments are a number of ranks and a function.

    Raises:
        ArgumentError: the number is not an integer of at least 1, or the function is not callable.
    """
    if not arguments.is_integer(size, 1):
        msg = f"{call}({size!r}, ...): expected a number of ranks, 1 or more."
        raise ArgumentError(msg)
    if not callable(fn):
        msg = f"{call}({size}, {fn!r}): expected a function that takes a World."
        raise ArgumentError(msg)


@attrs.frozen
class Plan:
    """The checked arguments of a run. `str(plan)` is the call that repeats the run."""

    size: int
    fn: Callable[[World], Any]
    schedule: list[int] = attrs.field(factory=list, converter=list)
    faults: list[Fault] = attrs.field(factory=list, converter=list)
    sums: Sums = "ranks"
    seed: int = 0
    axes: Mapping[str, int] = attrs.field(factory=dict[str, int])
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=_device)
    elastic: int | None = None

    def __attrs_post_init__(self) -> None:
        """Raise an error if an argument is invalid."""
        size = self.size
        check_program("simulate", size, self.fn)
        if self.axes:
            sizes = arithmetic.resolve_axes("simulate", self.axes, size)
            object.__setattr__(self, "axes", sizes)
        error = arguments.call_mismatch(self.fn, None)
        if error is not None:
            msg = (
                f"simulate({size}, {self.fn!r}): each rank calls fn(world), but fn does not"
                f" accept this call: {error}. Bind other arguments with functools.partial."
            )
            raise ArgumentError(msg) from error
        if not all(arguments.is_integer(turn, 0) for turn in self.schedule):
            msg = f"simulate(schedule={self.schedule}): expected integers, 0 or more."
            raise ArgumentError(msg)
        if not arguments.is_integer(self.seed):
            msg = f"simulate(seed={self.seed!r}): expected an integer."
            raise ArgumentError(msg)
        check_choice("simulate", "sums", self.sums, Sums)
        self._check_elastic()
        self._check_faults()

    def _check_faults(self) -> None:
        """Raise an error if a fault cannot happen in this run."""
        size, elastic = self.size, self.elastic
        for fault in self.faults:
            if not isinstance(fault, get_args(Fault)):
                msg = f"simulate(faults=[{fault!r}]): expected faults, such as Raise(rank=1)."
                raise ArgumentError(msg)
            if fault.rank >= size:
                msg = f"simulate({size}, faults=[{fault!r}]): the last rank is {size - 1}."
                raise ArgumentError(msg)
            if isinstance(fault, Crash) and fault.returns is not None and not elastic:
                msg = (
                    f"simulate({size}, faults=[{fault!r}]): a rank can return only if the other"
                    " ranks continue without it. Pass elastic=n, so that the run continues while n"
                    " ranks or more are left, such as elastic=1."
                )
                raise ArgumentError(msg)

    def _check_elastic(self) -> None:
        """Raise an error if `elastic=` is invalid or does not fit the axes."""
        least = self.elastic
        if least is None:
            return
        if not arguments.is_integer(least, 1) or least > self.size:
            msg = (
                f"simulate({self.size}, elastic={least!r}): expected the smallest number of ranks"
                f" that may continue without the others, from 1 to {self.size}."
            )
            raise ArgumentError(msg)
        if self.axes:
            msg = (
                f"simulate(axes={dict(self.axes)}, elastic={least}): in a world with axes, the"
                " other ranks cannot continue without a lost rank's part of the model or the work."
                " Leave out axes= or elastic=."
            )
            raise ArgumentError(msg)

    def __str__(self) -> str:
        """Return the call that repeats the run."""
        names = "schedule", "faults", "sums", "axes", "device", "elastic", "seed"
        values = {name: getattr(self, name) for name in names}
        values["device"] = str(self.device)
        defaults = [], {}, "ranks", "cpu", None, 0
        options = [f"{k}={v!r}" for k, v in values.items() if v not in defaults]
        call = ", ".join([str(self.size), arguments.qualname(self.fn), *options])
        return f"accelfn.testing.simulate({call})"
