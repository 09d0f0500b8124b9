# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the documentation: `python docs/pictures/draw.py [FOLDER]`.

The calls come from `explain`, the collectives from simulated ranks, and the times from
docs/benchmarks.md.
"""

import sys
from pathlib import Path

import axes
import benchmarks
import step
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(*sys.argv[1:] or [Path(__file__).parent])
    for module in (step, axes, benchmarks):
        (folder / f"{module.__name__}.svg").write_text(module.draw(), encoding="utf-8")
