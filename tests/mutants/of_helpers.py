# SPDX-License-Identifier: Apache-2.0
"""Bugs in what helps around a training: batch sizes, estimates, losses of text."""

from accelfn.engine import read_loss
from accelfn.loop import batch_size, fake_state
from tests.laws import test_batch_size, test_memory, test_padded_text
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L55: a batch size that does not fit is quartered, and one that would fit is passed over",
        test_batch_size.test_the_largest_that_fits_on_all_ranks_is_found,
        batch_size.find_batch_size,
        "batch_size //= 2 → batch_size = max(1, batch_size // 4)",
    ),
    Mutant(
        "L55: the group of a try that fitted here, and not elsewhere, stays open",
        test_batch_size.test_the_largest_that_fits_on_all_ranks_is_found,
        batch_size._Try.all_fit,
        """\
        self.result.clear()
        self.give_up()
→
        self.result.clear()
""",
    ),
    Mutant(
        "L55: a rank without memory keeps the group that the others wait in",
        test_batch_size.test_the_largest_that_fits_on_all_ranks_is_found,
        batch_size._tried,
        """\
    give_up()
→

""",
    ),
    Mutant(
        "L34: an estimate takes the optimizer's state before its first step",
        test_memory.test_an_estimate_is_exact,
        fake_state._stepped,
        "live.update({}) → {}",
    ),
    Mutant(
        "L3: each share's mean over tokens counts alike, however many tokens it has",
        test_padded_text.test_shares_of_padded_text_train_what_the_whole_batch_trains,
        read_loss.read_loss,
        "weight = _detached(returned.weight) → weight = samples.count()",
    ),
]
