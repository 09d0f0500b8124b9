# SPDX-License-Identifier: Apache-2.0
"""What is trained and how: transforms, chains and layouts, constant during a run."""
