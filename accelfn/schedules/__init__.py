# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules, which depend only on the number of the update.

A schedule is a pure function. Its argument is `state.step`, the number of updates so far, and its
result is a factor, which multiplies the learning rate of every parameter group. `from_torch`
instead uses the learning rates of a torch scheduler. In both cases a checkpoint needs no scheduler
state, and the number of ranks and micro-batches has no influence.
"""

import typing as _typing

from accelfn.base.arguments import find_hint as _find_hint
from accelfn.errors import RecordError as _RecordError
from accelfn.schedules.factors import Schedule as Schedule
from accelfn.schedules.factors import constant as constant
from accelfn.schedules.factors import from_torch as from_torch
from accelfn.schedules.factors import join as join
from accelfn.schedules.factors import linear as linear
from accelfn.schedules.factors import one_cycle as one_cycle
from accelfn.schedules.factors import warmup_cosine as warmup_cosine

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> object:
        """Raise an error that names the accelfn name for a known name of other libraries."""
        hint = _find_hint(__name__, name)
        msg = f"module {__name__!r} has no attribute {name!r}{f': {hint}' if hint else ''}."
        raise _RecordError(msg)
