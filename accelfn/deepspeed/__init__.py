# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO as the engine of a state."""
