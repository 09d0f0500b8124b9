# SPDX-License-Identifier: Apache-2.0
"""Trackers: log metrics to TensorBoard, W&B, Comet, MLflow or files.

Call a tracker as `tracker(metrics, step)`, and close it at the end. The package of a backend,
such as wandb, is imported only on rank 0, when you create the tracker.
"""

from accelfn.track.backends import comet as comet
from accelfn.track.backends import mlflow as mlflow
from accelfn.track.backends import tensorboard as tensorboard
from accelfn.track.backends import wandb as wandb
from accelfn.track.jsonl import Log as Log
from accelfn.track.jsonl import jsonl as jsonl
from accelfn.track.jsonl import read as read
from accelfn.track.throughput import throughput as throughput
from accelfn.track.tracker import Sink as Sink
from accelfn.track.tracker import Tracker as Tracker
from accelfn.track.tracker import custom as custom
from accelfn.track.tracker import in_memory as in_memory
from accelfn.track.tracker import peak_memory_bytes as peak_memory_bytes
from accelfn.track.tracker import progress as progress
from accelfn.track.tracker import together as together
