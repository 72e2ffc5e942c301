"""The list of studies is worked in a browser: tags, notes, hiding and deleting reach the ledger."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from sqlite3 import connect

import pytest
from playwright.sync_api import Page
from tests.browser.ledgers import Ledgers
from tests.browser.visit import Visit

from deltalab.store import Store
from deltalab.store.studies import shelf
from deltalab.store.studies.shelf import ListedStudy
from deltalab_dashboard.picture import served, settle

pytestmark = pytest.mark.browser


def tick_first_row(page: Page) -> None:
    """The box of a row is drawn on a canvas, 17 pixels from its left; rows are 31 pixels high."""
    box = page.get_by_test_id("stDataFrame").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 17, box["y"] + 47)
    settle(page)


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()
    settle(page)


def comes(page: Page, reached: Callable[[], bool]) -> None:
    """The server takes up a click after the page has gone quiet."""
    until = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < until
        page.wait_for_timeout(100)
    settle(page)


def test_a_study_is_tagged_noted_hidden_deleted_and_restored(
    visit: Callable[..., Visit], lab: Ledgers, tmp_path: Path
) -> None:
    file = tmp_path / "lab.db"
    with closing(connect(lab.full)) as source, closing(connect(file)) as copy:
        source.backup(copy)

    def first() -> ListedStudy:
        with Store.open(file, create=False) as store:
            return shelf.listed(store)[0]

    study = first()
    with served(file) as url:
        tab = visit(url)
        tab.open("studies")
        page = tab.page
        tick_first_row(page)
        tags = page.get_by_role("combobox", name="Tags of this study")
        tags.fill("good")
        tags.press("Enter")
        tags.press("Escape")
        page.get_by_role("textbox", name="Notes").fill("look at seed 3")
        press(page, "Save")
        comes(page, lambda: (first().id, first().tags, first().notes) == (study.id, ("good",), "look at seed 3"))

        tick_first_row(page)
        press(page, "Hide from lists")
        comes(page, lambda: first().hidden)
        tab.open("studies", which="listed and hidden")
        tick_first_row(page)
        page.get_by_role("button", name="Delete", exact=True).click()
        press(page, "Delete this study")
        comes(page, lambda: first().id != study.id)

        tab.open("studies", which="deleted")
        tick_first_row(page)
        press(page, "Restore this study")
        comes(page, lambda: first().id == study.id)
        assert not tab.complaints
        tab.close()


NOTES = """**Sure** of `seed 3`, [see](https://example.org/page).

![a](http://evil.example/a.png) ![b][ref] <img src=x onerror="document.title='owned'">
<script>document.title='owned'</script>

[c](javascript:document.title='owned') $\\href{javascript:alert(1)}{d}$

[ref]: http://evil.example/b.png
"""


def test_notes_are_markdown_that_runs_and_fetches_nothing(visit: Callable[..., Visit], lab: Ledgers) -> None:
    study = int(lab.labels["ablation"].partition(" ")[0])
    with Store.open(lab.full, create=False) as store:
        shelf.note(store, study, NOTES)
    try:
        tab = visit()
        tab.open(study=lab.labels["ablation"])
        main = tab.page.get_by_test_id("stMain")
        assert main.locator("strong", has_text="Sure").is_visible()
        assert main.get_by_role("link", name="see").get_attribute("href") == "https://example.org/page"
        assert main.locator("img[src*=evil], [href^='javascript:']").count() == 0
        assert main.locator("script", has_text="owned").count() == 0
        assert tab.complaints == [], "nothing is asked of evil.example"
        assert "owned" not in tab.page.title()
    finally:
        with Store.open(lab.full, create=False) as store:
            shelf.note(store, study, "")


def test_a_click_in_the_legend_switches_an_arm(visit: Callable[..., Visit], lab: Ledgers) -> None:
    tab = visit()
    tab.open("curves", study=lab.labels["ablation"])
    legend = tab.page.get_by_test_id("stVegaLiteChart").first.locator(".role-legend text")
    legend.filter(has_text="late").click()
    tab.page.wait_for_function("() => location.search.includes('arms=base') && !location.search.includes('arms=late')")
    tab.settle()
    legend.filter(has_text="late (off)").click()
    tab.page.wait_for_function("() => location.search.includes('arms=late')")
    assert not tab.complaints
