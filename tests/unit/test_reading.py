# SPDX-License-Identifier: Apache-2.0
"""What lies in a file is read into memory, by several threads where it is much."""

import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.internals import files


@given(
    block=st.integers(1, 9),
    threads=st.integers(1, 4),
    before=st.integers(0, 5),
    size=st.integers(0, 60),
    missing=st.integers(0, 3),
)
def test_threads_read_what_one_would(block, threads, before, size, missing):
    """Whatever the block and the place; what the file lacks is an error, whoever finds it."""
    values = bytes(at % 251 for at in range(before + size))
    buffer = bytearray(size)
    read_by: set[int] = set()
    read_at = files._read_at

    def noted(handle: int, begin: int, buffer: memoryview) -> None:
        read_by.add(begin)
        read_at(handle, begin, buffer)

    with (
        TemporaryDirectory() as directory,
        mock.patch.object(files, "_BLOCK", block),
        mock.patch.object(files, "_read_at", noted),
        mock.patch.object(torch, "get_num_threads", return_value=threads),
    ):
        path = Path(directory) / "values"
        path.write_bytes(values[: len(values) - missing])
        with files.open_plain(path) as stream:
            stream.seek(before)
            if size and missing:
                with pytest.raises(OSError, match="the file is shorter than expected"):
                    files.read_into(stream, memoryview(buffer))
                return
            files.read_into(stream, memoryview(buffer))
            assert stream.tell() == before + size
    assert bytes(buffer) == values[before:]
    num_parts = max(1, min(threads, size // block))
    assert len(read_by) <= num_parts
    assert (len(read_by) > 1) == (num_parts > 1)
    assert not [t for t in threading.enumerate() if t.name.startswith("accelfn-read")]
