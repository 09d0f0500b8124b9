# SPDX-License-Identifier: Apache-2.0
"""Collected where an accelerator is: the fake one, by `python -m tests.accelerator`, or another."""

from tests.accelerator.at_hand import IS_FAKE, NAME

OF_THE_FAKE_ONE = ["test_streams.py", "test_offloaded_bytes.py"]
"""What looks into it, and hardware cannot be asked."""
if NAME == "cpu":
    collect_ignore_glob = ["test_*.py"]
elif not IS_FAKE:
    collect_ignore = OF_THE_FAKE_ONE
