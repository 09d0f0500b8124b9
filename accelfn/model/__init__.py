# SPDX-License-Identifier: Apache-2.0
"""What users give: a model's and an optimizer's structure, without their tensors."""
