# SPDX-License-Identifier: Apache-2.0
"""Saving and loading training states as safetensors and JSON files, without pickle."""

from accelfn.checkpoint.load import Loaded as Loaded
from accelfn.checkpoint.load import load as load
from accelfn.checkpoint.load import load_part as load_part
from accelfn.checkpoint.moving import regroup as regroup
from accelfn.checkpoint.moving import with_world as with_world
from accelfn.checkpoint.save import save as save
from accelfn.checkpoint.store import CheckpointStore as CheckpointStore
