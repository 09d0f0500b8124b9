# SPDX-License-Identifier: Apache-2.0
"""Engines run losses and optimizer steps through PyTorch: DDP, FSDP, tensor parallelism."""
