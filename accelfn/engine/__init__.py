# SPDX-License-Identifier: Apache-2.0
"""Engines run losses and optimizer steps in PyTorch, on one rank, with DDP, or with FSDP."""
