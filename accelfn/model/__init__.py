# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers without their tensors, and the initialization of models."""
