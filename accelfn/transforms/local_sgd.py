# SPDX-License-Identifier: Apache-2.0
"""Local SGD: train ranks independently, and average parameters every few updates."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import torch

from accelfn.base import tree
from accelfn.base.arguments import Number, integer, is_integer, mebibytes, option, truth
from accelfn.base.devices import readable
from accelfn.collectives.packed import all_gather_list, average_
from accelfn.definition.transform import transform
from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.world import World

Slot: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, torch.Tensor]

_LABEL = "local_sgd"
_NONE: Mapping[int, int] = {}


def _are_parts(owner: Any, _field: object, value: Any) -> None:
    good = isinstance(value, Mapping) and all(
        is_integer(period, 1) and is_integer(ranks, 2)
        for period, ranks in cast("Mapping[Any, Any]", value).items()
    )
    if good:
        parts = sorted(value.items())
        periods = [*parts, (owner.sync_every, None)]
        good = all(p < q and q % p == 0 for (p, _), (q, _) in pairwise(periods))
        good = good and all(m < n and n % m == 0 for (_, m), (_, n) in pairwise(parts))
    if not good:
        msg = (
            f"af.local_sgd(sync_every={owner.sync_every}, neighbours={value!r}): expected numbers"
            " of ranks by periods, {4: 8}, of which each divides the next, and the last period"
            " sync_every."
        )
        raise ArgumentError(msg)


@transform
class local_sgd:
    """Train ranks independently, and average parameters every `sync_every` updates.

    No gradient is communicated. Batch size, learning rate and schedule do not change. Ranks are
    averaged by the weight of the samples that they have seen since the last average, so short
    and empty shares count correctly. `af.finalize` averages once more at the end; evaluation
    and export use the average at any time. If another transform such as `ema` sets the
    evaluated parameters, these are averaged too. If no rank has seen a sample since the last
    average, ranks have equal weights.

    With `neighbours`, groups of ranks with a fast network between them, such as the ranks of a
    machine, are averaged more often.

    With `wrap_fsdp`, in a world with "dp_replicate", the copies of the model train
    independently, and each rank averages its shard with the same shard of the other copies.

    Acts on: init, reduce, after_update, eval_params, finalize, merge.

    Args:
        sync_every: updates between averages, at least 1.
        buffers: average floating-point buffers (running statistics) too.
        opt_state: average the optimizer's state tensors too, except for step counts. If a rank
        has no state of a parameter yet, because it had no gradient, that parameter's state is
        not averaged.
        bucket_cap_mb: the size of the all-reduced buffer, in MiB.
        neighbours: the size of groups of neighboring ranks by period: {4: 8} averages groups of
        8 ranks every 4 updates. Each period must divide the next, and the last must divide
        `sync_every`; each group size must divide the next, and the last must divide the number
        of ranks. If several are due, only the largest group is averaged.

    Law:
        With `sync_every=1` and plain SGD it equals `wrap_ddp`; a split copy equals one rank
        with a whole model, up to rounding. In a world of 1 nothing changes, bitwise. Replicas
        differ between averages.

    Cost:
        Every `sync_every` updates, flattened all-reduces (one per `bucket_cap_mb`) of the
        parameters, or this rank's shards, that are trained now or were before `with_trainable`
        froze them; memory for one buffer. Twice as many if no rank has seen a sample since the
        last average; with `opt_state`, a gather of 8 bytes per parameter. With `neighbours`,
        the same within groups at their periods.

    Raises:
        ArgumentError: periods or group sizes do not divide each other; when the state is
        created, a group size does not divide the number of ranks.
        WorldError: when the state is created, `neighbours` in a world that is a part of another.

    References:
        Stich 2019, "Local SGD Converges Fast and Communicates Little"; Lin et al. 2018, "Don't
        Use Large Mini-Batches, Use Local SGD" (neighbours).

    Example:
        >>> local_sgd(sync_every=8)
        af.local_sgd(sync_every=8)
    """

    gives_up: ClassVar[Mapping[str, str]] = {"replicas_agree": "between averages"}
    reduce: ClassVar[None] = None

    sync_every: int = attrs.field(
        validator=integer(1, "a number of updates"), kw_only=True
    )
    buffers: bool = option(default=False, validator=truth())
    opt_state: bool = option(default=False, validator=truth())
    bucket_cap_mb: float = option(25.0, mebibytes())
    neighbours: Mapping[int, int] = option(_NONE, _are_parts, hash=False)

    @property
    def tells(self) -> Mapping[str, Any]:
        """What of its slot is each rank's own."""
        keys = ("weight", "near") if self.neighbours else ("weight",)
        return {"draws_nothing": True, "by_rank": keys, "owes": _owes}

    def init(self, state: TrainState) -> Slot:
        """Start with equal ranks, and create the groups of neighbors."""
        ranks = state.definition.copies
        for period, size in self.neighbours.items():
            if ranks.size % size:
                msg = (
                    f"af.local_sgd(neighbours={dict(self.neighbours)}): every {period} updates"
                    f" {size} neighbours meet, which do not divide the {ranks.size} ranks that"
                    " train apart. Leave neighbours out here, or give a number that divides"
                    " them."
                )
                raise ArgumentError(msg)
            ranks.split(size=size)
        return self._new_slot(state)

    def after_update(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Add up this rank's weight; average when the period is over."""
        slot = {**slot, "weight": slot["weight"] + update.weight}
        if self.neighbours:
            # a new group's period begins with the period of all ranks
            weights = {f"{p}": slot["weight"] for p in self.neighbours}
            before = slot.get("near", {})
            slot["near"] = {
                key: before[key] + update.weight if key in before else since
                for key, since in weights.items()
            }
        updates = state.step - slot["since"]
        if updates >= self.sync_every:
            return self.finalize(state, slot, update)
        return state, self._average_neighbours(state, slot, updates)

    def finalize(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Average in place, unless there was no update since the last average."""
        if _owes(state, slot):
            ranks = state.definition.copies
            self._average_(self._averaged_tensors(state, ranks), slot["weight"], ranks)
        return state, self._new_slot(state)

    def merge(self, slots: Sequence[Slot], _: World) -> tuple[list[float], Slot]:
        """Average ranks by the weights of their samples."""
        weights = [float(slot["weight"]) for slot in slots]
        result = {**slots[0], "weight": 0}
        if self.neighbours:
            result["near"] = {f"{period}": 0 for period in self.neighbours}
        return weights, result

    def eval_params(
        self, params: Mapping[str, torch.Tensor], slot: Slot, update: Update
    ) -> tuple[Mapping[str, torch.Tensor], Slot]:
        """Return the average over ranks; a collective unless ranks were just averaged."""
        state = update.state
        names = state.definition.skeleton.once_trained
        agree = state.step == slot["since"] and all(
            params[name] is param for name, param in state.params.items()
        )
        ranks = state.definition.copies
        if ranks.size == 1 or agree:
            return params, slot
        means = tree.clone({n: p for n, p in params.items() if n in names})
        self._average_(list(means.values()), slot["weight"], ranks)
        return {**params, **means}, slot

    def _new_slot(self, state: TrainState) -> Slot:
        """Return the slot of equal ranks."""
        slot: Slot = {"weight": 0, "since": state.step}
        if self.neighbours:
            slot["near"] = {f"{period}": 0 for period in self.neighbours}
        return slot

    def _average_neighbours(self, state: TrainState, slot: Slot, updates: int) -> Slot:
        """Average the largest group that is due, and restart its period and shorter ones."""
        due = [period for period in self.neighbours if updates % period == 0]
        if not due:
            return slot
        last = max(due)
        ranks = state.definition.copies.split(size=self.neighbours[last])
        weight = slot["near"][f"{last}"]
        self._average_(self._averaged_tensors(state, ranks), weight, ranks)
        within = {f"{period}": 0 for period in self.neighbours if period <= last}
        return {**slot, "near": {**slot["near"], **within}}

    def _average_(
        self, tensors: Sequence[torch.Tensor], weight: Number, ranks: World
    ) -> None:
        cap = self.bucket_cap_mb
        average_(tensors, weight, ranks, label=_LABEL, bucket_cap_mb=cap)

    def _averaged_tensors(self, state: TrainState, ranks: World) -> list[torch.Tensor]:
        # never trained parameters are equal on all ranks, and rounding would change them
        names = state.definition.skeleton.once_trained
        tensors = [param for name, param in state.params.items() if name in names]
        if self.buffers:
            tensors += state.buffers.values()
        if self.opt_state and ranks.size > 1:
            entries = {n: _moving(state.opt_state.get(n, {})) for n in sorted(names)}
            tensors += _held_by_all(entries.values(), ranks)
        return tensors


def _owes(state: TrainState, slot: Slot) -> bool:
    """Return whether there was an update since the last average."""
    return state.step > slot["since"]


def _moving(entry: Mapping[str, Any]) -> Tensors:
    """Return the averaged tensors of an optimizer entry, in the same order on all ranks."""
    return {
        name: value
        for name, value in sorted(entry.items())
        if isinstance(value, torch.Tensor) and name != "step"
    }


def _held_by_all(entries: Iterable[Tensors], ranks: World) -> list[torch.Tensor]:
    """Return the tensors of entries that match on all ranks; a collective."""
    rows = list(entries)
    layouts = [
        [(name, tuple(t.shape), str(t.dtype)) for name, t in entry.items()]
        for entry in rows
    ]
    sums = [zlib.crc32(str(layout).encode()) for layout in layouts]
    checksums = torch.tensor(sums, dtype=torch.int64, device=readable(ranks.device))
    matches = (
        (torch.stack(all_gather_list(checksums, ranks, label=_LABEL)) == checksums)
        .all(0)
        .tolist()
    )
    return [
        tensor
        for entry, same in zip(rows, matches, strict=True)
        if same
        for tensor in entry.values()
    ]
