# SPDX-License-Identifier: Apache-2.0
"""`python -m accelfn` runs the command line if the script `accelfn` is not on the PATH."""

import sys

from accelfn.cli import main

if __name__ == "__main__":
    sys.exit(main())
