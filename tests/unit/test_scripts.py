# SPDX-License-Identifier: Apache-2.0
"""A script that a rank runs is run as Python runs it."""

import json
import subprocess
import sys

import pytest

from tests.internals import run_script

SCRIPT = """
import json, sys
from pathlib import Path
import beside
told = [sys.path[0], sys.argv, __file__, __name__, beside.__file__]
Path(sys.argv[1]).write_text(json.dumps(told))
"""


@pytest.mark.parametrize("link", [None, "to the file", "to its folder"])
@pytest.mark.parametrize("spelled", ["whole", "from here"])
def test_a_script_finds_what_python_lets_it_find(link, spelled, tmp_path, monkeypatch):
    """Modules beside the file that a link leads to, its arguments, and its own name."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    (folder / "beside.py").touch()
    if link == "to the file":
        (elsewhere / "named.py").symlink_to(script)
        script = elsewhere / "named.py"
    elif link == "to its folder":
        (elsewhere / "named").symlink_to(folder)
        script = elsewhere / "named" / "script.py"
    monkeypatch.chdir(tmp_path)
    path = f"{script if spelled == 'whole' else script.relative_to(tmp_path)}"
    told = tmp_path / "told"
    subprocess.run([sys.executable, path, f"{told}", "-x"], check=True)
    expected = json.loads(told.read_text())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    run_script(path, [f"{told}", "-x"])
    del sys.modules["beside"]
    assert json.loads(told.read_text()) == expected
