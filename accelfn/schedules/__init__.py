# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules, which count no calls.

A schedule is a pure function from `state.step`, the number of updates taken so far, to a
factor, which multiplies the learning rate of every parameter group; or a torch scheduler,
whose rates are those of the optimizer's own groups. Either way a resumed run needs no
scheduler state, and ranks or micro-batches change nothing.
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

if not _typing.TYPE_CHECKING:  # where it would allow every name

    def __getattr__(name: str) -> object:
        """Say what to write for what has another name here."""
        hint = _find_hint(__name__, name)
        msg = f"module {__name__!r} has no attribute {name!r}{f': {hint}' if hint else ''}."
        raise _RecordError(msg)
