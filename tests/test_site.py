# SPDX-License-Identifier: Apache-2.0
"""Test the website: its build has no warnings, and links, pictures and search work."""

import http.server
import json
import queue
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.waiting import HANGS

pytestmark = pytest.mark.slow(together=True)  # it is built once

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "site"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
NODE = shutil.which("node")
SEARCHES = {
    "install": "install/",
    "multi gpu": "how-to/launch/",
    "notebook": "how-to/notebooks/",
    "distributed data parallel": "reference/transforms-parallel/",
    "fsdp": "how-to/big-models/",
    "gradient accumulation": "how-to/batches/",
    "learning rate on N GPUs": "how-to/batches/",
    "learning rate scheduler": "how-to/schedules/",
    "contrastive loss": "how-to/losses-that-couple-samples/",
    "mixture of experts": "examples/25_mixture_of_experts.py/",
    "lora": "how-to/share-models/",
    "seed": "how-to/seeds/",
    "early stopping": "how-to/evaluation/",
    "F1": "how-to/evaluation/",
    "save model": "how-to/resume/",
    "resume": "how-to/resume/",
    "resume training": "how-to/resume/",
    "wandb": "how-to/track/",
    "hang": "how-to/troubleshooting/",
    "NCCL timeout": "how-to/troubleshooting/",
    "TPU": "reference/devices/",
}
"""The page that must be the first or second result of a search."""
CODE = re.compile(r"(tests|accelfn)\b|.*\.(py|toml)\.md")
"""Pages of the site that show a file of the repository."""
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--enable-logging=stderr"),
)
PAGES = (
    *("", "install/", "tutorial/", "how-to/launch/", "how-to/precision/"),
    *("reference/transforms/", "reference/world/", "reference/errors-training/"),
)
"""Pages with wide tables, tabs, pictures, long errors and signatures."""
WIDTHS = 390, 1366
SCREEN = 768
LONGEST = 15
"""Screens in a page."""


class Page(HTMLParser):
    """What a built page has: anchors, links, pictures, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loads, self.pictures = set(), [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        has = dict(attrs)
        self.anchors |= {has["id"]} if "id" in has else set()
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        if tag == "link" and has["rel"] in {"stylesheet", "icon"}:
            self.loads.append(has["href"])
        if "src" in has:
            self.loads.append(has["src"])
        if tag == "img":
            self.pictures.append(has)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return this version of the site, beside an older one, as `nox -s site` builds it.

    A warning of the generator fails it.
    """
    folder = tmp_path_factory.mktemp("site")
    (folder / "site/0.1.0").mkdir(parents=True)
    (folder / "site/0.1.0/index.html").write_text("<!doctype html><title>old</title>")
    command = sys.executable, "docs/site/build.py", str(folder)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    return folder / "site" / VERSION


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html") if path.stem != "404"}


def target(site, path, link):
    """Return the file that a link leads to, and the anchor in it."""
    parts = urlsplit(link)
    base = site if parts.path.startswith("/") else path.parent
    place = base / unquote(parts.path).lstrip("/") if parts.path else path
    place = place.resolve()
    return place / "index.html" if place.is_dir() else place, unquote(parts.fragment)


def test_every_page_is_in_the_navigation(site):
    """A page that docs/ has, and no list in docs/site/zensical.toml, would not be found."""
    built = site.parents[1] / "docs"
    config = tomllib.loads((ROOT / "docs/site/zensical.toml").read_text())
    listed = re.findall(r"'([\w./-]+\.md)'", str(config["project"]["nav"]))
    there = {path.relative_to(built).as_posix() for path in built.rglob("*.md")}
    left_out = {each for each in there if not CODE.match(each)} - set(listed)
    assert left_out == set(), f"add to nav in docs/site/zensical.toml: {left_out}"
    assert set(listed) <= there, (
        "nav in docs/site/zensical.toml lists what is not there"
    )
    assert sorted(set(listed)) == sorted(listed), "nav lists a page twice"


def test_every_link_of_the_site_leads_somewhere(site, pages):
    """It leads to a page that is there, and to an anchor that the page has."""
    astray = set()
    for path, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme:
                continue
            place, anchor = target(site, path, link)
            known = pages[place].anchors if place in pages else set()
            if not place.is_file() or (anchor and anchor not in known):
                astray.add((path.relative_to(site).as_posix(), link))
    assert astray == set()


def test_each_version_has_its_folder(site):
    """What was built before stays, the newest is first, and the address of all leads there."""
    versions = json.loads((site.parent / "versions.json").read_text())
    assert [each["version"] for each in versions] == [VERSION, "0.1.0"]
    assert versions[0]["aliases"] == ["latest"]
    assert (site.parent / "0.1.0/index.html").is_file()
    assert f"url={VERSION}/" in (site.parent / "index.html").read_text()


def test_each_page_says_when_its_code_was_run(site):
    """Its foot has the versions that CI installs, and the commit that the page is of."""
    row = re.search(
        r"^\| (3\.11\.\d+) \| (.*) \| every change \|",
        (ROOT / "docs/compatibility.md").read_text(),
        re.MULTILINE,
    )
    python, torch = row.groups()
    assert f"torch=={torch}" in (ROOT / "constraints.txt").read_text().split()
    ran = f"CI ran the Python of this page on Python {python} and torch {torch}"
    of = (
        f": accelfn {VERSION}, commit of {commit()}"
        if commit()
        else f": accelfn {VERSION}."
    )
    built = site.parents[1] / "docs"
    said = {True: set(), False: set()}
    for page in sorted(built.rglob("*.md")):
        name = page.relative_to(built).as_posix()
        if not CODE.match(name):
            place = site / name.removesuffix(".md").removesuffix("index") / "index.html"
            (foot,) = re.findall(r'<p class="last-run">(.*)</p>', place.read_text())
            said[bool(re.search("^```py", page.read_text(), re.MULTILINE))].add(foot)
    assert [len(each) for each in said.values()] == [1, 1]
    assert said[True].pop().startswith(ran + of)
    assert said[False].pop().startswith("This page has no Python that is run" + of)


def commit():
    """Return the day of the commit that this tree is of, where it is of one."""
    if not (ROOT / ".git").exists():
        return ""
    command = "git", "show", "--no-patch", "--format=%cs", "HEAD"
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def test_a_page_loads_nothing_from_elsewhere(site, pages):
    """Styles, scripts and pictures are the site's own, and are there."""
    missing = {
        (path.relative_to(site).as_posix(), link)
        for path, page in pages.items()
        for link in page.loads
        if urlsplit(link).scheme or not target(site, path, link)[0].is_file()
    }
    assert missing == set()


def test_every_picture_has_words(pages):
    """Those who cannot see a picture are told what is in it."""
    pictures = [each for page in pages.values() for each in page.pictures]
    assert len(pictures) >= 4
    assert [each["src"] for each in pictures if len(each.get("alt") or "") < 40] == []


def test_the_reference_shows_signatures_and_arguments(site):
    """A name has the signature that users call, and a table with linked types."""
    pages = site.parents[1] / "docs/reference"
    text = (pages / "transforms-optimization.md").read_text()
    assert "af.ema(decay: float, *, name: str = 'ema')\n" in text
    assert "| `decay` | <code>float</code> | required | " in text
    text = (pages / "transforms-parallel.md").read_text()
    assert "    num_micro_batches: int | None = None,\n" in text
    assert "### `af.World.from_env`\n" in (pages / "world.md").read_text()
    assert '<a href="world.md#afworld">World</a>' in (pages / "state.md").read_text()
    bad = re.compile(r"^#+ .*\b_\w+|at 0x|<function|accelfn\.\w+\.\w+ \|", re.MULTILINE)
    found = {page.name: bad.findall(page.read_text()) for page in pages.glob("*.md")}
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_a_search_finds_the_right_page(site):
    """The right page is the first or second result, as the site's own search ranks them."""
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    command = NODE, SCRIPTS / "search.mjs", worker, site / "search.json", *SEARCHES
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {words: pages[:2] for words, pages in json.loads(done.stdout).items()}
    wrong = {
        words: found[words]
        for words, page in SEARCHES.items()
        if page not in found[words]
    }
    assert wrong == {}


def test_long_lists_are_not_searched(site):
    """Pages that contain every word would hide the pages that explain it."""
    items = json.loads((site / "search.json").read_text())["items"]
    pages = {item["location"].split("#")[0] for item in items}
    assert pages & {"benchmarks/", "changes/", "law-tests/"} == set()
    assert not any(page.startswith(("tests/", "accelfn/")) for page in pages)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_shows_the_site(site, tmp_path, scheme):
    """Pages fit the screen, copy buttons show, a search finds, and copies have no prompts.

    In the light scheme these are all pages for readers.
    """
    built = (path.parent.relative_to(site) for path in site.rglob("*/index.html"))
    names = [f"{path}/" for path in built if not CODE.match(f"{path}.md")]
    told, said = browsed(site, tmp_path, scheme, names if scheme == "light" else PAGES)
    assert re.findall(r".*CONSOLE.*", said) == []
    for name, page in told["pages"].items():
        assert page["wide"] <= 0, name
        assert page["screens"] <= LONGEST, name
        if page["button"]:
            contrast = brightness(page["button"]) - brightness(page["back"])
            assert abs(contrast) > 0.3, name
        assert len(page["text"]) > 400, name
        assert (brightness(page["back"]) > 0.5) == (scheme == "light"), name
    assert f"/{VERSION}/reference/transforms-parallel/" in told["found"]
    assert told["versions"] == [f"/{VERSION}/", "/0.1.0/"]
    assert len(told["copied"]) >= 3
    prompts = re.compile(r">>>|^\.\.\. |^\$ |Traceback", re.MULTILINE)
    assert [each for each in told["copied"] if prompts.search(each)] == []
    assert all(each.strip() for each in told["copied"])


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", WIDTHS)
def test_take_pictures(site, tmp_path, scheme, width):
    """Pictures of telling pages, in build/pictures, for a person to look at."""
    folder = ROOT / "build/pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        picture = (
            folder
            / f"{page.strip('/').replace('/', '-') or 'index'}-{width}-{scheme}.png"
        )
        picture.unlink(missing_ok=True)
        command = [
            *(BROWSER, *QUIET, f"--user-data-dir={tmp_path}", "--hide-scrollbars"),
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
            *(f"--window-size={width},3000", f"--screenshot={picture}"),
            f"file://{site / page / 'index.html'}",
        ]
        subprocess.run(command, capture_output=True, check=True, timeout=HANGS)
        head = picture.read_bytes()[:24]
        assert int.from_bytes(head[16:20]) == width
        assert picture.stat().st_size > 30_000, "the page is blank"


def browsed(site, folder, scheme, pages):
    answers = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *said):
            pass

        def do_POST(self):
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

    probe = (SCRIPTS / "probe.html").read_text().replace("VERSION", VERSION)
    for name, value in (("WIDTHS", WIDTHS), ("SCREEN", SCREEN), ("PAGES", [*pages])):
        probe = probe.replace(name, json.dumps(value))
    (site.parent / "probe.html").write_text(probe)
    serve = partial(Handler, directory=str(site.parent))
    log = folder / "said.txt"
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server,
        log.open("w") as said,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        chrome = subprocess.Popen(
            [
                *(BROWSER, *QUIET, f"--user-data-dir={folder / 'profile'}"),
                *("--window-size=1300,900", "--remote-debugging-port=0"),
                f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
                f"http://127.0.0.1:{server.server_port}/probe.html",
            ],
            stderr=said,
        )
        try:
            told = json.loads(answers.get(timeout=HANGS))
        finally:
            chrome.terminate()
            chrome.wait(HANGS)
            server.shutdown()
            (site.parent / "probe.html").unlink()
    return told, log.read_text()


def brightness(colour):
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255
