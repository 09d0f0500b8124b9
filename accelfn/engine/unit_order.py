# SPDX-License-Identifier: Apache-2.0
"""`UnitOrder`: all ranks gather and reduce the units of a model in one order.

Ranks may need units in different orders, or not all of them: experts, heads, layers that are
skipped. A collective needs all ranks at once, so they follow one plan, the order of the last
pass. A rank that needs another unit first takes part in the planned one with its own rows, or
with gradients of zero, which leaves the numbers of the others right. At the end of the plan
the ranks ask one another what they still need, until no rank needs anything.
"""

import itertools
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import attrs
import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    foreach_reduce,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from accelfn.base.valueless import readable
from accelfn.collectives import all_gather, gather_text, sum_
from accelfn.engine.unit_crossing import Gather, ReduceScatter
from accelfn.errors import CollectiveMismatchError
from accelfn.world import World

# torch's FSDP has no public names for what a unit is made of
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

_LABEL = "order of units"
_END = -1
"""No unit: the pass is over. Numbers below stand for other collectives."""


class Ordered:
    """A collective of a unit that waits for its turn; in all else it is torch's."""

    def __init__(self, order: "UnitOrder", turn: int, inner: Any) -> None:
        """Take the order, the number in it, and what carries the tensors."""
        self._order, self._turn, self._inner = order, turn, inner
        self.allocate = inner.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let others come first, then make the collective."""
        self._order.reach(self._turn)
        return self._inner(*args, **kwargs)


class UnitOrder:
    """The order in which the ranks of one model gather its units and reduce their gradients.

    Cost: one all-gather of 24 bytes a pass. If ranks differ, one more for each unit that the
    plan lacks, and an all-reduce to drop what no rank needs any more.
    """

    def __init__(
        self, ranks: World, units: Mapping[str, FSDPParamGroup], *, by_gloo: bool
    ) -> None:
        """Take the ranks that share units, and the units by name, in an order of all ranks."""
        self._ranks = attrs.evolve(ranks, group=ranks.connection, checked=False)
        self._units, self._names = list(units.values()), list(units)
        host = torch.device("cpu")  # where reading does not wait for a device
        joins_host = ranks.connection.joins(host)
        self._device = host if joins_host else readable(ranks.device)
        self._gather: Any = Gather() if by_gloo else DefaultAllGather()
        self._reduce: Any = ReduceScatter() if by_gloo else DefaultReduceScatter()
        each: Any
        for i, each in enumerate(self._units):
            each._all_gather_comm = Ordered(self, 2 * i, self._gather)
            each._reduce_scatter_comm = Ordered(self, 2 * i + 1, self._reduce)
        self._plans: dict[bool, list[int]] = {}
        self._plan: list[int] = []
        self._needed: set[int] = set()
        self._reduced: list[FSDPParamGroup] = []
        self._at = 0

    @contextmanager
    def begins(self, *, reduces: bool) -> Generator[None]:
        """Begin a pass; passes that reduce have a plan of their own."""
        self._plan = self._plans.setdefault(reduces, [])
        self._at, self._needed, self._reduced = 0, set(), []
        with self.goes_on():
            yield

    @contextmanager
    def goes_on(self) -> Generator[None]:
        """Let collectives of the loss wait for those of units that come before."""
        activity = self._ranks.connection.activity
        activity.before_call = self._reach_call
        try:
            yield
        finally:
            activity.before_call = None

    def reach(self, turn: int, note: int = 0, words: str = "") -> list[list[int]]:
        """Take part in what comes before a turn; return what ranks said, if they were asked."""
        while True:
            while self._at < len(self._plan) and self._plan[self._at] >= 0:
                planned = self._plan[self._at]
                self._at += 1
                self._label(planned)
                if planned == turn:
                    self._needed.add(self._at)
                    return []
                self._take_part(planned)
            said = [turn, self._at - len(self._needed), note]
            row = torch.tensor(said, device=self._device)
            rows = torch.stack(all_gather(row, self._ranks, label=_LABEL)).tolist()
            turns = {turn for turn, *_ in rows}
            units = sorted(turn for turn in turns if turn >= 0)
            if units:
                self._plan[self._at : self._at] = units
            elif len(turns) == 1:
                return rows
            else:
                self._refuse(words)

    def _label(self, turn: int) -> None:
        """Name the collective that comes, for errors and the logs of simulations."""
        does = "reduce" if turn % 2 else "gather"
        label = f"FSDP {does} {self._names[turn // 2]}"
        self._ranks.connection.activity.label = label

    def end(self, note: int = 0) -> int:
        """End the pass on all ranks; return the sum of what they noted."""
        rows = self.reach(_END, note, "ends its pass")
        del self._plan[self._at :]
        if all(idle for _, idle, _ in rows):  # else one rank needed all of it
            needed = [i + 1 in self._needed for i in range(self._at)]
            uses = torch.tensor(needed, dtype=torch.int64, device=self._device)
            sum_(uses, self._ranks, label=_LABEL)
            self._plan[:] = itertools.compress(self._plan, uses.tolist())
        for unit in self._reduced:  # of which torch may know nothing in this pass
            unit.finalize_backward()
        return sum(note for *_, note in rows)

    def _reach_call(self, label: str, world: World) -> None:
        """Let a collective of the loss begin when all ranks of the units have come to it."""
        if world.group is not self._ranks.group:
            return
        turn = -2 - zlib.crc32(label.encode())
        self.reach(turn, words=f"calls {label!r}")
        if self._plan[self._at : self._at + 1] != [turn]:
            self._plan.insert(self._at, turn)
        self._at += 1
        self._needed.add(self._at)

    def _refuse(self, words: str) -> NoReturn:
        """Raise on all ranks: they have come to different collectives of the loss.

        Raises:
            CollectiveMismatchError: always.
        """
        said = gather_text(words, self._ranks, label=_LABEL)
        each = "; ".join(f"rank {rank} {words}" for rank, words in enumerate(said))
        msg = (
            f"Rank {self._ranks.rank} of {self._ranks.size}: under af.wrap_fsdp all ranks"
            f" make the same collectives in a loss, but {each}. Call them on all ranks, in"
            " no branch that depends on the samples."
        )
        raise CollectiveMismatchError(msg)

    @torch.no_grad()
    def _take_part(self, turn: int) -> None:
        """Make a collective that other ranks may need, and this one does not."""
        unit = self._units[turn // 2]
        if turn % 2:
            self._reduce_zeros(unit)
            return
        rows = [
            param._sharded_param_data.to(unit.device, param.param_dtype)
            for param in unit.fsdp_params
        ]
        group = unit._all_gather_process_group
        part = torch.cat(rows)
        self._gather(part.new_empty(len(part) * group.size()), part, group)

    def _reduce_zeros(self, unit: FSDPParamGroup) -> None:
        """Add nothing to the gradients of a unit, and take this rank's rows of their sum."""
        params = [each for each in unit.fsdp_params if each.sharded_param.requires_grad]
        zeros = [
            torch.zeros(each._orig_size, dtype=each.orig_dtype, device=unit.device)
            for each in params
        ]
        replicas = unit._all_reduce_process_group if unit._is_hsdp else None
        context = unit.comm_ctx
        _, _, stream, event, *_ = foreach_reduce(
            *(params, zeros, unit._reduce_scatter_process_group),
            *(context.reduce_scatter_stream, self._reduce, unit._orig_dtype),
            *(unit._reduce_dtype, unit.device, unit.gradient_divide_factor),
            *(replicas, context.all_reduce_stream, unit.all_reduce_grads),
            *(unit._partial_reduce_output, None, unit.force_sum_reduction_for_comms),
        )
        device: Any = unit.device_handle
        device.current_stream().wait_event(event)
        context._last_post_reduce_events[stream] = event
        self._reduced.append(unit)
