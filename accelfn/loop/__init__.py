# SPDX-License-Identifier: Apache-2.0
"""Going round: batches, evaluation, stopping, and who says what."""
