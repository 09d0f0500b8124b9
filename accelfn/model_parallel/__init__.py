# SPDX-License-Identifier: Apache-2.0
"""Split one model over ranks: by layers (tensor parallelism) or sequences (context parallelism)."""
