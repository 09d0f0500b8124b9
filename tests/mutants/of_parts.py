# SPDX-License-Identifier: Apache-2.0
"""Bugs in how parts become whole tensors, and in how ranks that have parts load together."""

from torch.distributed.tensor import Shard

import accelfn as af
from accelfn.checkpoint import elastic
from accelfn.checkpoint.together import together
from accelfn.collectives import parts
from tests.laws import test_loading_together, test_whole_tensors
from tests.mutants.mutant import Mutant
from tests.unit import test_plain_slots
from tests.unit import test_whole_tensors as unit

WHOLE = test_whole_tensors.test_parts_are_gathered_to_what_was_cut
TOLD = test_loading_together.test_a_file_that_one_rank_cannot_read_is_told_to_all

MUTANTS = [
    Mutant(
        "L47: a rank that cannot read its file lets the others wait for it",
        TOLD,
        together,
        "if state.definition.layout is None: → if True:",
    ),
    Mutant(
        "L47: ranks load what another one could not read",
        TOLD,
        together,
        "raise kind(msg) → pass",
    ),
    Mutant(
        "L47: a damaged file is an error of another kind on the other ranks",
        TOLD,
        together,
        "kind = CheckpointCorruptError if is_corrupt else CheckpointError"
        " → kind = CheckpointError",
    ),
    Mutant(
        "L47: one call gathers all of a model, however large",
        WHOLE,
        parts._together,
        "if taken and size + nbytes > _MOST: → if False:",
    ),
    Mutant(
        "L47: each parameter is gathered by itself",
        WHOLE,
        parts._together,
        "if taken and size + nbytes > _MOST: → if taken:",
    ),
    Mutant(
        "L47: the last rank's part comes first",
        WHOLE,
        parts._along,
        "torch.cat(trimmed, dim) → torch.cat(trimmed[::-1], dim)",
    ),
    Mutant(
        "L47: what fills up a shorter part is in the whole",
        WHOLE,
        parts._along,
        "narrow(dim, 0, end) → narrow(dim, 0, room)",
    ),
    Mutant(
        "L47: a shorter part is gathered as zeros",
        WHOLE,
        parts._padded,
        "made.narrow(dim, 0, part.shape[dim]).copy_(part) → pass",
    ),
    Mutant(
        "what a user has cut from the left is put together from the right",
        unit.test_what_a_user_cuts_is_what_torch_gathers,
        parts._in_turn,
        'getattr(placement, "split_factor", 1) != count or not even → not even',
        args={"placements": (Shard(0), Shard(0))},
    ),
    Mutant(
        "a transform's own plain slot is cut by a load",
        test_plain_slots.test_what_a_transform_keeps_whole_is_loaded_whole,
        elastic._sharded,
        "if n not in known} → if True}",
        args={"before": af.wrap_fsdp(), "partial_load": False},
    ),
]
