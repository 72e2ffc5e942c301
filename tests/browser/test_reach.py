"""What a reader without a mouse or without a screen can tell apart and leave."""

from collections import Counter
from collections.abc import Callable

import pytest
from tests.browser.ledgers import Ledgers
from tests.browser.visit import Visit

pytestmark = pytest.mark.browser


def test_no_two_downloads_of_a_page_have_one_name(visit: Callable[..., Visit], lab: Ledgers) -> None:
    tab = visit()
    tab.open(study=lab.labels["tuned"], tables="true", costs="true")
    buttons = tab.page.get_by_test_id("stDownloadButton").get_by_role("button")
    names = buttons.evaluate_all("buttons => buttons.map(button => button.textContent.replace(/\\s+/g, ' ').trim())")
    assert len(names) > 5
    assert [name for name, count in Counter(names).items() if count > 1] == []
    hidden = buttons.locator(".stMarkdownColoredText").first.bounding_box()
    assert hidden is not None
    assert hidden["width"] <= 1, "the words for a screen reader take no room"


def test_tab_leaves_a_table(visit: Callable[..., Visit], lab: Ledgers) -> None:
    tab = visit()
    tab.open("trials", study=lab.labels["tuned"])
    inside = "() => !!document.activeElement.closest('[data-testid=stDataFrame]')"
    tab.page.get_by_test_id("stDataFrame").click(position={"x": 120, "y": 60})
    tab.page.keyboard.press("ArrowDown")
    assert tab.page.evaluate(inside)
    tab.page.keyboard.press("Tab")
    assert not tab.page.evaluate(inside)
    tab.page.keyboard.press("Shift+Tab")
    tab.page.keyboard.press("Shift+Tab")
    assert not tab.page.evaluate(inside)


def test_what_has_the_focus_has_an_outline(visit: Callable[..., Visit], lab: Ledgers) -> None:
    tab = visit()
    tab.open(study=lab.labels["tuned"])
    bare = []
    for _ in range(12):
        tab.page.keyboard.press("Tab")
        outline = tab.page.evaluate("""() => {
            const style = getComputedStyle(document.activeElement)
            return [document.activeElement.outerHTML.slice(0, 120), style.outlineStyle, parseFloat(style.outlineWidth)]
        }""")
        if outline[1] == "none" or outline[2] < 2:
            bare.append(outline)
    assert not bare
