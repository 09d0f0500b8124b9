# SPDX-License-Identifier: Apache-2.0
"""All mutants."""

from tests.mutants import of_collectives, of_data, of_ranks, of_reading, of_steps

MUTANTS = [
    *of_ranks.MUTANTS,
    *of_collectives.MUTANTS,
    *of_steps.MUTANTS,
    *of_data.MUTANTS,
    *of_reading.MUTANTS,
]
