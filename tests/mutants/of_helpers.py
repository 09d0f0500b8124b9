# SPDX-License-Identifier: Apache-2.0
"""Bugs in what helps around a training: batch sizes, estimates, losses of text."""

from accelfn.engine import read_loss
from accelfn.loop import batch_size, memory
from tests.laws import test_batch_size, test_memory, test_padded_text
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="a batch too small",
        says="a batch size that does not fit is quartered, and one that would fit is passed over",
        law="L55",
        test=test_batch_size.test_the_largest_that_fits_on_all_ranks_is_found,
        place=batch_size.find_batch_size,
        old="batch_size //= 2",
        new="batch_size = max(1, batch_size // 4)",
    ),
    Mutant(
        name="the others wait",
        says="a rank without memory keeps the group that the others wait in",
        law="L55",
        test=test_batch_size.test_the_largest_that_fits_on_all_ranks_is_found,
        place=batch_size._tried,
        old="    give_up()\n",
        new="",
    ),
    Mutant(
        name="no optimizer state",
        says="an estimate takes the optimizer's state before its first step",
        law="L34",
        test=test_memory.test_an_estimate_is_exact,
        place=memory._stepped,
        old="live.update({})",
        new="{}",
    ),
    Mutant(
        name="mean of means of text",
        says="each share's mean over tokens counts alike, however many tokens it has",
        law="L3",
        test=test_padded_text.test_shares_of_padded_text_train_what_the_whole_batch_trains,
        place=read_loss.read_loss,
        old="weight = _detached(returned.weight)",
        new="weight = samples.count()",
    ),
]
