"""The documentation site builds without a warning, its links lead somewhere, and it needs no other host."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.chromium import Page as BrowserPage
from tests.chromium import find_chromium

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that fetch what they name; a link with `rel=canonical` and its like does not."""
FETCHING = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "manifest"}
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


class Page(HTMLParser):
    """What a page links to, what it loads, and the places one can link to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.ids, self.classes = [], [], set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        self.classes |= set((given.get("class") or "").split())
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if given.get(LOADED.get(tag, "")) and (
            tag != "link" or FETCHING & set((given.get("rel") or "").split())
        ):
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory):
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def site(site_folder):
    return {
        path.relative_to(site_folder).as_posix(): Page(path) for path in site_folder.rglob("*.html")
    }


def is_elsewhere(link):
    parts = urlsplit(link)
    return bool(parts.scheme or parts.netloc)


def test_every_page_is_built(site):
    pages = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= site.keys()


def test_links_lead_to_pages_and_places(site):
    for name, page in site.items():
        if name == "404.html":  # served for any address, so its links are from the root
            continue
        for link in page.links:
            if is_elsewhere(link):
                continue
            path, place = unquote(urlsplit(link).path), unquote(urlsplit(link).fragment)
            target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
            target = "index.html" if target == "." else target
            assert target in site, f"{name} links to {link}"
            assert not place or place in site[target].ids, f"{name} links to {link}"


def test_nothing_is_loaded_from_another_host(site):
    for name, page in site.items():
        assert [each for each in page.loads if is_elsewhere(each)] == [], name
        # The theme would fetch the library that draws these.
        assert "mermaid" not in page.classes, name


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")
@pytest.mark.skipif(sys.platform == "win32", reason="the protocol's pipe needs POSIX descriptors")
def test_the_navigation_is_in_sight_on_a_small_laptop(site_folder):
    with BrowserPage(1200, 800) as page:
        page.open(site_folder / "recipe.html")
        link = "document.querySelector('.md-sidebar--primary a[href=\"rewards.html\"]')"
        assert page.ask(f"{link}.checkVisibility()")
        assert page.ask(f"{link}.getBoundingClientRect().left") >= 0


def test_styles_and_scripts_of_ours_fetch_nothing():
    for path in (ROOT / "docs" / "assets").iterdir():
        assert "//" not in re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL), path


def anchors_of(path):
    """The places of a Markdown page, as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_of_the_readme_lead_to_files_and_places():
    readme = ROOT / "README.md"
    for link in LINK.findall(readme.read_text(encoding="utf-8")):
        if is_elsewhere(link):
            continue
        parts = urlsplit(link)
        target = ROOT / parts.path if parts.path else readme
        assert target.is_file(), link
        assert not parts.fragment or parts.fragment in anchors_of(target), link


def test_the_readme_names_every_page():
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    for path in (ROOT / "docs").glob("*.md"):
        assert f"docs/{path.name}" in linked, path.name
