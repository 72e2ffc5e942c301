"""One server with a study of each kind, one browser, and a tab for each test, photographed where the test fails."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from tests.browser.ledgers import Ledgers, ledgers
from tests.browser.visit import Visit

from deltalab_dashboard.picture import CHROMIUM, browser, served

NO_CHROMIUM = f"{CHROMIUM} is missing: apt-get install chromium"
NO_AXE = "axe-core is missing: `make browser` installs axe-playwright-python, which brings it"
SCREENS = ".browser"  # a folder in the repository's root, which git ignores


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(NO_CHROMIUM)
    with browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, an engine that tests pages for what keeps people out."""
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip(NO_AXE)
    return (Path(package.origin).parent / "axe.min.js").read_text()


@pytest.fixture(scope="session")
def lab(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledgers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltalab.authoring.verdict.demand", lambda rules, quiet=False: None)  # it takes seconds
        with ledgers(tmp_path_factory.mktemp("ledgers")) as built:
            yield built


@pytest.fixture(scope="session")
def url(lab: Ledgers) -> Iterator[str]:
    """The dashboard of the full ledger, by the command that a user gives."""
    with served(lab.full) as address:
        yield address


@pytest.fixture
def visit(request: pytest.FixtureRequest, chromium: Browser, url: str) -> Iterator[Callable[..., Visit]]:
    """Opens a tab of its own cookies and storage at each call. `SCREENS` keeps screenshots of a test that fails."""
    opened: list[Visit] = []

    def new(at: str = url, **context: Any) -> Visit:
        opened.append(Visit(chromium, at, **context))
        return opened[-1]

    yield new
    failed = request.node.stash.get(FAILED, False)
    for number, each in enumerate(opened):
        if failed:
            for file in each.photograph(request.config.rootpath / SCREENS, f"{request.node.name}-{number}"):
                print(file)
        each.close()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report
