# SPDX-License-Identifier: Apache-2.0
"""Train on one end of a cable, and print as JSON what it sent: traffic.py CABLE ROUNDS."""

import json
import sys

import torch

from tests.ranks.programs_of_traffic import measured

torch.set_num_threads(1)
cable, rounds = sys.argv[1], int(sys.argv[2])
sys.stdout.write(json.dumps(measured(cable, rounds)))
