# SPDX-License-Identifier: Apache-2.0
"""The package as others get it: its page on an index, its names, what it shows, a wheel."""

import html
import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import accelfn as af
from accelfn.testing import communication
from tests.budget import at_night
from tests.internals import configure, run_script, system
from tests.laws.worlds import single
from tests.states import linear_state, square
from tests.waiting import HANGS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELATIVE = re.compile(r"\]\((?!https?://)")


def run(*words, **named):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        check=True,
        capture_output=True,
        text=True,
        timeout=HANGS,
        **named,
    ).stdout


def front_page(text):
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_no_link_of_the_front_page_on_an_index_is_dead():
    """Links into the repository leave their words; code, and links to the web, stay."""
    readme = (ROOT / "README.md").read_text()
    shown = front_page(readme)
    assert RELATIVE.search(readme)
    assert not RELATIVE.search(shown)
    words = re.compile(r"[\w`]+")
    bare = re.sub(r"\]\((?!https?://)[^)]*\)", "]", readme)
    assert words.findall(shown) == words.findall(bare)


def test_the_changelog_has_the_version():
    """Unreleased changes stand first; each Python among the classifiers passed in the table."""
    unreleased, newest, *_ = re.findall(
        r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    version, date = newest.split(" - ")
    assert unreleased == "Unreleased"
    assert version == PROJECT["project"]["version"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    table = (ROOT / "docs/compatibility.md").read_text()
    tried = re.findall(r"^\| (3\.\d+)\.\d+ \| .* \| pass\b", table, re.MULTILINE)
    named = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["project"]["classifiers"]))
    assert named == sorted(set(tried))


def test_a_star_takes_the_public_names():
    """`from accelfn import *` has every public name, and none of the rooms."""
    names: dict[str, object] = {}
    exec("from accelfn import *", names)  # noqa: S102 - nowhere else may it stand
    del names["__builtins__"]
    assert af.__all__ == sorted(names)
    assert {"World", "ema", "schedules", "track"} <= set(names)
    assert set() == {"base", "cli", "loop", "compile"} & set(names)


OPTIONAL = "cloudpickle", "hypothesis", "pytest", "rich", "tomlkit", "torchdata"


def test_a_step_imports_no_optional_package(tmp_path):
    """Nor torchdata: only streams with a state read through it."""
    program = (
        "import sys, torch; before = {*sys.modules}; import accelfn as af\n"
        "assert len({*sys.modules} - before) <= 60\n"
        "data = af.Data(torch.ones(4, 2), global_batch_size=2)\n"
        "state = af.TrainState.create(\n"
        "    model=lambda: torch.nn.Linear(2, 1), optimizer=torch.optim.AdamW, data=data)\n"
        "step = af.make_step(lambda model, batch: model(batch).mean())\n"
        "for batch in af.batches(state, until_epoch=1): state, _ = step(state, batch)\n"
        "af.save(state, 'saved')\n"
        f"print({{*{OPTIONAL}}} & {{*sys.modules}})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert run("-c", program, cwd=tmp_path, env=environment) == "set()\n"


@pytest.mark.parametrize(
    ("hidden", "call"),
    [
        ("cloudpickle", lambda _: af.launch(1, print)),
        ("rich.progress", lambda _: af.track.progress([], world=af.World())),
        (
            "tomlkit",
            lambda folder: configure(
                folder / "accelfn.toml", ["nproc=2"], default=False
            ),
        ),
    ],
)
def test_a_missing_package_names_its_extra(hidden, call, monkeypatch, tmp_path):
    """What a light install lacks is named by the call that needs it."""
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(
        af.errors.Error, match=r"pip install \"accelfn\[interactive\]\""
    ):
        call(tmp_path)


def test_an_old_torch_names_the_newer_one(monkeypatch):
    """At import below the floor; at what needs more, above it. DDP has its older name."""
    monkeypatch.setattr(system, "VERSION", (2, 10))
    with pytest.raises(
        ImportError, match="needs torch 2.11 or later, but this is torch"
    ):
        system.check_floor()
    monkeypatch.setattr(system, "IS_OLD", True)
    for create in (af.wrap_fsdp, af.compile):
        with pytest.raises(af.errors.CompositionError, match=r"\(\) needs torch 2.13"):
            create()
    options = system.ddp_options({"forward_sync_buffers": False})
    assert options == {"broadcast_buffers": False}


@pytest.mark.slow
def test_a_tree_that_is_not_installed_can_be_imported(tmp_path):
    """Its version is unknown, and says so; the command line works."""
    (tmp_path / "accelfn").symlink_to(ROOT / "accelfn")
    code = (
        "import sys; from importlib import metadata\n"
        "def unknown(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = unknown\n"
        "import accelfn; print(accelfn.__version__, accelfn.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    version, file = run("-c", code, cwd=tmp_path, env=environment).split()
    assert version == "0+unknown"
    assert Path(file).is_relative_to(tmp_path)


@pytest.mark.skipif(not at_night(), reason="builds a wheel, by pip: at night")
def test_the_front_page_runs_from_the_wheel(tmp_path):
    """The built wheel, by itself, holds what the README's first block needs, and its types."""
    run("-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    names = {path.name for path in (tmp_path / "site").iterdir()}
    assert {"accelfn", "pytest_accelfn.py"} == {
        n for n in names if "dist-info" not in n
    }
    (metadata,) = (tmp_path / "site").glob("*.dist-info/METADATA")
    _, _, shown = metadata.read_text().partition("\n\n")
    assert front_page((ROOT / "README.md").read_text()).split() == shown.split()
    for data in ("py.typed", "base/hints.toml"):
        assert (tmp_path / "site/accelfn" / data).exists()
    script = tmp_path / "train.py"
    block = re.search(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    script.write_text(f"{block[1]}\nprint(af.__file__)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    *_, losses, file = run(script, cwd=tmp_path, env=environment).splitlines()
    assert "'loss': " in losses
    assert Path(file).is_relative_to(tmp_path / "site")


def records():
    """Return a value of each kind that a training has."""
    data = af.Data(torch.ones(8, 2), global_batch_size=4)
    state = linear_state(2, data=data, setup=af.chain(af.ema(0.9)), world=single())
    batch = next(iter(af.batches(state)))
    metrics, grads = af.value_and_grad(square)(state, batch)
    return [state, state.world, state.data, state.setup, batch, metrics, grads]


@pytest.mark.parametrize("value", records(), ids=lambda value: type(value).__name__)
def test_dir_shows_what_exists(value):
    """Each name that `dir` shows is defined, and `help` works."""
    shown = [name for name in dir(value) if not name.startswith("_")]
    assert shown
    for name in shown:
        inspect.getattr_static(value, name)  # asks no __getattr__, which gives hints
    assert type(value).__name__ in pydoc.render_doc(type(value))


def test_a_step_is_printed_with_its_loss():
    """Steps, tables in notebooks, `bool` of a stream, and `dir` of the package."""
    assert repr(af.make_step(square)).startswith("<function step of square at 0x")

    class Numbers:
        def __iter__(self):
            return iter(range(3))

    assert af.Data(Numbers(), global_batch_size=1)
    state = linear_state()
    plan = af.plan_devices(torch.nn.Linear(1, 1), {"cpu": "1MB"})
    traffic = communication(af.barrier, ranks=(2, 3))
    for each in (af.memory(state), plan, traffic):
        assert each._repr_html_() == f"<pre>{html.escape(str(each))}</pre>"
    assert len(dir(af)) <= 110
    modules = {name for name in dir(af) if inspect.ismodule(getattr(af, name))}
    assert modules == {"errors", "megatron", "orders", "schedules", "track", "typing"}


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
