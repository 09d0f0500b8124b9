# SPDX-License-Identifier: Apache-2.0
"""Importing and exporting the weights of models, as safetensors files."""
