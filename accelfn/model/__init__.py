# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers as definitions, without their tensors."""
