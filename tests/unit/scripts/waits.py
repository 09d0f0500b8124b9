# SPDX-License-Identifier: Apache-2.0
"""Say whether there is a terminal and who this is, and wait."""

import os
import sys
import time

sys.stdout.write(f"terminal {sys.stdout.isatty()} process {os.getpid()} waits\n")
time.sleep(6000)
