# SPDX-License-Identifier: Apache-2.0
"""Have a function of this script run by processes that import it anew."""

import multiprocessing
import sys


def double(number):
    return 2 * number


if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            sys.stdout.write(f"{method} {pool.map(double, [1, 2])}\n")
