# SPDX-License-Identifier: Apache-2.0
"""Saving and loading training states as safetensors and JSON files, without pickle."""
