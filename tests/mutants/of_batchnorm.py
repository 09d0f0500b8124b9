# SPDX-License-Identifier: Apache-2.0
"""Bugs in batch normalisation over all ranks."""

from accelfn.engine import engine
from accelfn.engine.module import synced_norm
from tests.laws import test_sync_batchnorm
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L3: the spread of the ranks' means is left out of the variance",
        test_sync_batchnorm.test_ranks_normalise_as_one,
        synced_norm._combined,
        "squares + counts * (means - mean).square() → squares + counts * 0",
    ),
    Mutant(
        "L3: ranks count alike in a mean, however few samples they have",
        test_sync_batchnorm.test_ranks_normalise_as_one,
        synced_norm._combined,
        "mean = (means * counts).sum(0) / count.clamp(min=1) → mean = means.mean(0)",
    ),
    Mutant(
        "L3: the backward pass leaves out what other samples do to the statistics",
        test_sync_batchnorm.test_ranks_normalise_as_one,
        synced_norm._through_statistics,
        "by_weight, by_bias = total → by_weight, by_bias = total[0] * 0, total[1] * 0",
    ),
    Mutant(
        "L3: the running variance is made unbiased by a count that is one too large",
        test_sync_batchnorm.test_ranks_normalise_as_one,
        synced_norm.SyncedNorm._track,
        "(count / (count - 1).clamp(min=1)) → (count / count.clamp(min=1))",
    ),
    Mutant(
        "L36: the sample that stands in for an empty share counts in the statistics",
        test_sync_batchnorm.test_ranks_normalise_as_one,
        synced_norm.SyncedNorm.__call__,
        "counts = samples is None or samples.known != 0 → counts = True",
    ),
    Mutant(
        "L2: a rank whose share is empty keeps its running statistics",
        test_sync_batchnorm.test_running_statistics_agree,
        engine.Engine._of_others,
        "names = self._of_all_ranks → names = set()",
    ),
    Mutant(
        "L4: ranks do not meet in batch normalisation at all",
        test_sync_batchnorm.test_a_micro_batch_is_that_of_all_ranks,
        synced_norm.SyncedNorm.__call__,
        "if not layer.training and layer.running_mean is not None: → if True:",
    ),
    Mutant(
        "L6: a layer that is evaluated meets the other ranks",
        test_sync_batchnorm.test_it_costs_two_collectives_a_layer,
        synced_norm.SyncedNorm.__call__,
        "type(layer).forward(layer, given)"
        " → _Normed.apply("
        "given, layer.weight, layer.bias, 0.0, self.ranks, True, self.label)[0]",
    ),
]
