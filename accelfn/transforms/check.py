# SPDX-License-Identifier: Apache-2.0
"""Look, every few updates, whether all ranks still hold the same parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from accelfn.base.arguments import integer
from accelfn.collectives import check_values
from accelfn.definition.transform import transform
from accelfn.state.state import TrainState
from accelfn.state.update import Update

_ADVICE = (
    "They were trained alike and have drifted apart. Look for what differs by rank in"
    " transforms and steps of your own, for parameters that are written outside of a step,"
    " and for operations that are not deterministic."
)


@transform
class check_replicas:
    """Raise, on all ranks, at the first check that finds different parameters on them.

    It looks after each update whose number is a multiple of `every`, before anything is made
    of the new state. Buffers are not compared: batch statistics differ by rank. Of a model
    that is split, copies are compared; one copy has nothing to be compared with. Where ranks
    differ on purpose, as under `local_sgd`, it is refused.

    Acts on: after_update.

    Args:
        every: updates between checks.

    Law:
        If one element of one parameter differs on one rank, all raise at the next check; ranks
        that agree train, bitwise, as without it.

    Cost:
        A sum over every parameter and a small all-reduce, every `every` updates; the host waits
        for it.

    Raises:
        ReplicaMismatchError: the first parameter that differs is named, a row a rank.

    Example:
        >>> check_replicas(every=100)
        af.check_replicas(every=100)
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "apart": "would raise beside {other!r}, under which ranks differ on purpose."
        " Leave it out; af.assert_replicas_agree(state) looks once."
    }
    every: int = attrs.field(validator=integer(1, "a number of updates"), kw_only=True)

    def after_update(
        self, state: TrainState, slot: None, update: Update
    ) -> tuple[TrainState, None]:
        """Compare, if it is time."""
        if state.step % self.every == 0:
            label = f"check_replicas at update {state.step}"
            check_values(state.params, state.world, label=label, advice=_ADVICE)
        return state, slot
