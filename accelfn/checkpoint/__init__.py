# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a state: safetensors and JSON, no pickle anywhere."""

from accelfn.checkpoint.export import export_model as export_model
from accelfn.checkpoint.export import full_params as full_params
from accelfn.checkpoint.export import save_pretrained as save_pretrained
from accelfn.checkpoint.load import load as load
from accelfn.checkpoint.partial import Loaded as Loaded
from accelfn.checkpoint.save import save as save
from accelfn.checkpoint.store import CheckpointStore as CheckpointStore
from accelfn.checkpoint.weights import import_model as import_model
