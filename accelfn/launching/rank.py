# SPDX-License-Identifier: Apache-2.0
"""The script that each rank of `af.launch` runs: it calls the pickled function.

`accelfn/launching/worker.py` runs this file like any other script.
"""

import json
import linecache
import pickle
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Run the pickled call in a folder, and write this rank's result to the folder."""
    call = json.loads((folder / "call.json").read_text(encoding="utf-8"))
    sys.path[:] = call["import_path"]
    sys.excepthook = _say_nothing  # `af.launch` raises an error with this traceback
    for name, text in call["sources"].items():
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name

    # imported here because the import path is now that of the caller
    from accelfn import World  # noqa: PLC0415
    from accelfn.plug import codec  # noqa: PLC0415

    with World.from_env(**call["options"]) as world:
        fn, args = pickle.loads((folder / "call.pickle").read_bytes())  # noqa: S301 - the caller's
        result = fn(world, *args)
        path = f"the result of rank {world.rank}"
        (folder / f"result-{world.rank}").write_bytes(codec.to_bytes(result, path=path))


def _say_nothing(*error: object) -> None: ...


if __name__ == "__main__":
    main(Path(sys.argv[1]))
