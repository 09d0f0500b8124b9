# SPDX-License-Identifier: Apache-2.0
"""Bugs at the edge of what is drawn: one dtype of several, one act of many, one of two kinds."""

from accelfn.checkpoint import disk, elastic, lock
from accelfn.collectives import packed, reductions
from accelfn.data import alike, cut, dataset
from accelfn.data.orders import buckets
from accelfn.engine import agreement, live_optimizer
from tests.laws import (
    test_collectives_at_limits,
    test_counts,
    test_definitions,
    test_disk,
    test_orders,
    test_ranks_data,
    test_resume,
    test_same_data,
    test_store,
    test_updates,
)
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="a mean of bfloat16 in bfloat16",
        says="what ranks add up in 16 bits loses bits with every rank",
        law="L3",
        test=test_collectives_at_limits.test_a_mean_of_narrow_floats_is_rounded_once,
        place=reductions._summed,
        old="dtype in (torch.float16, torch.bfloat16)",
        new="dtype is torch.float16",
    ),
    Mutant(
        name="a mean of checkpoints in 16 bits",
        says="parameters of ranks that differed are rounded at each rank when they are loaded",
        law="L45",
        test=test_resume.test_a_mean_of_narrow_parameters_is_rounded_once,
        place=elastic.Source._mean,
        old="tensor.float() if tensor.dtype.itemsize < 4 else tensor",
        new="tensor",
    ),
    Mutant(
        name="betas are not compared",
        says="ranks whose optimizers differ in a pair of numbers train together",
        law="L2",
        test=test_definitions.test_any_two_that_differ_are_told_apart,
        args={"part": "optimizer"},
        place=agreement._plain,
        old="(int, float, str, tuple, type(None))",
        new="(int, float, str, type(None))",
    ),
    Mutant(
        name="batches are not compared",
        says="ranks may cut the same samples into other batches than one another",
        law="L36",
        test=test_same_data.test_batches_of_each_rank_are_seen,
        place=alike.order_told,
        old="pure and isinstance(data.batch_size, int)",
        new="pure",
    ),
    Mutant(
        name="evaluated as it is trained on",
        says="an order that repeats samples has them count twice in an evaluation",
        law="L36",
        test=test_orders.test_every_order_is_evaluated_on_each_sample_once,
        place=dataset.Data.in_order,
        old="order=self.order if isinstance(self.order, Side) else None",
        new="order=self.order",
    ),
    Mutant(
        name="samples take turns in a window",
        says="a bucketed budget has long and short samples in one batch",
        law="L39",
        test=test_orders.test_budgets_of_buckets_are_of_like_samples,
        place=buckets.bucketed.of_epoch,
        old="batch_size is None",
        new="batch_size == 0",
    ),
    Mutant(
        name="a name that was not flushed stays",
        says="a save that is said to have failed is there under its name",
        law="L52",
        test=test_disk.test_every_error_is_told_or_harmless,
        args={"async_": False},
        place=disk.rename,
        old="new.rename(path)",
        new="pass",
    ),
    Mutant(
        name="a child lets the lock go",
        says="a process that was forked from a training opens its directory to other jobs",
        law="L52",
        test=test_store.test_a_forked_process_holds_no_lock,
        place=lock.Lock.release,
        old="self.pid == os.getpid()",
        new="self.pid",
    ),
    Mutant(
        name="a tensor stays as it was set",
        says="a rate that a transform set is that of a copy's next update, too",
        law="L19",
        test=test_updates.test_what_was_set_leaves_nothing,
        place=live_optimizer.LiveOptimizer._put_back,
        old="not self._assigned",
        new="self._assigned",
    ),
    Mutant(
        name="counts meet by insertion",
        says="ranks that count in another order get one another's sums",
        law="L3",
        test=test_counts.test_several_denominators_are_those_of_the_whole_update,
        place=packed.sum_named,
        old="names = sorted(numbers)",
        new="names = list(numbers)",
    ),
    Mutant(
        name="counts of whatever comes",
        says="counts of different names are added up",
        law="L55",
        test=test_counts.test_counts_of_other_names_are_told,
        place=packed.sum_named,
        old="_differ(told[:6], world)",
        new="not told",
    ),
    Mutant(
        name="a short batch behind a cursor",
        says="with drop, a run that goes on within a batch has a short one",
        law="L35",
        test=test_ranks_data.test_a_run_goes_on_at_any_sample,
        place=cut.EvenCut.end,
        old="start + left - left % self.batch_size",
        new="self.num_samples - self.num_samples % self.batch_size",
    ),
]
