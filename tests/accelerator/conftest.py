# SPDX-License-Identifier: Apache-2.0
"""These tests are collected where the fake accelerator is: by `python -m tests.accelerator`."""

from accelfn.base import accelerator
from tests.accelerator import fake

collect_ignore_glob = [] if accelerator.kind() == fake.NAME else ["test_*.py"]
