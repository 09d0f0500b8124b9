# SPDX-License-Identifier: Apache-2.0
"""Bugs in options that were drawn from too few values: sizes that were never crossed."""

from accelfn.transforms import diloco, local_sgd
from accelfn.weights import shards
from tests.laws import test_diloco, test_export, test_local_sgd
from tests.mutants.mutant import Mutant

FILES = test_export.test_files_hold_what_they_may

MUTANTS = [
    Mutant(
        "L10: buffers of local_sgd are as large as all that is averaged",
        test_local_sgd.test_it_communicates_when_it_says,
        local_sgd.local_sgd._average_,
        "bucket_cap_mb=cap → bucket_cap_mb=None",
    ),
    Mutant(
        "L10: buffers of diloco are as large as all that is exchanged",
        test_diloco.test_its_bytes_are_these,
        diloco.diloco._averaged,
        "bucket_cap_mb=self.bucket_cap_mb → bucket_cap_mb=None",
    ),
    Mutant(
        "L41: a file of an export is never filled to the last byte",
        FILES,
        shards.divided,
        "held + size > limit → held + size >= limit",
    ),
    Mutant(
        "L41: a file of an export begins with what it has of the one before",
        FILES,
        shards.divided,
        "open_, held = [], 0\n        open_.append → open_ = []\n        open_.append",
    ),
]
