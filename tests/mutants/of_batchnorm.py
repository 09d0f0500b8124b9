# SPDX-License-Identifier: Apache-2.0
"""Bugs in batch normalisation over all ranks."""

from accelfn.engine import engine
from accelfn.engine.module import synced_norm
from tests.laws import test_sync_batchnorm
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="each rank its own variance",
        says="the spread of the ranks' means is left out of the variance",
        law="L3",
        test=test_sync_batchnorm.test_ranks_normalise_as_one,
        place=synced_norm._combined,
        old="squares + counts * (means - mean).square()",
        new="squares + counts * 0",
    ),
    Mutant(
        name="a mean of the ranks' means",
        says="ranks count alike in a mean, however few samples they have",
        law="L3",
        test=test_sync_batchnorm.test_ranks_normalise_as_one,
        place=synced_norm._combined,
        old="mean = (means * counts).sum(0) / count.clamp(min=1)",
        new="mean = means.mean(0)",
    ),
    Mutant(
        name="statistics are constants to the gradient",
        says="the backward pass leaves out what other samples do to the statistics",
        law="L3",
        test=test_sync_batchnorm.test_ranks_normalise_as_one,
        place=synced_norm._through_statistics,
        old="by_weight, by_bias = total",
        new="by_weight, by_bias = total[0] * 0, total[1] * 0",
    ),
    Mutant(
        name="variance of the rank's own count",
        says="the running variance is made unbiased by a count that is one too large",
        law="L3",
        test=test_sync_batchnorm.test_ranks_normalise_as_one,
        place=synced_norm.SyncedNorm._track,
        old="(count / (count - 1).clamp(min=1))",
        new="(count / count.clamp(min=1))",
    ),
    Mutant(
        name="a stand-in is normalised by",
        says="the sample that stands in for an empty share counts in the statistics",
        law="L36",
        test=test_sync_batchnorm.test_ranks_normalise_as_one,
        place=engine.Engine.value_and_grad,
        old="share.counts = samples.known != 0",
        new="share.counts = True",
    ),
    Mutant(
        name="empty shares forget statistics",
        says="a rank whose share is empty keeps its running statistics",
        law="L2",
        test=test_sync_batchnorm.test_running_statistics_agree,
        place=engine.Engine.value_and_grad,
        old="written = {**kept, **of_all}",
        new="written = {**kept}",
    ),
    Mutant(
        name="micro-batches by themselves",
        says="ranks do not meet in batch normalisation at all",
        law="L4",
        test=test_sync_batchnorm.test_a_micro_batch_is_that_of_all_ranks,
        place=synced_norm.SyncedNorm.__call__,
        old="if not layer.training and layer.running_mean is not None:",
        new="if True:",
    ),
    Mutant(
        name="evaluation asks the ranks",
        says="a layer that is evaluated meets the other ranks",
        law="L6",
        test=test_sync_batchnorm.test_it_costs_two_collectives_a_layer,
        place=synced_norm.SyncedNorm.__call__,
        old="type(layer).forward(layer, given)",
        new="_Normed.apply(given, None, None, 0.0, self._world, True)[0]",
    ),
]
