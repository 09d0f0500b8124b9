# SPDX-License-Identifier: Apache-2.0
"""What transforms draw: the same numbers on all ranks, a function of the state."""

from contextlib import AbstractContextManager

from accelfn.base import draws
from accelfn.base.contexts import NOTHING
from accelfn.state.moment import Moment


def shared_draws(
    state: Moment, field: str, purpose: str | None = None
) -> AbstractContextManager[object]:
    """Return a context in which draws are the same on all ranks.

    Whatever calls a transform's field with a state calls it in one, of the field's name or
    another purpose. Transforms that draw nothing say so: seeding for nobody would cost 5 µs.
    """
    definition = state.definition
    if field not in definition.setup.drawing:
        return NOTHING
    purpose = purpose or field
    keys, name = definition.cache.keys, definition.name
    known = keys.get(purpose)
    if known is None or known[0] != state.seed:
        known = keys[purpose] = (state.seed, draws.key(state.seed, name, purpose))
    return draws.seeded(draws.fold(known[1], state.num_tried), definition.world.device)
