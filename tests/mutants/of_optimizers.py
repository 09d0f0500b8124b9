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
        "L24: of a partition's optimizers, the first alone moves its parameters",
        test_optimizers.test_equal_parts_are_one_optimizer,
        inspect.unwrap(Partitioned.step),  # torch wraps it at first use
        "in self.parts: → in self.parts[:1]:",
    ),
    Mutant(
        "L24: schedules set rates that no part reads",
        test_optimizers.test_each_part_is_its_own_optimizer,
        live_optimizer.LiveOptimizer._assign,
        "group = self._torch.param_groups[i]"
        " → group = dict(self._torch.param_groups[i])",
    ),
    Mutant(
        "L46: what was saved of a part's optimizer does not come back",
        test_optimizers.test_parts_are_saved_and_copied,
        PartStates.__setitem__,
        "state[own] = entry → state[own] = {}",
    ),
    Mutant(
        "L26: frozen parameters have gradients, and the optimizer moves them",
        test_optimizers.test_frozen_in_mid_run,
        skeleton.Skeleton.build,
        "made.requires_grad_(name in trained) → made",
    ),
    Mutant(
        "L26: a parameter that is thawed begins with a new optimizer state",
        test_optimizers.test_freezing_is_requires_grad,
        live_optimizer.LiveOptimizer.load,
        "if name in state: → if name in state and param.requires_grad:",
    ),
    Mutant(
        "L26: a state that trains others forgets what was saved of their optimizer",
        test_optimizers.test_a_checkpoint_is_of_no_trained_set,
        fields.with_fields,
        """\
opt_state=beside(saved["opt_state"], params, optimizer, module)
→
opt_state={
            name: entry
            for name, entry in saved["opt_state"].items()
            if name in state.definition.skeleton.trainable
        }
""",
    ),
    Mutant(
        "L20: the parameters of a schedule-free optimizer are evaluated as they are",
        test_optimizers.test_schedule_free_is_its_own_modes,
        schedule_free.schedule_free.eval_params,
        'group["train_mode"] = True → group["train_mode"] = False',
        args={"kind": "adamw"},
    ),
    Mutant(
        "L43: evaluating switches the mode of the parameters themselves",
        test_optimizers.test_schedule_free_is_its_own_modes,
        schedule_free.schedule_free.eval_params,
        "nn.Parameter(p.clone(), False) → nn.Parameter(p, False)",
        args={"kind": "sgd"},
    ),
    Mutant(
        "L46: numbers of parameter groups, the average's weight say, begin anew when loaded",
        test_optimizers.test_schedule_free_over_ranks_and_cuts,
        live_optimizer.LiveOptimizer.load,
        "group.update(saved) → group.update({})",
    ),
]
