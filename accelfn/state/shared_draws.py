# SPDX-License-Identifier: Apache-2.0
"""What transforms draw: the same numbers on all ranks, a function of the state.

For what is split over the ranks, each draws its part of what one rank would draw.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from accelfn.base import draws
from accelfn.base.contexts import NOTHING
from accelfn.definition.whole_draws import WholeDraws

if TYPE_CHECKING:
    from accelfn.state.state import TrainState


def shared_draws(
    state: "TrainState", field: str, purpose: str | None = None
) -> AbstractContextManager[object]:
    """Return a context in which draws are the same on all ranks.

    Whatever calls a transform's field with a state calls it in one, of the field's name or
    another purpose. Transforms that draw nothing say so: seeding for nobody would cost 5 µs.
    """
    if field not in state.definition.setup.drawing:
        return NOTHING
    return draws_for(state, purpose or field)


def draws_for(state: "TrainState", purpose: str) -> AbstractContextManager[object]:
    """Return a context in which draws are a function of the state and a purpose, on any rank."""
    definition = state.definition
    keys, name = definition.cache.keys, definition.name
    known = keys.get(purpose)
    if known is None or known[0] != state.seed:
        known = keys[purpose] = (state.seed, draws.key(state.seed, name, purpose))
    key = draws.fold(known[1], state.num_tried)
    seeded = draws.seeded(key, definition.world.device)
    return seeded if definition.layout is None else _of_wholes(seeded)


@contextmanager
def _of_wholes(seeded: draws.seeded) -> Generator[None]:
    with seeded, WholeDraws():
        yield
