# SPDX-License-Identifier: Apache-2.0
"""Bugs in optimizers made of several, frozen in part, or schedule-free."""

import inspect

from accelfn.checkpoint import fields
from accelfn.engine.optimizer import live_optimizer
from accelfn.structure import skeleton
from accelfn.structure.partition import Partitioned, PartStates
from accelfn.transforms import schedule_free
from tests.laws import test_optimizers
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="only the first part steps",
        says="of a partition's optimizers, the first alone moves its parameters",
        law="L24",
        test=test_optimizers.test_equal_parts_are_one_optimizer,
        place=inspect.unwrap(Partitioned.step),  # torch wraps it at first use
        old="in self.parts:",
        new="in self.parts[:1]:",
    ),
    Mutant(
        name="a partition's groups are copies",
        says="schedules set rates that no part reads",
        law="L24",
        test=test_optimizers.test_each_part_is_its_own_optimizer,
        place=live_optimizer.LiveOptimizer._assign,
        old="group = self._torch.param_groups[i]",
        new="group = dict(self._torch.param_groups[i])",
    ),
    Mutant(
        name="parts forget",
        says="what was saved of a part's optimizer does not come back",
        law="L46",
        test=test_optimizers.test_parts_are_saved_and_copied,
        place=PartStates.__setitem__,
        old="state[own] = entry",
        new="state[own] = {}",
    ),
    Mutant(
        name="freezing is not told to autograd",
        says="frozen parameters have gradients, and the optimizer moves them",
        law="L26",
        test=test_optimizers.test_frozen_in_mid_run,
        place=skeleton.Skeleton.build,
        old="made.requires_grad_(name in trained)",
        new="made",
    ),
    Mutant(
        name="the frozen are forgotten",
        says="a parameter that is thawed begins with a new optimizer state",
        law="L26",
        test=test_optimizers.test_freezing_is_requires_grad,
        place=live_optimizer.LiveOptimizer.load,
        old="if name in state:",
        new="if name in state and param.requires_grad:",
    ),
    Mutant(
        name="the checkpoint freezes",
        says="a state that trains others forgets what was saved of their optimizer",
        law="L26",
        test=test_optimizers.test_a_checkpoint_is_of_no_trained_set,
        place=fields.with_fields,
        old='opt_state=saved["opt_state"]',
        new="""\
opt_state={
            name: entry
            for name, entry in saved["opt_state"].items()
            if name in state.definition.skeleton.trainable
        }""",
    ),
    Mutant(
        name="evaluated where it trains",
        says="the parameters of a schedule-free optimizer are evaluated as they are",
        law="L20",
        test=test_optimizers.test_schedule_free_is_its_own_modes,
        args={"kind": "adamw"},
        place=schedule_free.schedule_free.eval_params,
        old='group["train_mode"] = True',
        new='group["train_mode"] = False',
    ),
    Mutant(
        name="looking moves",
        says="evaluating switches the mode of the parameters themselves",
        law="L43",
        test=test_optimizers.test_schedule_free_is_its_own_modes,
        args={"kind": "sgd"},
        place=schedule_free.schedule_free.eval_params,
        old="nn.Parameter(p.clone(), False)",
        new="nn.Parameter(p, False)",
    ),
    Mutant(
        name="groups forget",
        says="numbers of parameter groups, the average's weight say, begin anew when loaded",
        law="L46",
        test=test_optimizers.test_schedule_free_over_ranks_and_cuts,
        place=live_optimizer.LiveOptimizer.load,
        old="group.update(saved)",
        new="group.update({})",
    ),
]
