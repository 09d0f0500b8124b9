# SPDX-License-Identifier: Apache-2.0
"""Bugs at the edge of what is drawn: one dtype of several, one act of many, one of two kinds."""

from accelfn.checkpoint import disk, elastic, lock
from accelfn.collectives import packed, reductions
from accelfn.data import alike, cut, dataset, epoch
from accelfn.data.orders import buckets
from accelfn.engine import agreement
from accelfn.engine.optimizer import live_optimizer
from accelfn.structure import given
from tests.laws import (
    test_buckets,
    test_collectives_at_limits,
    test_counts,
    test_definitions,
    test_disk,
    test_given,
    test_orders,
    test_ranks_data,
    test_resume,
    test_same_data,
    test_store,
    test_updates,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_orders as of_orders

MUTANTS = [
    Mutant(
        "L3: what ranks add up in 16 bits loses bits with every rank",
        test_collectives_at_limits.test_a_mean_of_narrow_floats_is_rounded_once,
        reductions._summed,
        "dtype in (torch.float16, torch.bfloat16) → dtype is torch.float16",
    ),
    Mutant(
        "L45: parameters of ranks that differed are rounded at each rank when they are loaded",
        test_resume.test_a_mean_of_narrow_parameters_is_rounded_once,
        elastic.Source.mean,
        "tensor.float() if tensor.dtype.itemsize < 4 else tensor → tensor",
    ),
    Mutant(
        "L2: ranks whose optimizers differ in a pair of numbers train together",
        test_definitions.test_any_two_that_differ_are_told_apart,
        agreement._plain,
        "(int, float, str, tuple, type(None)) → (int, float, str, type(None))",
        args={"part": "optimizer"},
    ),
    Mutant(
        "L36: ranks may cut the same samples into other batches than one another",
        test_same_data.test_batches_of_each_rank_are_seen,
        alike.order_told,
        "pure and isinstance(data.batch_size, int) → pure",
    ),
    Mutant(
        "L36: an order that repeats samples has them count twice in an evaluation",
        test_orders.test_every_order_is_evaluated_on_each_sample_once,
        dataset.Data.in_order,
        "order=None → order=self.order",
    ),
    Mutant(
        "L40: batches lie across the windows that were sorted, and mix lengths",
        test_buckets.test_buckets_are_sorted_windows,
        buckets.bucketed.of_epoch,
        "-(-self.window // step) * step → max(self.window, step)",
    ),
    Mutant(
        "L39: an epoch's last update is lost where a block begins with it",
        test_orders.test_no_sample_is_lost_between_blocks,
        epoch._blocks,
        "if block: → if len(block) > 1:",
    ),
    Mutant(
        "where there are many ranks, each update's order is computed for itself",
        of_orders.test_an_order_costs_a_rank_as_much_on_any_number,
        epoch.portions,
        "_OF_ALL if epoch.sorts else num_samples → _OF_ALL",
    ),
    Mutant(
        "an order that sorts is computed for as many updates as any other",
        of_orders.test_an_order_that_sorts_is_asked_for_less_at_once,
        epoch.epoch_of,
        'getattr(data.ordering, "sorts", False) → False',
    ),
    Mutant(
        "L40: every rank computes the order of all ranks' samples, and takes its share",
        test_orders.test_a_rank_asks_for_no_position_but_its_own,
        epoch.portions,
        "block, first = epoch.order(places), 0"
        " → block, first = epoch.order(np.arange(num_samples))[places], 0",
    ),
    Mutant(
        "L39: a bucketed budget has long and short samples in one batch",
        test_buckets.test_budgets_of_buckets_are_of_like_samples,
        buckets.bucketed.of_epoch,
        "batch_size is None → batch_size == 0",
    ),
    Mutant(
        "L52: a save that is said to have failed is there under its name",
        test_disk.test_every_error_is_told_or_harmless,
        disk.rename,
        "new.rename(path) → pass",
        args={"async_": False, "joint": False},
    ),
    Mutant(
        "L22: a part of a given model that has buffers and no parameters can be used",
        test_given.test_every_part_is_given,
        given._has_tensors,
        "any(True for each in (params, buffers) for _ in each)"
        " → any(True for _ in params)",
        args={"kind": "a norm without parameters"},
    ),
    Mutant(
        "L52: a process that was forked from a training opens its directory to other jobs",
        test_store.test_a_forked_process_holds_no_lock,
        lock.Lock.release,
        "self.pid == os.getpid() → self.pid",
    ),
    Mutant(
        "L19: a rate that a transform set is that of a copy's next update, too",
        test_updates.test_what_was_set_leaves_nothing,
        live_optimizer.LiveOptimizer._put_back,
        "not self._assigned → self._assigned",
    ),
    Mutant(
        "L3: ranks that count in another order get one another's sums",
        test_counts.test_several_denominators_are_those_of_the_whole_update,
        packed.sum_named,
        "names = sorted(numbers) → names = list(numbers)",
    ),
    Mutant(
        "L55: counts of different names are added up",
        test_counts.test_counts_of_other_names_are_told,
        packed.sum_named,
        "_differ(summed[:6], world) → not told",
    ),
    Mutant(
        "L35: with drop, a run that goes on within a batch has a short one",
        test_ranks_data.test_a_run_goes_on_at_any_sample,
        cut.EvenCut.end,
        "start + left - left % self.batch_size"
        " → self.num_samples - self.num_samples % self.batch_size",
    ),
]
