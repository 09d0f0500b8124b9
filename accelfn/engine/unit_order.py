# SPDX-License-Identifier: Apache-2.0
"""`UnitOrder`: all ranks gather and reduce the units of a model in one order.

Ranks may need units in different orders, or not all of them: experts, heads, layers that are
skipped. A rank takes part in a gather with its own rows, and in a reduction with gradients of
zero, so the numbers of the others are right.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllocMixin,
    foreach_reduce,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from accelfn.collectives.call_order import CallOrder
from accelfn.engine.unit_crossing import (
    gather,
    gather_by_gloo,
    reduce_scatter,
    reduce_scatter_by_gloo,
)
from accelfn.world import World

# torch's FSDP has no public names for what a unit is made of
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false


class Ordered(DefaultAllocMixin):
    """A collective of a unit that waits for its turn."""

    def __init__(self, reach: Callable[[], object], make: Callable[..., Any]) -> None:
        """Take what waits for the turn, and what makes the collective."""
        self._reach, self._make = reach, make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, then make the collective."""
        self._reach()
        return self._make(*args, **kwargs)


class UnitOrder(CallOrder):
    """The order in which the ranks of one model gather its units and reduce their gradients."""

    def __init__(
        self, ranks: World, units: Mapping[str, FSDPParamGroup], *, by_gloo: bool
    ) -> None:
        """Take the ranks that share units, and the units by name, in an order of all ranks."""
        self._gather: Any = gather_by_gloo if by_gloo else gather
        self._reduce: Any = Ordered(
            tuple, reduce_scatter_by_gloo if by_gloo else reduce_scatter
        )
        self._reduced: list[FSDPParamGroup] = []
        calls: dict[str, Callable[[], object]] = {}
        unit: Any
        for name, unit in units.items():
            first, then = f"FSDP gather {name}", f"FSDP reduce {name}"
            calls[first] = partial(self._gather_rows, unit)
            calls[then] = partial(self._reduce_zeros, unit)
            unit._all_gather_comm = Ordered(partial(self.reach, first), self._gather)
            unit._reduce_scatter_comm = Ordered(partial(self.reach, then), self._reduce)
        super().__init__(ranks, calls)

    def end(self, note: int = 0) -> list[int]:
        """End the pass on all ranks; return what each of them noted."""
        notes = super().end(note)
        for unit in self._reduced:  # of which torch may know nothing in this pass
            unit.finalize_backward()
        self._reduced.clear()
        return notes

    @torch.no_grad()
    def _gather_rows(self, unit: FSDPParamGroup) -> None:
        """Give other ranks what they need of a unit."""
        rows = [
            param._sharded_param_data.to(unit.device, param.param_dtype)
            for param in unit.fsdp_params
        ]
        group = unit._all_gather_process_group
        part = torch.cat(rows)
        self._gather(part.new_empty(len(part) * group.size()), part, group)

    @torch.no_grad()
    def _reduce_zeros(self, unit: FSDPParamGroup) -> None:
        """Add nothing to the gradients of a unit, and take this rank's rows of their sum."""
        params = [each for each in unit.fsdp_params if each.sharded_param.requires_grad]
        zeros = [
            torch.zeros(each._orig_size, dtype=each.orig_dtype, device=unit.device)
            for each in params
        ]
        replicas = unit._all_reduce_process_group if unit._is_hsdp else None
        context, device = unit.comm_ctx, cast("Any", unit.device_handle)
        _, _, stream, event, *_ = foreach_reduce(
            *(params, zeros, unit._reduce_scatter_process_group),
            *(context.reduce_scatter_stream, self._reduce, unit._orig_dtype),
            *(unit._reduce_dtype, unit.device, unit.gradient_divide_factor),
            *(replicas, context.all_reduce_stream, unit.all_reduce_grads),
            *(unit._partial_reduce_output, None, unit.force_sum_reduction_for_comms),
        )
        device.current_stream().wait_event(event)
        context._last_post_reduce_events[stream] = event
        self._reduced.append(unit)
