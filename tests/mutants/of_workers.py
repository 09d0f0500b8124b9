# SPDX-License-Identifier: Apache-2.0
"""Bugs in workers of several ranks: in what is averaged, compared, saved and merged of them."""

from accelfn.checkpoint import commit, elastic, manifest
from accelfn.definition import checks, definition
from accelfn.engine import building
from accelfn.state import values
from accelfn.step import stages, sync_grads, value_and_grad
from accelfn.transforms import compress, ddp, local_sgd
from tests.laws import test_post_local as post_local
from tests.laws import test_workers as laws
from tests.mutants.mutant import Mutant
from tests.unit import test_within as unit

ALONE = laws.test_a_worker_is_a_rank_alone
CROSS = laws.test_only_averages_cross_workers
GOES_ON = laws.test_a_period_goes_on_with_other_workers
FORM = laws.test_workers_form_when_ranks_agree
ONCE = laws.test_a_worker_is_saved_and_merged_once

MUTANTS = [
    Mutant(
        "L10: ranks of a worker average gradients with all others",
        ALONE,
        ddp.wrap_ddp.engine,
        "state.definition.copy → state.world.loss",
    ),
    Mutant(
        "L10: workers are along the axis of a worker's ranks",
        ALONE,
        definition.Definition.copies,
        "_BESIDE[self.within] → self.within",
    ),
    Mutant(
        "L10: workers are along dp_shard alone",
        ALONE,
        definition.Definition.within,
        'facts["within"][0] if "within" in facts else split'
        ' → "dp_shard" if "within" in facts else split',
    ),
    Mutant(
        "L10: a worker of one rank has DistributedDataParallel without a group",
        ALONE,
        building._built,
        "state.definition.copy.size > 1 → state.world.loss.size > 1",
    ),
    Mutant(
        "L10: a worker of one rank adds to no gradients that it took",
        ALONE,
        value_and_grad._check_into,
        "definition.world.loss.size > 1 and definition.copy.size > 1"
        " → definition.world.loss.size > 1",
    ),
    Mutant(
        "L10: compressed gradients cross workers",
        CROSS,
        compress.compress._compression,
        "state.definition.copy → state.world.loss",
    ),
    Mutant(
        "L45: ranks that were alone go on as the ranks of one worker, each with its own",
        GOES_ON,
        elastic.goes_on,
        "manifest.copies == state.definition.copy_of_each → not manifest.copies or "
        "manifest.copies == state.definition.copy_of_each",
    ),
    Mutant(
        "L45: the worker of a rank is that of its number along the other axis",
        GOES_ON,
        definition.Definition.copy_of_each,
        "_BESIDE[self.within] → 'dp_replicate'",
    ),
    Mutant(
        "L45: every worker goes on from the first",
        GOES_ON,
        manifest.Manifest.file_of,
        "self.firsts[self.copies[rank]] → self.firsts[0]",
    ),
    Mutant(
        "L2: ranks that trained apart form workers that differ",
        FORM,
        values.carried,
        'regrouped or "apart" not in after.setup.facts → "apart" not in after.setup.facts',
    ),
    Mutant(
        "L2: workers that differ are told to train together",
        FORM,
        values.carried,
        'regrouped or "apart" not in after.setup.facts → regrouped',
    ),
    Mutant(
        "L2: ranks of a worker are compared before the first update alone",
        laws.test_ranks_of_a_worker_are_compared,
        building.compare,
        "not values and definition.trains_apart → False",
    ),
    Mutant(
        "L45: a merge gets the slot of the first worker as often as there are workers",
        ONCE,
        elastic._averaging,
        "_slot(source, transform.name, rank) → _slot(source, transform.name, 0)",
    ),
    Mutant(
        "L45: a merge of what was alike gets a slot of each rank of a worker",
        ONCE,
        elastic._alike,
        "len(source.manifest.firsts) → source.manifest.world_size",
    ),
    Mutant(
        "L45: each rank of a worker writes what all have",
        ONCE,
        commit.divided,
        "if first == rank or → if True or",
    ),
    Mutant(
        "L10: the first period begins with the run, whenever ranks begin to train apart",
        post_local.test_until_the_switch_ranks_are_one_and_then_apart,
        local_sgd.local_sgd._begun,
        '"since": state.step → "since": 0',
    ),
    Mutant(
        "L45: ranks that trained apart after they were one go on as the first of them",
        post_local.test_a_run_goes_on_before_and_after_the_switch,
        elastic.addressed,
        "rank=world.rank if own else 0 → rank=0",
    ),
    Mutant(
        "gradients of a worker that were not averaged are taken",
        unit.test_gradients_that_stay_on_a_rank_are_refused,
        stages.reduced,
        "if definition.trains_apart: → if False:",
    ),
    Mutant(
        "a custom step averages gradients over all workers",
        unit.test_a_custom_step_reduces_within_a_worker,
        sync_grads.sync_grads,
        "state.definition.copy → state.definition.world.loss",
    ),
    Mutant(
        "gradients are averaged along an axis that is not there",
        unit.test_an_axis_that_is_not_there_is_refused,
        checks.check_axes,
        "if world.loss.size > 1 and axis not in world.axes: → if False:",
        args={"axes": None},
    ),
]
