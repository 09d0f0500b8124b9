# SPDX-License-Identifier: Apache-2.0
"""Bugs in losses that couple samples over ranks or micro-batches."""

from typing import Any

import accelfn as af
from accelfn.collectives import shares
from accelfn.data.batch import Batch
from accelfn.engine.read_loss import Samples
from accelfn.loop import evaluate
from accelfn.transforms.accumulate import accumulate
from tests.laws import test_coupled_losses
from tests.mutants.mutant import Mutant


def _sum(x: Any, world: af.World) -> Any:
    return af.reduce(x.sum(0), world)


MUTANTS = [
    Mutant(
        "L36: a stand-in weighs as much as a sample",
        test_coupled_losses.test_a_loss_knows_which_of_its_samples_count,
        Samples.with_weight,
        "float(self.known != 0) → 1.0",
    ),
    Mutant(
        "L36: a sum in a loss has stand-ins in it that nobody asked about",
        test_coupled_losses.test_a_stand_in_that_would_count_is_refused_on_all_ranks,
        shares.check_stand_ins,
        "asks = not without or → asks = True or",
        args={"call": _sum},
    ),
    Mutant(
        "L36: a rank that has ended gathers its stand-in as a sample",
        test_coupled_losses.test_ranks_that_go_together_couple_what_they_have,
        shares.uneven_counts,
        "[1 if known is None else known] → [1]",
    ),
    Mutant(
        "L36: a function that is evaluated on all samples has stand-ins among them",
        test_coupled_losses.test_predictions_of_all_samples_leave_out_stand_ins,
        evaluate._Lent.run,
        "outer, activity.samples = activity.samples, samples → outer = activity.samples",
    ),
    Mutant(
        "L4: a warning names several micro-batches where there is one, and not else",
        test_coupled_losses.test_micro_batches_that_couple_are_warned_of,
        shares.warn_of_parts,
        "not samples.is_whole → samples.is_whole",
    ),
    Mutant(
        "L4: every micro-batch gets the zipped rows of the first",
        test_coupled_losses.test_tensors_of_samples_are_cut_with_them,
        Batch.zip,
        "tree.rows(extra, *span) → tree.rows(extra, 0, span[1] - span[0])",
    ),
    Mutant(
        "L4: every micro-batch gets all rows of an extra of samples",
        test_coupled_losses.test_an_extra_of_samples_is_refused_in_micro_batches,
        accumulate._refuse_rows,
        "== {torch.Size([num_samples])} → == set()",
    ),
]
