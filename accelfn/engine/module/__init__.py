# SPDX-License-Identifier: Apache-2.0
"""What is done to the engine's own module."""
