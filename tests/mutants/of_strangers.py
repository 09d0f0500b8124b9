# SPDX-License-Identifier: Apache-2.0
"""Bugs that a stranger chose from the code alone, which no law saw, and their kin."""

from accelfn.checkpoint import commit
from accelfn.collectives import parts
from accelfn.data import stream
from tests.laws import test_storage, test_streams, test_whole_tensors
from tests.mutants.mutant import Mutant

OF_DATA = [
    Mutant(
        "L35: a stream that keeps the state that it began with goes on in it",
        test_streams.test_each_reading_begins_at_the_beginning,
        stream.Opened.__init__,
        "dataset.load_state_dict(copy.deepcopy(first)) → dataset.load_state_dict(first)",
    ),
    Mutant(
        "L35: a stream is read from where another reading of it has come",
        test_streams.test_each_reading_begins_at_the_beginning,
        stream.Opened.__init__,
        "if start.memory is None and first is not None: → if False:",
    ),
]

OF_CHECKPOINTS = [
    Mutant(
        "L41: ranks whose tensors are the same bytes in other shapes are saved as one",
        test_storage.test_what_ranks_see_otherwise_is_each_ones_own,
        commit.digests,
        'f"{tensor.dtype}{tuple(tensor.shape)}" → f"{tensor.dtype}"',
    ),
    Mutant(
        "L41: ranks whose tensors are the same bytes in other dtypes are saved as one",
        test_storage.test_what_ranks_see_otherwise_is_each_ones_own,
        commit.digests,
        'f"{tensor.dtype}{tuple(tensor.shape)}" → f"{tuple(tensor.shape)}"',
    ),
]

OF_RANKS = [
    Mutant(
        "L47: a dim that a user has cut twice is put together as if it divided",
        test_whole_tensors.test_parts_of_unlike_parts_are_gathered_too,
        parts._in_turn,
        "tensor.shape[dim] % count == 0 → True",
    ),
]

MUTANTS = [*OF_DATA, *OF_CHECKPOINTS, *OF_RANKS]
