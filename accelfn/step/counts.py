# SPDX-License-Identifier: Apache-2.0
"""What an update is over, counted before its forward passes.

A loss with several denominators (tokens of a text, boxes of an image) is no total over one
weight. If the loss function is told how many of each the whole update has, on all ranks and
in all micro-batches, it can divide by them itself: what it returns is its part of the
update's loss, and parts add.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeAlias

import attrs
import torch

from accelfn.base.arguments import is_number
from accelfn.base.signatures import qualname
from accelfn.collectives import sum_named
from accelfn.data import Batch
from accelfn.errors import LossError
from accelfn.state.metrics import Loss, Number
from accelfn.world import World

Count: TypeAlias = Callable[[Any], Number | Mapping[str, Number]]

_ALONE = ""


@attrs.frozen
class Counts:
    """What was counted of an update.

    Attributes:
        told: the number, or numbers by name, for the loss function; 1 in place of 0.
        whole: the sum of all.
    """

    told: Number | dict[str, Number]
    whole: float


def counted(count: Count, parts: Sequence[Any], ranks: World) -> Counts:
    """Return the counts of an update's micro-batches, over all ranks.

    Cost: on several ranks one all-reduce of a few numbers, and the host waits for it.

    Raises:
        LossError: `count` gave something that is no count, or other names than before.
        CollectiveMismatchError: ranks counted as much, but under other names.
    """
    totals: dict[str, float] | None = None
    for part in parts:
        found = _of_part(count, part)
        if found is None:
            continue
        if totals is not None and totals.keys() != found.keys():
            msg = (
                f"{qualname(count)} counted {sorted(totals)}, and then {sorted(found)}."
            )
            raise LossError(msg)
        totals = {n: (totals or {}).get(n, 0) + each for n, each in found.items()}
    if totals is None:  # an empty share: its stand-in says what there is to count
        stand_in = _checked(count, count(parts[0].value))
        totals = dict.fromkeys(stand_in, 0)
    if ranks.size > 1:
        named = {name: (each,) for name, each in totals.items()}
        label = "count the update"
        sums = sum_named(named, ranks, kind="count", label=label, what="counts")
        totals = {name: each for name, (each,) in sums.items()}
    # what is divided by a count of 0 is 0, and stays that
    told: dict[str, Number] = {name: each or 1 for name, each in totals.items()}
    return Counts(told.get(_ALONE, told), sum(totals.values()))


def of_shares(loss_fn: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Return a loss function of totals, for one that returns its part of the update's loss.

    The last extra is the `Counts` of the update, of which it is given what is `told`.
    """

    @wraps(loss_fn)
    def loss_of_share(
        model: torch.nn.Module, batch: Any, *extras: Any, **weight: Any
    ) -> Loss:
        *others, counts = extras
        returned = loss_fn(model, batch, *others, counts.told, **weight)
        share = returned if isinstance(returned, Loss) else Loss(returned, 1)
        if not isinstance(share.weight, (int, float)) or share.weight != 1:
            msg = (
                f"{qualname(loss_fn)} returned af.Loss(weight={share.weight!r}) beside count=,"
                " by which it has divided already. Return its part of the update's loss, or"
                " af.Loss(part, 1, name=(total, weight))."
            )
            raise LossError(msg)
        whole = sum(_checked(count, count(batch)).values())
        aux = {
            name: entry if isinstance(entry, tuple) else (entry * counts.whole, whole)
            for name, entry in share.aux.items()
        }
        return Loss(share.total * counts.whole, whole, **aux)

    loss_of_share.__qualname__ = qualname(loss_fn)
    return loss_of_share


def _of_part(count: Count, part: Any) -> dict[str, float] | None:
    """Return the counts of a micro-batch; None for an empty share's stand-in."""
    if not isinstance(part, Batch):
        return _checked(count, count(part))
    is_stand_in = part.weights[0] == 0
    return None if is_stand_in else _checked(count, count(part.value))


def _checked(count: Count, returned: Any) -> dict[str, float]:
    named = returned if isinstance(returned, Mapping) else {_ALONE: returned}
    found: dict[str, float] = {}
    for name, value in named.items():
        scalar = isinstance(value, torch.Tensor) and value.numel() == 1
        if not (scalar or is_number(value)) or not 0 <= float(value) < math.inf:
            msg = (
                f"{qualname(count)} returned {returned!r}; expected a count, 0 or more, or"
                " several by name."
            )
            raise LossError(msg)
        found[name] = value.item() if isinstance(value, torch.Tensor) else value
    return found
