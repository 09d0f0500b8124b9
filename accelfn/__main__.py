# SPDX-License-Identifier: Apache-2.0
"""`python -m accelfn`: the command line, where its script is not on the path."""

import sys

from accelfn.cli import main

if __name__ == "__main__":
    sys.exit(main())
