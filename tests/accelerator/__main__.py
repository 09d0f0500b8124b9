# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.accelerator`: tests on the fake accelerator, in a process of their own.

torch has one accelerator a process. Arguments are pytest's.
"""

import sys
from pathlib import Path

import pytest

from tests.accelerator import fake

HERE = Path(__file__).parent

if __name__ == "__main__":
    fake.install()
    what = [str(HERE), str(HERE.parent / "unit" / "test_gpu.py")]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not cuda"]
    sys.exit(pytest.main([*what, *options, *sys.argv[1:]]))
