# SPDX-License-Identifier: Apache-2.0
"""Batches, evaluation, run control, memory estimates and profiling around the step."""
