"""Serves the dashboard, opens it in a browser, and takes the pictures in the documentation."""

import argparse
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, sync_playwright

from deltalab.errors import InputError
from deltalab.store import Store
from deltalab_dashboard.frame import DATABASE, STUDY
from deltalab_dashboard.text import label

CHROMIUM = Path("/usr/bin/chromium")
"""The browser that Debian's package installs. Without a path, Playwright would download a browser."""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_SECONDS = 60
"""The most seconds that the server may take to start."""
WIDTH = 1440
"""The width of the window in pixels."""
BELOW = 60
"""The pixels below the forest, or the chart of another page, that belong to the picture."""
DRAWN = """() => [...document.querySelectorAll('[data-testid=stVegaLiteChart]')]
    .every(chart => chart.querySelector('canvas, svg')?.getBoundingClientRect().height > 0)"""
"""JavaScript that returns whether every chart is drawn."""

QUIET = """() => {
    const state = document.querySelector('[data-test-script-state]').dataset.testScriptState
    const main = document.querySelector('[data-testid=stMain]')
    const waits = main.querySelector('[data-testid=stSkeleton]') ? performance.now() : ''
    const now = state + main.innerHTML.length + waits
    if (now !== window.settling?.now) window.settling = {now, since: performance.now()}
    return state === 'notRunning' && performance.now() - window.settling.since > 300
}"""
"""JavaScript that returns whether a page has not changed for 300 ms and its script is not running.

The wait is needed since a reader's choice reaches the server a moment later, so a script that is not running may be
about to run. While the page shows a skeleton, the page counts as changing. A skeleton stands for a part whose
JavaScript has not arrived yet.
"""


@contextmanager
def served(db: str | Path) -> Iterator[str]:
    """Runs a dashboard until the `with` block ends, and yields the dashboard's address.

    Raises:
        InputError: The dashboard does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sysconfig.get_path("scripts")) / "deltalab"), "dashboard", "--port", str(port), "--no-browser"]
    server = subprocess.Popen(command, env={**os.environ, DATABASE: str(db)})
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while not _answers(f"http://127.0.0.1:{port}/_stcore/health"):
            if server.poll() is not None or time.monotonic() > until:
                raise InputError("the dashboard does not start")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@contextmanager
def browser() -> Iterator[Browser]:
    """Opens a browser until the `with` block ends.

    Raises:
        InputError: `CHROMIUM` is not installed.
    """
    if not CHROMIUM.exists():
        raise InputError(f"{CHROMIUM} is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()


def settle(page: Page) -> None:
    """Waits until the page and its charts are drawn."""
    page.locator("[data-testid=stMain] h1").first.wait_for()
    page.wait_for_function(QUIET, polling=50)
    page.wait_for_function(DRAWN)


def take(chromium: Browser, db: str | Path, study: str, out: Path, page_of_study: str = "") -> None:
    """Writes a screenshot of a page of a study. The picture ends below the forest of its arms, or the first chart.

    Args:
        chromium: The browser that draws the page.
        db: The file or URL of the ledger.
        study: The address of the study, such as NAME:PROFILE.
        out: The file to write the picture to.
        page_of_study: The page with parameters, such as "curves?axis=tokens". The first page if empty.

    Raises:
        InputError: The database or the study does not exist, or the dashboard does not start.
    """
    with Store.open(db, create=False) as store:
        query = urlencode({STUDY: label(store.study(study))})
    with served(db) as url, chromium.new_page(viewport={"width": WIDTH, "height": 1000}) as page:
        path, _, parameters = page_of_study.partition("?")
        page.goto(f"{url}/{path}?{'&'.join(filter(None, (query, parameters)))}")
        settle(page)
        answer = page.locator(".forest, [data-testid=stVegaLiteChart]").first
        if answer.count() and (box := answer.bounding_box()):
            page.set_viewport_size({"width": WIDTH, "height": int(box["y"] + box["height"]) + BELOW})
            settle(page)
        page.screenshot(path=out)


def _answers(url: str) -> bool:
    """Returns whether a server answers at the URL."""
    try:
        with urlopen(url, timeout=1):
            return True
    except (URLError, TimeoutError):
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", default="deltalab.db")
    parser.add_argument("--study", required=True)
    parser.add_argument("--page", default="", help='a page with parameters, such as "curves?axis=tokens"')
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        with browser() as chromium:
            take(chromium, args.db, args.study, args.out, args.page)
    except InputError as error:
        sys.exit(f"error: {error}")
