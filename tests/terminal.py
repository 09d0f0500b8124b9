# SPDX-License-Identifier: Apache-2.0
"""A stream that says it is a terminal, for programs that ask or show a bar only there."""

import io


class Terminal(io.StringIO):
    """A terminal, as far as anybody can tell."""

    def isatty(self) -> bool:
        return True
