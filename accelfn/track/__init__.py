# SPDX-License-Identifier: Apache-2.0
"""Trackers: where the numbers of a run go, step by step, and what is made of them later.

A tracker is called as `tracker(metrics, step)`, and closed. Each backend has a file here, and
its package is imported when a tracker is made on rank 0, and nowhere else.
"""

from accelfn.track.comet import comet as comet
from accelfn.track.custom import custom as custom
from accelfn.track.in_memory import in_memory as in_memory
from accelfn.track.jsonl import jsonl as jsonl
from accelfn.track.log import Log as Log
from accelfn.track.log import read as read
from accelfn.track.measured import peak_memory_bytes as peak_memory_bytes
from accelfn.track.mlflow import mlflow as mlflow
from accelfn.track.progress import progress as progress
from accelfn.track.tensorboard import tensorboard as tensorboard
from accelfn.track.tracker import Sink as Sink
from accelfn.track.tracker import Tracker as Tracker
from accelfn.track.tracker import together as together
from accelfn.track.wandb import wandb as wandb
