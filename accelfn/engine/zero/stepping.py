# SPDX-License-Identifier: Apache-2.0
"""`ZeroOptimizer`: an update that DeepSpeed takes, with a state's hyperparameters and counts."""

from typing import Any

import torch

from accelfn.engine.optimizer.live_optimizer import LiveOptimizer, State
from accelfn.engine.zero.flats import FlatOptState
from accelfn.engine.zero.home import ZeroHome
from accelfn.state.metrics import Number
from accelfn.structure.prototype import Assignments


class ZeroOptimizer:
    """Takes an update in DeepSpeed, which divides, clips, and leaves out what is not finite."""

    skips = is_untouched = False

    def __init__(self, home: ZeroHome) -> None:
        """Take where the flat tensors are; DeepSpeed's engine is not yet there."""
        self._home = home
        self._live: LiveOptimizer | None = None
        self._shown: Any = None

    def load(self, state: State) -> None:
        """Take over a state's entries."""
        if self._live is None:
            base, names = self._home.zero.base, self._home.flats_by_name()
            self._live = LiveOptimizer(base, names, self._home)
        self._live.load(state)
        self._shown = state

    def expect(self, planned: Assignments) -> None:
        """Expect an update; raise unless all can be stepped as the state says.

        Raises:
            OptimizerError: nobody set a schedule-free optimizer's mode.
            StateError: what was read of its state was written to.
        """
        self._here.expect(planned)
        if isinstance(self._shown, FlatOptState):
            self._shown.check_read()

    def divides(self, divisor: Number) -> bool:
        """Whether it divides gradients itself: always."""
        return True

    def update(
        self,
        hyper: Assignments,
        divisor: Number | None = None,
        skip: torch.Tensor | None = None,
    ) -> State | None:
        """Step, and return the optimizer's state by name; None where it left the update out."""
        live, home = self._here, self._home
        live.begin(hyper)
        home.bound.changed()
        if isinstance(self._shown, FlatOptState):
            self._shown.changed()
        is_finite = home.zero.step(1.0 if divisor is None else float(divisor))
        state = live.finish()
        if not is_finite:
            return None
        self._shown = state
        return state

    @property
    def _here(self) -> LiveOptimizer:
        assert self._live is not None  # noqa: S101 - a state is bound first
        return self._live
