# SPDX-License-Identifier: Apache-2.0
"""Let rank 1 fail in the way that the command line names, while rank 0 waits for it."""

import os
import signal
import sys
import time


def fail(way):
    match way:
        case "raise":
            message = "rank 1 is out of luck"
            raise ValueError(message)
        case "exit":
            sys.exit(7)
        case "_exit":
            os._exit(5)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def wait_in_a_collective():
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed.all_reduce(torch.ones(1))
    if os.environ["RANK"] == "1":
        fail(sys.argv[1])
    elif sys.argv[1] == "part":  # another collective than rank 1's
        distributed.all_reduce(torch.ones(100))
    distributed.all_reduce(torch.ones(1))


if __name__ == "__main__":
    if sys.argv[1] in ("raise", "part"):
        wait_in_a_collective()
    if os.environ["RANK"] == "1":
        fail(sys.argv[1])
    time.sleep(6000)
