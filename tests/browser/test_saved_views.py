"""A reader saves what a page shows by a name, opens it again, and renames and deletes it."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator
from tests.browser.ledgers import Ledgers
from tests.browser.visit import Visit

pytestmark = pytest.mark.browser


def sidebar(tab: Visit) -> Locator:
    """The saved views beside the page, opened."""
    views = tab.page.get_by_test_id("stSidebar").get_by_test_id("stExpander")
    if not views.get_by_role("textbox", name="Save this view as").is_visible():
        views.locator("summary").click()
    return views


def save(tab: Visit, name: str) -> None:
    sidebar(tab).get_by_role("textbox", name="Save this view as").fill(name)
    sidebar(tab).get_by_role("button", name="Save", exact=True).click()
    tab.settle()


def test_a_view_is_saved_opened_renamed_and_deleted(visit: Callable[..., Visit], lab: Ledgers) -> None:
    tab = visit()
    tab.open("curves", study=lab.labels["tuned"], arms="base", logx="true")
    save(tab, "base alone *on* <b>log</b> x")
    sidebar(tab).get_by_role("link", name="base alone *on* <b>log</b> x").wait_for()
    tab.open("curves", study=lab.labels["tuned"])
    assert "logx" not in tab.page.url
    sidebar(tab).get_by_role("link", name="base alone *on* <b>log</b> x").click()
    tab.page.wait_for_function("() => location.search.includes('logx=true')")
    tab.settle()
    state = {widget["label"]: widget["value"] for widget in tab.widgets()}
    assert state["Log x"] == [True], "the page that was open shows the view"
    assert "base" in state["Arms"][0]

    tab.open(study=lab.labels["ablation"])  # Another page of another study.
    sidebar(tab).get_by_role("link", name="base alone *on* <b>log</b> x").click()
    tab.page.wait_for_function("() => location.pathname === '/curves' && location.search.includes('logx=true')")
    tab.settle()
    assert lab.labels["tuned"].replace(" ", "+") in tab.page.url
    assert "arms=base" in tab.page.url, "a name that both pages' addresses have belongs to the view"
    tab.open(saved="base alone *on* <b>log</b> x")
    tab.page.wait_for_function("() => location.pathname === '/curves' && location.search.includes('arms=base')")
    tab.open(saved="base alone")
    assert tab.page.get_by_text("unknown view 'base alone'").is_visible()
    tab.open("curves", study=lab.labels["tuned"])

    save(tab, "base alone *on* <b>log</b> x")
    sidebar(tab).get_by_text("exists; choose another name").wait_for()

    sidebar(tab).get_by_role("button", name="Rename or delete").click()
    tab.page.get_by_role("textbox", name="Its new name").fill("renamed")
    tab.page.get_by_role("button", name="Rename", exact=True).click()
    sidebar(tab).get_by_role("link", name="renamed").wait_for()
    if not tab.page.get_by_role("button", name="Delete this view").is_visible():
        sidebar(tab).get_by_role("button", name="Rename or delete").click()
    tab.page.get_by_role("button", name="Delete this view").click()
    sidebar(tab).get_by_role("link").first.wait_for(state="detached")
    assert tab.complaints == []
