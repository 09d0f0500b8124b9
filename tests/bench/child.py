# SPDX-License-Identifier: Apache-2.0
"""Run one benchmark in this process: `child.py MODULE ROUNDS FILE`.

Accelerate and Fabric keep global state, so each benchmark runs in a new process.
"""

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import attrs
import torch

if __name__ == "__main__":
    module, rounds, file = sys.argv[1:]
    torch.set_num_threads(1)
    measured = import_module(module)
    gc.collect()
    gc.freeze()  # garbage collections before blocks do not look at imported objects
    figures = measured.measure(int(rounds))
    if os.environ.get("RANK", "0") == "0":
        Path(file).write_text(json.dumps([attrs.asdict(f) for f in figures]))
