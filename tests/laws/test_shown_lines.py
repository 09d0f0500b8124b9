# SPDX-License-Identifier: Apache-2.0
"""What ranks write reaches a reader in whole lines, each of one rank."""

import io

from hypothesis import given
from hypothesis import strategies as st

from tests.internals import WholeLines

PIECES = st.lists(st.tuples(st.integers(0, 12), st.text("ab[] \n")), max_size=12)


@given(written=PIECES)
def test_what_ranks_write_is_shown_in_whole_lines(written):
    """L55: each line shown is one that a rank wrote, behind its prefix, in its order."""
    shown = io.StringIO()
    lines = WholeLines(shown)
    for rank, text in written:
        for piece in text.splitlines(keepends=True):  # as torch's launcher reads files
            lines.write(f"[rank {rank}] {piece}")
    lines.end()
    read = shown.getvalue().splitlines()
    assert shown.getvalue().count("\n") == len(read)
    for rank in range(13):
        own = "".join(text for each, text in written if each == rank).splitlines()
        prefix = f"[rank {rank}] "
        found = [line[len(prefix) :] for line in read if line.startswith(prefix)]
        assert own == found
    assert len(read) == sum(line.startswith("[rank ") for line in read)


@given(text=st.text("ab[] \n"))
def test_what_is_no_ranks_passes_as_it_is(text):
    """The launcher's own words are not held."""
    shown = io.StringIO()
    WholeLines(shown).write(text)
    assert text == shown.getvalue()
