# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a state is between its steps: what transforms draw, who may still use it."""

from accelfn import draws, state, update, views
from tests.laws import test_shared_draws
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="the end in the caller's modes",
        says="finalize makes its slot in the caller's inference mode",
        law="L22",
        test=test_shared_draws.test_what_transforms_draw_is_of_the_state,
        place=update.finalize,
        old="    with own_modes(state.definition.world.device):\n"
        '        after = _called(after, "finalize", owners)\n',
        new='    after = _called(after, "finalize", owners)\n',
    ),
    Mutant(
        name="every rank draws its own",
        says="what transforms draw after an update, and at the end, differs by rank",
        law="L50",
        test=test_shared_draws.test_what_transforms_draw_is_of_the_state,
        place=update._called,
        old="shared_draws(state, field, owners), torch.no_grad()",
        new="torch.no_grad()",
    ),
    Mutant(
        name="a skip draws from the process",
        says="what transforms draw after an update that was skipped differs by rank",
        law="L50",
        test=test_shared_draws.test_what_transforms_draw_is_of_the_state,
        place=update._skipped,
        old='shared_draws(state, "after_skip", owners), torch.no_grad()',
        new="torch.no_grad()",
    ),
    Mutant(
        name="one stream for all fields",
        says="a transform draws the same numbers in each of its fields",
        law="L50",
        test=test_shared_draws.test_what_transforms_draw_is_of_the_state,
        place=draws.shared_draws,
        old="streams.key(state.seed, name, purpose)",
        new="streams.key(state.seed, name)",
    ),
    Mutant(
        name="evaluated in the process's draws",
        says="what a transform draws for the parameters to evaluate differs by rank",
        law="L50",
        test=test_shared_draws.test_what_transforms_draw_is_of_the_state,
        place=views.eval_params,
        old="draws, torch.no_grad()",
        new="torch.no_grad()",
    ),
    Mutant(
        name="one beginning for all",
        says="transforms that draw in init draw the same numbers",
        law="L50",
        test=test_shared_draws.test_draws_of_two_beginnings_differ,
        args={"size": 1},
        place=state.TrainState.with_setup,
        old='f"init {each.name}"',
        new='"init"',
    ),
]
