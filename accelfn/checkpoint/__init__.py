# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a state: safetensors and JSON, no pickle anywhere."""

from accelfn.checkpoint.save import load as load
from accelfn.checkpoint.save import save as save
