# SPDX-License-Identifier: Apache-2.0
"""Say, in one line of JSON, how this script was started."""

import json
import os
import sys

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)

main = sys.modules["__main__"]
found = {
    "argv": sys.argv,
    "path": sys.path[0],
    "main": [__name__, __file__, str(__spec__), main.__dict__ is globals()],
    "torch": "torch" in sys.modules,
    "env": {name: os.environ.get(name) for name in VARIABLES},
}
sys.stdout.write(json.dumps(found) + "\n")
