# SPDX-License-Identifier: Apache-2.0
"""Train replicas on every rank with torch's DistributedDataParallel."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from accelfn.base.arguments import is_number, option, truth
from accelfn.definition.transform import transform
from accelfn.engine.building import build
from accelfn.engine.ddp import DDPRunner
from accelfn.engine.engine import Engine
from accelfn.engine.home import home_of
from accelfn.engine.optimizer.in_backward import LiveUpdate
from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState
from accelfn.world.axes import BATCH

_FIRST_BUCKET_MB = 1
"""What torch makes of it: torch.compile splits graphs at buckets that are no smaller."""


def _is_positive(_owner: object, field: Any, value: Any) -> None:
    if value is not None and not (is_number(value) and value > 0):
        msg = f"af.wrap_ddp({field.name}={value!r}): expected a positive number of MiB."
        raise ArgumentError(msg)


def _is_axis(_owner: object, _field: object, value: object) -> None:
    if value is not None and value not in BATCH:
        msg = (
            f"af.wrap_ddp(within={value!r}): expected an axis of the world along which ranks"
            f" have samples of their own, {' or '.join(map(repr, BATCH))}."
        )
        raise ArgumentError(msg)


@transform
class wrap_ddp:
    """Hold one replica a rank, and average gradients in torch's DistributedDataParallel.

    DDP wraps a module whose forward is the loss, in the world's own process group.
    The weights of the ranks' losses travel in its buckets, so the result is the mean
    over all samples (or tokens) of the update, however uneven the shares. In a world of
    1 it changes nothing.

    With `within`, beside `local_sgd`, the ranks along an axis are one worker: they average
    gradients among them and hold the same, and workers train apart.

    Acts on: engine.

    Args:
        bucket_cap_mb: size of DDP's buckets in MiB; None is torch's own choice, 25 after a
            first one of 1.
        gradient_as_bucket_view: gradients are views into the buckets: half the memory, and
            a copy less. On by default here, where torch's own default is off.
        find_unused_parameters: allow parameters that take no part in the loss.
        static_graph: the same graph at every step, which DDP then learns once.
        forward_sync_buffers: give all ranks rank 0's buffers before each forward (what
            torch called `broadcast_buffers`).
        within: the axis of the world along which gradients are averaged, "dp_shard" say, whose
            ranks are neighbours; None is all ranks. What crosses the other axis is said by
            `local_sgd`, or another transform under which gradients stay (`reduce = None`).

    Law:
        All ranks hold the same parameters, bitwise, after every update; and they are
        those of one process on the whole batch, up to rounding. With `within` the ranks of a
        worker do, and workers of n ranks are as many ranks that have the samples of n each.

    Cost:
        One all-reduce of the gradients an update, overlapped with the backward pass; with
        `within`, among the ranks of a worker.

    Raises:
        CompositionError: a transform that has `reduce`, such as `local_sgd` without `within`;
            `static_graph` with one that runs several backward passes; when applied, `within`
            and nothing that says what crosses workers.
        WorldError: when applied, `within` names an axis that the world does not have.
        ReplicaMismatchError: when built, the ranks hold different models.
        UnusedParametersError: at a step, as its name says.

    References:
        Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
        Training".

    Example:
        >>> wrap_ddp(bucket_cap_mb=10)
        af.wrap_ddp(bucket_cap_mb=10)
    """

    bucket_cap_mb: float | None = option(None, _is_positive)
    gradient_as_bucket_view: bool = option(default=True, validator=truth())
    find_unused_parameters: bool = option(default=False, validator=truth())
    static_graph: bool = option(default=False, validator=truth())
    forward_sync_buffers: bool = option(default=True, validator=truth())
    within: str | None = option(None, _is_axis)

    def __attrs_post_init__(self) -> None:
        """Refuse two ways of finding unused parameters, of which torch drops one."""
        if self.static_graph and self.find_unused_parameters:
            msg = (
                "af.wrap_ddp(static_graph=True, find_unused_parameters=True): a static graph"
                " finds unused parameters itself, in the first step. Give one of the two."
            )
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """What is known of its buckets, and whether it waits for all parameters."""
        cap, unused = self.bucket_cap_mb, ("find_unused_parameters", "static_graph")
        return {
            "buckets": True,
            "within": self.within,
            "small_buckets": cap is not None and cap < _FIRST_BUCKET_MB,
            "finds_unused": next(
                (f"{n}=True" for n in unused if getattr(self, n)), None
            ),
        }

    @property
    def refuses(self) -> Mapping[str, str]:
        """What torch's DDP breaks on, and what would leave it without work."""
        refused = {
            "reduce": "would never reduce a gradient: {other!r} says how they cross ranks."
            " Leave out one of the two.",
        }
        if self.within is None:
            refused["stays"] = (
                "would never reduce a gradient: under {other!r} each rank keeps its own."
                " Leave out one of the two, or say along which axis ranks are one worker,"
                ' as within="dp_shard".'
            )
        if self.static_graph:
            refused["value_and_grad"] = (
                "expects one backward pass an update, but {other!r} runs several."
                " Leave out static_graph=True."
            )
        return refused

    @property
    def needs(self) -> Mapping[str, str]:
        """What brings workers together, where there are several."""
        if self.within is None:
            return {}
        return {
            "stays": "lets workers train apart, and nothing brings them together. Add"
            " af.local_sgd(sync_every=...), or leave out within=."
        }

    def engine(self, state: TrainState) -> Engine:
        """Build DistributedDataParallel around the state's tensors."""
        ranks = state.definition.copy
        own = ("name", "within")
        options = attrs.asdict(self, filter=lambda field, _: field.name not in own)
        (made,) = state.setup.facts.get("compression", (None,))
        compression = None if made is None else made(state)

        def make(module: nn.Module, live: LiveUpdate | None) -> DDPRunner:
            return DDPRunner(module, ranks, options, compression, live)

        return build(state, home_of(state), make, compression=compression)
