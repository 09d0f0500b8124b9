# SPDX-License-Identifier: Apache-2.0
"""Read and write checkpoints of Accelerate, DeepSpeed and PyTorch."""
