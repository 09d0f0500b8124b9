# SPDX-License-Identifier: Apache-2.0
"""What a state is a state of: the part of a training that an update does not change."""

import math
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import torch

from accelfn.data import Data, Plan
from accelfn.definition.cache import Cache
from accelfn.definition.fields import check_returned
from accelfn.definition.transform import chain
from accelfn.schedules.rates import Rates
from accelfn.schedules.schedule import Schedule
from accelfn.structure.partition import is_torchs, parts_of
from accelfn.structure.skeleton import Skeleton
from accelfn.world import World
from accelfn.world import axes as arithmetic
from accelfn.world.folding import folded

if TYPE_CHECKING:
    from accelfn.definition.layout import Layout

_BESIDE: dict[str, str] = dict(
    zip(arithmetic.BATCH, reversed(arithmetic.BATCH), strict=True)
)
"""Along which axis copies are, by that along which each has its ranks."""


@attrs.frozen(kw_only=True, eq=False)
class Definition:
    """What a state is a state of: everything that is not saved and does not change.

    `cache` holds what is derived from it and can be made again; it lives as long as the
    states that share this definition. `rates` is the schedule, bound to the optimizer's
    groups.
    """

    skeleton: Skeleton
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    rates: Rates | None
    data: Data | None
    setup: chain
    world: World
    name: str
    cache: Cache = attrs.field(factory=Cache, init=False, repr=False)

    @cached_property
    def layout(self) -> "Layout | None":
        """How the model lies over the ranks; None where each has all of it."""
        owners = self.setup.owners["layout"]
        if not owners:
            return None
        # torch's DTensors cost as much to import as all of accelfn
        from accelfn.definition.layout import Layout  # noqa: PLC0415

        metas = dict(self.skeleton.module.named_parameters())
        return Layout.of(owners, metas, self.world)

    @cached_property
    def has_torchs_optimizer(self) -> bool:
        """Whether updates run torch's code alone."""
        return all(map(is_torchs, parts_of(self.optimizer)))

    @property
    def copy(self) -> World:
        """The ranks that train one model together: gradients are summed over them.

        Those whose losses are parts of one; where copies of several ranks are trained apart,
        those of this rank's copy.
        """
        if self.within is None:
            return self.world.loss
        is_split = self.layout is not None
        return self.splits if is_split else self.world.along(self.within)

    @property
    def splits(self) -> World:
        """Those of `copy`, along the axes of splitting."""
        world = folded(self.world)
        return world.along("dp_shard") if self.trains_apart else world.loss

    @property
    def copies(self) -> World:
        """The ranks that hold in other models what this one holds, where those are apart."""
        if self.within is None:
            return self.world.loss
        return self.world.along(_BESIDE[self.within])

    @property
    def copy_of_each(self) -> tuple[int, ...]:
        """Of which copy each rank is; () where no copies of several ranks are apart."""
        if self.within is None or self.copy.size == 1:
            return ()
        axes, beside = self.world.axes, _BESIDE[self.within]
        ranks = range(math.prod(axes.values()))
        return tuple(arithmetic.place(axes, rank).get(beside, 0) for rank in ranks)

    @property
    def trains_apart(self) -> bool:
        """Whether copies of several ranks each train apart."""
        return self.within is not None

    @property
    def within(self) -> str | None:
        """The axis along which ranks train one copy of the model, where others train theirs."""
        facts = self.setup.facts
        if "stays" not in facts:
            return None
        split = "dp_shard" if self.layout is not None else None
        return facts["within"][0] if "within" in facts else split

    @property
    def plan(self) -> Plan:
        """Who takes which samples, as the setup's transforms say, left to right."""
        batch = self.world.batch
        plan = Plan(world_rank=batch.rank, world_size=batch.size)
        for each in self.setup.owners["data"]:
            plan = each.data(plan)
            is_plan = isinstance(plan, Plan)
            check_returned(each, "data", ok=is_plan, returned=plan, expected="a Plan")
        return plan
