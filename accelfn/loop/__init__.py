# SPDX-License-Identifier: Apache-2.0
"""Everything around the training step: batches, evaluation, run control, memory, profiling."""
