# SPDX-License-Identifier: Apache-2.0
"""Bugs that show where two things meet, which a stranger chose from the code alone."""

from accelfn.checkpoint import commit, elastic
from accelfn.engine import ddp, engine
from accelfn.engine.optimizer import versions
from accelfn.launching import config
from accelfn.loop import batch_size, control
from accelfn.outer import exchange
from accelfn.placing import plan
from accelfn.step import sync_grads
from accelfn.testing import bundle
from accelfn.testing.checking import method_laws
from accelfn.testing.comparing import differences
from accelfn.weights import accelerate
from accelfn.world.world import World
from tests.kit import test_bundle, test_check_transform, test_states
from tests.laws import (
    test_ddp,
    test_definitions,
    test_diloco,
    test_interludes,
    test_placing,
    test_regroup,
)
from tests.mutants.mutant import Mutant
from tests.unit import (
    test_batch_size,
    test_checkpoint_partial,
    test_control,
    test_import_state,
    test_optimizer,
    test_partition,
    test_settings,
)

EACH = test_interludes.test_each_act_beside_each_setup

MUTANTS = [
    Mutant(
        "behind a block of main_first that raised the next one is refused",
        test_control.test_a_block_that_failed_is_tried_again,
        control.main_first,
        """\
_went.in_first = False
        if first:
→
if first:
""",
        args={"schedule": [], "local": False},
    ),
    Mutant(
        "L41: of more than ten blocks those from the eleventh on are parts of the second",
        test_placing.test_the_order_of_units_is_filled,
        plan._is_within,
        'name.startswith(f"{module}.") → name.startswith(module)',
    ),
    Mutant(
        "L54: of ranks that met anew without rank 0 none is the first of its machine",
        test_regroup.test_the_rest_go_on_from_the_last_average,
        World.followed,
        "local_rank=rank, → local_rank=self.local_rank,",
    ),
    Mutant(
        "rows of models that ranks trained apart are put together to one",
        test_checkpoint_partial.test_models_of_several_ranks_are_no_parts_of_one,
        elastic.goes_on,
        "if not manifest.copies: → if False:",
        args={"size": 2},
    ),
    Mutant(
        "a state differs from its copy in what is on its way",
        test_states.test_what_is_on_its_way_is_compared,
        differences._children,
        "if isinstance(tree, Pending): → if False:",
    ),
    Mutant(
        "what an optimizer noted before its first update raised is counted with the next",
        test_optimizer.test_an_update_that_was_refused_is_not_counted,
        engine.Engine.is_undone,
        "self._bound = (None, None, None) → pass",
    ),
    Mutant(
        "what was raised in the handling of another error keeps a try's tensors",
        test_batch_size.test_nothing_of_a_try_is_kept,
        batch_size._clear_frames,
        "[each.__cause__, each.__context__] → [each.__cause__]",
        args={"size": 1},
    ),
    Mutant(
        "a fused part that had stepped when the next one raised has changed nothing",
        test_partition.test_a_part_that_raises_behind_another,
        versions._goes_by_lists,
        'group.get("foreach") or group.get("fused") → group.get("foreach")',
        args={"by": {"fused": True}},
    ),
    Mutant(
        "L22: of ranks of one copy the first's buffers alone are saved",
        EACH,
        commit.divided,
        "first == rank or held[first].get(name) != held[rank].get(name) → first == rank",
        args={"setup": "copies"},
    ),
    Mutant(
        "L22: behind a look at a rank's own gradients buffers are no longer rank 0's",
        EACH,
        ddp.DDPRunner.forward,
        "ddp.require_forward_param_sync = samples.begins → pass",
        args={"setup": "ddp"},
    ),
    Mutant(
        "moments go by position where an optimizer names its parameters",
        test_import_state.test_an_optimizer_that_names_its_parameters_may_have_them_in_any_order,
        accelerate.entries_of,
        "if all(told): → if all(told) and sizes != own:",
    ),
    Mutant(
        "L11: what few bits left out of what nobody took is remembered",
        test_diloco.test_what_a_rank_does_without_samples_leaves_nothing_out,
        exchange.Exchange.send,
        "_if_seen(weight, kept[name], local(error[name])) → kept[name].clone()",
    ),
    Mutant(
        "a transform that cannot go on with more ranks keeps the laws",
        test_check_transform.test_planted_bugs_are_refused_by_their_law,
        method_laws._loads_anywhere,
        "{1, subject.size + 1} → {1}",
        args={"planted": test_check_transform.NotOnMore(), "law": "loads_anywhere"},
    ),
    Mutant(
        "a config of one machine keeps the address of many",
        test_settings.test_config_of_one_machine_forgets_the_others,
        config._questions,
        "found.pop(name, None) → name",
    ),
    Mutant(
        "a replay leaves out the extras of its step",
        test_bundle.test_what_a_step_was_given_beside_its_batch_is_given_again,
        bundle.crash_bundles,
        "(batch, *extras), error) → (batch,), error)",
    ),
    Mutant(
        "L2: ranks whose gradients are reduced by hand may train with other rates",
        test_definitions.test_definitions_that_differ_are_refused,
        sync_grads.sync_grads,
        "compare(state) → ranks.size",
    ),
    Mutant(
        "L24: DistributedDataParallel is never told of a static graph",
        test_ddp.test_a_static_graph_is_that_of_the_first_pass_that_reduces,
        ddp.DDPRunner.forward,
        "if self._learns: → if False:",
    ),
]
