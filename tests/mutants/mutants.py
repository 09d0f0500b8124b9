# SPDX-License-Identifier: Apache-2.0
"""All mutants."""

from tests.mutants import (
    of_collectives,
    of_data,
    of_exports,
    of_ranks,
    of_reading,
    of_slices,
    of_steps,
    of_stores,
)

MUTANTS = [
    *of_ranks.MUTANTS,
    *of_collectives.MUTANTS,
    *of_steps.MUTANTS,
    *of_data.MUTANTS,
    *of_reading.MUTANTS,
    *of_exports.MUTANTS,
    *of_slices.MUTANTS,
    *of_stores.MUTANTS,
]
