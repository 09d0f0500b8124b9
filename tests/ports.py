# SPDX-License-Identifier: Apache-2.0
"""Network ports for tests; tests that run at the same time get different ports."""

import atexit
import itertools
import os
import socket

_PORTS = range(30_000, 32_768)
"""Above the ports that accelfn derives from a job's number, below the system's free ports."""
_ASKED = itertools.count(os.getpid())


def free_port() -> int:
    """Return a port at which nobody listens, and which is this process's as long as it lives.

    A port that was bound and closed again is anybody's: the system gives it to the next that
    asks. These it gives to nobody, and among tests a name tells whose one is.
    """
    for number in itertools.islice(_ASKED, len(_PORTS)):
        port = _PORTS[number % len(_PORTS)]
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0accelfn tests, port {port}")  # in no folder: it ends with us
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            name.close()
        else:
            atexit.register(name.close)
            return port
    raise OSError("no port is free")
