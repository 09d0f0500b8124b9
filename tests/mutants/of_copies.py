# SPDX-License-Identifier: Apache-2.0
"""Bugs in copies of a split model that train apart: in what is summed, averaged and saved."""

from accelfn.checkpoint import commit, elastic, grammar, manifest
from accelfn.definition import definition
from accelfn.engine import building
from accelfn.state import update, values
from accelfn.step import value_and_grad
from accelfn.transforms import fsdp, local_sgd
from tests.laws import test_split_copies
from tests.mutants.mutant import Mutant
from tests.unit import test_checkpoint_faults, test_wrap_fsdp

ALONE = test_split_copies.test_a_copy_is_a_rank_alone
SGD = test_split_copies.test_an_average_an_update_is_one_model_of_sgd
CROSS = test_split_copies.test_only_averages_cross_copies
GOES_ON = test_split_copies.test_a_period_goes_on_in_any_layout
SHARE = test_split_copies.test_each_rank_has_its_part
CHANGE = test_split_copies.test_copies_change_their_layout_when_they_agree
FAULTS = test_checkpoint_faults.test_c20_copies_that_are_none

Definition = definition.Definition
CACHED = manifest.Manifest.__getattr__.__globals__["cached_properties"]
"""Where attrs keeps the functions of what is computed once."""

MUTANTS = [
    Mutant(
        "L10: the weight of a copy is that of all copies",
        ALONE,
        Definition.copy,
        "if self.within is None: → if self.layout is not None:",
    ),
    Mutant(
        "L10: copies that train apart skip an update each for itself",
        ALONE,
        update.Update.replicated,
        "(apart or have_shards(grads.as_taken.values()))"
        " → have_shards(grads.as_taken.values())",
    ),
    Mutant(
        "L10: losses of a copy's ranks are means, which are summed",
        ALONE,
        value_and_grad._innermost,
        'sync=sync and not setup.reduces → sync=sync and not setup.owners["reduce"]',
    ),
    Mutant(
        "L8: a rank averages its part with other parts",
        SGD,
        Definition.copies,
        "self.world.along(_BESIDE[self.within]) → self.world.loss",
    ),
    Mutant(
        "L10: gradients of copies that train apart are summed over all of them",
        CROSS,
        Definition.splits,
        'world.along("dp_shard") if self.trains_apart else world.loss → world.loss',
    ),
    Mutant(
        "L10: whole parameters cross copies",
        CROSS,
        local_sgd.average_,
        "parts = map(local, tensors)"
        " → parts = [getattr(t, 'full_tensor', lambda: t)() for t in tensors]",
    ),
    Mutant(
        "L45: each copy goes on from the first one",
        GOES_ON,
        commit._differ,
        "len(set(copies)) > 1 and → False and",
    ),
    Mutant(
        "L45: copies that lie otherwise than they were saved take one another's parts",
        GOES_ON,
        elastic.goes_on,
        "manifest.copies == state.definition.copy_of_each → True",
    ),
    Mutant(
        "L45: of copies the ranks are averaged whose numbers copies have",
        GOES_ON,
        CACHED["firsts"],
        "first[copy] for copy in → copy for copy in",
    ),
    Mutant(
        "L45: the average of copies is the first one's",
        GOES_ON,
        manifest.Manifest.slices_of,
        "own[self.copies[rank]] → own[0]",
    ),
    Mutant(
        "L47: the average that is evaluated is whole on each rank",
        SHARE,
        local_sgd.local_sgd.eval_params,
        "tree.clone({n: p for n, p in params.items() if n in trained})"
        " → {n: getattr(p, 'full_tensor', p.clone)() for n, p in params.items() if n in trained}",
    ),
    Mutant(
        "L2: ranks that trained apart are cut into copies of which no rank had the whole",
        CHANGE,
        values.carried,
        'regrouped or "apart" not in after.setup.facts → "apart" not in after.setup.facts',
    ),
    Mutant(
        "L2: copies that are told to train together again may differ",
        CHANGE,
        values.carried,
        'regrouped or "apart" not in after.setup.facts → regrouped',
    ),
    Mutant(
        "L2: copies of a split model are not compared before they train",
        test_split_copies.test_copies_are_compared_before_they_train,
        building.compare,
        'world.axes.get("dp_replicate", 1) > 1 → False',
    ),
    Mutant(
        "all ranks of a world without axes have one copy, and are told to train apart",
        test_wrap_fsdp.test_copies_that_train_apart_are_counted_by_axes,
        fsdp.wrap_fsdp._check_apart,
        'if "stays" in told and → if False and',
    ),
    Mutant(
        "ranks of a copy may drift apart",
        test_wrap_fsdp.test_what_cannot_stand_beside_it_is_refused,
        fsdp.wrap_fsdp._check_apart,
        'if "apart" in told and → if False and',
        args={"other": test_wrap_fsdp.Drift(), "words": "has one model that is split"},
    ),
    Mutant(
        "a copy of which nothing was saved has a part of the others",
        FAULTS,
        grammar.check_sharded,
        "is_of_all = len(of_each) in (1, len({*copies})) → is_of_all = True",
        args={"case": "of which one has nothing"},
    ),
    Mutant(
        "copies are those that a manifest says, of whatever ranks",
        FAULTS,
        grammar.check_copies,
        "if copies and → if False and",
        args={"case": "with a gap"},
    ),
]
