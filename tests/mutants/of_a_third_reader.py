# SPDX-License-Identifier: Apache-2.0
"""Bugs that a third reader planted, and that nothing had found."""

from accelfn.checkpoint import elastic
from accelfn.checkpoint.hashing import Hashing
from accelfn.data.stream import Stream
from accelfn.engine.ddp import DDPRunner
from accelfn.placing import plan
from accelfn.testing.checking import laws
from accelfn.testing.traffic.traffic import Traffic
from accelfn.world import meeting
from tests.kit import test_check_step
from tests.laws import (
    test_in_backward,
    test_resume,
    test_streams,
    test_traffic,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_placing, test_rare_inputs, test_rendezvous

MUTANTS = [
    Mutant(
        "of a large file only the first MiB that is under way is compared at the end",
        test_rare_inputs.test_a_change_far_into_a_file_is_noticed,
        Hashing.finish,
        "while self._under_way: → if self._under_way:",
        args={"part": 0},
    ),
    Mutant(
        "L45: moments that one rank alone had are another number of ranks' own",
        test_resume.test_optimizer_state_that_one_rank_alone_has_is_refused_elsewhere,
        elastic._averaging,
        "(set(manifest.differs) - with_mean) | apart → set(manifest.differs) - with_mean",
        args={"size": 3},
    ),
    Mutant(
        "L35: a batch of a stream is filled up with what came since it was resumed",
        test_streams.test_a_stream_goes_on_from_any_sample,
        Stream._epoch,
        "[] if low == 0 else None → []",
    ),
    Mutant(
        "L3: an update that counts on no rank is divided by nothing in the backward pass",
        test_in_backward.test_where_nothing_counts_nothing_is_divided,
        DDPRunner._sum,
        "torch.where(total == 0, 1, self._weight)[0] → self._weight[0]",
    ),
    Mutant(
        "everything goes to the disk, where that is the first budget that was named",
        test_placing.test_the_disk_comes_last,
        plan.place,
        "sorted(limits, key=lambda device: device == DISK) → [*limits]",
        args={"budget": 400},
    ),
    Mutant(
        "what a launcher told a process is gone when a law is through with it",
        test_check_step.test_the_callers_environment_is_the_callers,
        laws._environment,
        "os.environ.update(kept) → pass",
    ),
    Mutant(
        "L49: an update takes as long as the first rank's, where some calls are of all ranks",
        test_traffic.test_parts_of_a_world_wait_for_their_own_ranks,
        Traffic.seconds,
        "all(len(call.ranks) == ranks for call in calls)"
        " → any(len(call.ranks) == ranks for call in calls)",
    ),
    Mutant(
        "ranks that a launcher starts again are counted with those of before",
        test_rendezvous.test_ranks_of_an_attempt_meet_no_rank_of_another,
        meeting._meet,
        "attempt {place.attempt} world → world",
    ),
]
