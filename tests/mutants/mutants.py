# SPDX-License-Identifier: Apache-2.0
"""All mutants."""

from tests.mutants import (
    of_batchnorm,
    of_collectives,
    of_compiling,
    of_compression,
    of_data,
    of_exports,
    of_helpers,
    of_in_backward,
    of_kernels,
    of_optimizers,
    of_ranks,
    of_reading,
    of_running,
    of_skipping,
    of_slices,
    of_steps,
    of_stores,
)

MUTANTS = [
    *of_ranks.MUTANTS,
    *of_batchnorm.MUTANTS,
    *of_compression.MUTANTS,
    *of_in_backward.MUTANTS,
    *of_collectives.MUTANTS,
    *of_steps.MUTANTS,
    *of_skipping.MUTANTS,
    *of_running.MUTANTS,
    *of_data.MUTANTS,
    *of_reading.MUTANTS,
    *of_exports.MUTANTS,
    *of_slices.MUTANTS,
    *of_stores.MUTANTS,
    *of_optimizers.MUTANTS,
    *of_helpers.MUTANTS,
    *of_kernels.MUTANTS,
    *of_compiling.MUTANTS,
]
