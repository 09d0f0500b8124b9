# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run must say alike of their states, before they train together."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accelfn.base.shards import cut_axes, local
from accelfn.base.valueless import on_host
from accelfn.collectives import all_reduce_
from accelfn.data.alike import (
    are_alike,
    check_alike,
    check_definition_rows,
    order_told,
    readers_told,
)
from accelfn.data.fingerprint import form_of
from accelfn.errors import Error, LossError
from accelfn.schedules.rates import Rates
from accelfn.state.state import TrainState
from accelfn.structure.prototype import kind_of
from accelfn.world import World

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FAR = 1e-2
"""How much of their length gradients may differ by, as the order of sums decides."""
_ASKED = 0, 1, 10, 100, 1000
"""Updates at which a schedule is asked: of two functions, only what they return compares."""


def check_definitions(state: TrainState) -> None:
    """Raise unless all ranks have one setup, optimizer, schedule and seed, and one data.

    Data is compared where ranks share it, by `shard_data`: elsewhere each may have its own.

    Cost: a small all-reduce, once a state, and another for data (see `check_alike`).

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    check_definition_rows(_rows(state), state.world)
    data, definition = state.data, state.definition
    if data is None:
        return
    if definition.plan.num_shares > 1:
        check_alike(data, data.looks, state.world)
    else:
        same = are_alike(data, data.looks, state.world)
        definition.cache.has_same_data = same


def check_gradients(
    trained: Iterable[str], gradients: Mapping[str, torch.Tensor], ranks: World
) -> None:
    """Raise unless ranks along "tp" have the same gradients of what all of them hold.

    Cost: one sum of these gradients over the ranks, once an engine.

    Raises:
        LossError: one was computed for the features alone that a rank has.
    """
    alike = {
        name: local(gradients[name]).detach().double()
        for name in trained
        if name in gradients and "tp" not in cut_axes(gradients[name])
    }
    totals = {name: each.clone() for name, each in alike.items()}
    lengths = torch.zeros(len(alike), dtype=torch.float64, device=ranks.device)
    for i, each in enumerate(alike.values()):
        lengths[i] = each.norm()
    all_reduce_([*totals.values(), lengths], ranks, label="compare gradients")
    for (name, mine), length in zip(
        alike.items(), on_host(lengths).tolist(), strict=True
    ):
        far = (totals[name] - ranks.size * mine).norm()
        if float(on_host(far)) > _FAR * length:
            module = name.rpartition(".")[0]
            msg = (
                f"af.tensor_parallel: ranks have other gradients of {name!r}, which all of"
                " them hold: each computes with it for the features that it has, between a"
                " column and a row layer, or for the positions. If it stands there rightly, as"
                f' a norm does, add {{{module!r}: "replicated"}} to the plan in the first case,'
                ' and "sequence" in the second, and its gradients are summed.'
            )
            raise LossError(msg)


def _rows(state: TrainState) -> dict[str, str]:
    definition = state.definition
    names = {id(p): n for n, p in definition.skeleton.module.named_parameters()}
    rows = readers_told(definition.data)  # first, as ranks say it that read together
    rows |= {"seed": str(state.seed)}
    for i, each in enumerate(definition.setup):
        rows[f"transform {i}"] = _shown(each)
    rows["optimizer"] = kind_of(definition.optimizer, names)
    for i, group in enumerate(definition.optimizer.param_groups):
        for name, value in sorted(group.items()):
            if name != "params":
                rows[f"{name} of parameter group {i}"] = str(_plain(value))
    if definition.rates is not None:
        rows["schedule"] = _asked(definition.rates, definition.schedule)
    if definition.data is not None and definition.plan.num_shares > 1:
        rows |= {f"data, {k}": str(v) for k, v in form_of(definition.data).items()}
        rows |= order_told(definition.data, state.seed)
        cursor = state.cursor
        rows["cursor"] = f"epoch {cursor.epoch}, sample {cursor.samples}"
    return rows


def _shown(transform: Any) -> str:
    """Return a transform of ours as it is written; of another's the name alone."""
    own = type(transform).__module__.partition(".")[0] == __name__.partition(".")[0]
    return _ADDRESS.sub("", repr(transform)) if own else transform.name


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else tuple(value.shape)
    plain = isinstance(value, (int, float, str, tuple, type(None)))
    return value if plain else type(value).__name__


def _asked(rates: Rates, schedule: object) -> str:
    found: list[object] = []
    try:
        for update in _ASKED:
            found += [_plain(value) for value in rates(update).values()]
    except (ArithmeticError, LookupError, ValueError, Error):  # it ends before
        found.append(getattr(schedule, "__qualname__", type(schedule).__name__))
    return str(found)
