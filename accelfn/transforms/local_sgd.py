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
            f"af.local_sgd(sync_every={owner.sync_every}, neighbours={value!r}): expected a"
            " dict from periods to group sizes, such as {4: 8}. Each period must divide the next"
            " longer period, and the longest must divide sync_every. Each group size must divide"
            " the next larger size."
        )
        raise ArgumentError(msg)


@transform
class local_sgd:
    """Train ranks independently, and average parameters every `sync_every` updates.

    No gradient is communicated. Batch size, learning rate and schedule do not change. In an
    average, ranks are weighted by the samples that they have seen since the last average, so
    short and empty shares count correctly. If no rank has seen a sample, all ranks have equal
    weights. `af.finalize` averages once more at the end. Evaluation and export use the average
    over the ranks at any time. If another transform, such as `ema`, sets the parameters to
    evaluate, the average is over those parameters.

    With `neighbours`, groups of ranks with a fast network, such as the ranks of one machine,
    are averaged more often than all ranks.

    With `wrap_fsdp` in a world with "dp_replicate", the copies of the model train
    independently. Each rank averages its shard with the same shard of the other copies.

    Acts on: init, reduce, after_update, eval_params, finalize, merge.

    Args:
        sync_every: the number of updates between averages, at least 1.
        buffers: also average floating-point buffers (running statistics).
        opt_state: also average the tensors of the optimizer's state, except step counts. If a
        rank has no state for a parameter yet, because there was no gradient, the state of that
        parameter is not averaged.
        bucket_cap_mb: the maximum size of an all-reduced buffer, in MiB.
        neighbours: group sizes by period: `{4: 8}` averages groups of 8 neighboring ranks every
        4 updates. Each period must divide the next longer one, and the longest must divide
        `sync_every`. Each group size must divide the next larger one, and the largest must
        divide the number of ranks. If several averages are due, only the largest group is
        averaged.

    Law:
        With `sync_every=1` and plain SGD it equals `wrap_ddp`. A copy that is split over
        several ranks trains like one rank with the whole model, up to rounding. In a world of 1
        nothing changes, bitwise. Ranks have different parameters between averages.

    Cost:
        Every `sync_every` updates, all-reduces in buckets of `bucket_cap_mb`, of the parameters
        (or this rank's shards) that are trained, or were trained before `with_trainable` froze
        them. Memory for one bucket. If no rank has seen a sample since the last average, twice
        as many all-reduces. With `opt_state`, a gather of 8 bytes per parameter. With
        `neighbours`, the same within groups, at their periods.

    Raises:
        ArgumentError: periods or group sizes do not divide each other; when the state is
        created, a group size does not divide the number of ranks.
        WorldError: when the state is created, `neighbours` is used in a world that is a part of
        another world.

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
        """Tell others which slot entries differ by rank, and when an average is still due."""
        keys = ("weight", "near") if self.neighbours else ("weight",)
        return {"draws_nothing": True, "by_rank": keys, "owes": _owes}

    def init(self, state: TrainState) -> Slot:
        """Create the slot for ranks with equal parameters, and open the groups of neighbors."""
        ranks = state.definition.copies
        for size in self.neighbours.values():
            if ranks.size % size:
                msg = (
                    f"af.local_sgd(neighbours={dict(self.neighbours)}): the {ranks.size} ranks"
                    " (or copies of the model) that train independently cannot be divided into"
                    f" groups of {size}. Use group sizes that divide {ranks.size}."
                )
                raise ArgumentError(msg)
            ranks.split(size=size)
        return self._new_slot(state.step)

    def after_update(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Add up this rank's weight, and average if a period is over."""
        slot = {**slot, "weight": slot["weight"] + update.weight}
        if self.neighbours:
            # a group size that a loaded slot does not have starts with the weight since the
            # last average of all ranks
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
        """Average the parameters in place, if there was an update since the last average."""
        if _owes(state, slot):
            ranks = state.definition.copies
            self._average_(self._averaged_tensors(state, ranks), slot["weight"], ranks)
        return state, self._new_slot(state.step)

    def merge(self, slots: Sequence[Slot], _: World) -> tuple[list[float], Slot]:
        """Return the ranks' weights in an average, and the slot afterwards."""
        weights = [float(slot["weight"]) for slot in slots]
        return weights, self._new_slot(slots[0]["since"])

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

    def _new_slot(self, step: int) -> Slot:
        """Return the slot of ranks that were averaged after this update."""
        slot: Slot = {"weight": 0, "since": step}
        if self.neighbours:
            slot["near"] = {f"{period}": 0 for period in self.neighbours}
        return slot

    def _average_neighbours(self, state: TrainState, slot: Slot, updates: int) -> Slot:
        """Average the largest group that is due, and restart its period and shorter periods."""
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
        # parameters that were never trained are equal on all ranks, and an average would round
        # them
        names = state.definition.skeleton.once_trained
        tensors = [param for name, param in state.params.items() if name in names]
        if self.buffers:
            tensors += state.buffers.values()
        if self.opt_state and ranks.size > 1:
            entries = {n: _moving(state.opt_state.get(n, {})) for n in sorted(names)}
            tensors += _held_by_all(entries.values(), ranks)
        return tensors


def _owes(state: TrainState, slot: Slot) -> bool:
    """Return whether there was an update since the last average of all ranks."""
    return state.step > slot["since"]


def _moving(entry: Mapping[str, Any]) -> Tensors:
    """Return an optimizer entry's tensors to average, in the same order on all ranks."""
    return {
        name: value
        for name, value in sorted(entry.items())
        if isinstance(value, torch.Tensor) and name != "step"
    }


def _held_by_all(entries: Iterable[Tensors], ranks: World) -> list[torch.Tensor]:
    """Return the tensors of entries that have the same layout on all ranks; a collective."""
    rows = list(entries)
    layouts = [
        [(name, tuple(t.shape), str(t.dtype)) for name, t in entry.items()]
        for entry in rows
    ]
    sums = [zlib.crc32(str(layout).encode()) for layout in layouts]
    checksums = torch.tensor(sums, dtype=torch.int64, device=readable(ranks.device))
    all_checksums = torch.stack(all_gather_list(checksums, ranks, label=_LABEL))
    matches = (all_checksums == checksums).all(0).tolist()
    return [
        tensor
        for entry, same in zip(rows, matches, strict=True)
        if same
        for tensor in entry.values()
    ]
