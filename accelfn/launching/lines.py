# SPDX-License-Identifier: Apache-2.0
"""What ranks write, shown in whole lines, so that no line has the words of two ranks.

torch's launcher follows the files that ranks write to, and shows what it finds at once: of a
line that is being written, a part. Several ranks' parts would stand in one line.
"""

from __future__ import annotations

import re
from typing import TextIO

PREFIX = "[rank ${rank}] "
_PREFIXED = re.compile(r"\[rank \d+\] ")


class WholeLines:
    """A stream that holds what each rank wrote until its line ends."""

    def __init__(self, stream: TextIO) -> None:
        """Take where lines go."""
        self._stream = stream
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Take a piece of one rank's line, behind its prefix; what has none is passed on."""
        found = _PREFIXED.match(text)
        if found is None:
            return self._stream.write(text)
        prefix = found.group()
        line = self._begun.pop(prefix, prefix) + text[found.end() :]
        if line.endswith("\n"):
            self._stream.write(line)
        else:
            self._begun[prefix] = line
        return len(text)

    def flush(self) -> None:
        """Flush what is whole."""
        self._stream.flush()

    def end(self) -> None:
        """Show the lines that will not go on, for the ranks that wrote them have ended."""
        while self._begun:
            self._stream.write(f"{self._begun.popitem()[1]}\n")
