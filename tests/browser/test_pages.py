"""Every page of every kind of study, in a browser, from the server that `deltalab dashboard` starts."""

from collections.abc import Callable

import pytest
from tests.browser.ledgers import HOSTILE_STUDY, KINDS, Ledgers
from tests.browser.visit import DESKTOP, PHONE, Visit

pytestmark = pytest.mark.browser
EXAMINED = ("tuned", "search", "ladder", "running", HOSTILE_STUDY)
"""Kinds that axe-core looks at: between them they have all that a page may show."""


@pytest.mark.parametrize("kind", ["trained", *KINDS])
def test_every_page(visit: Callable[..., Visit], lab: Ledgers, axe: str, kind: str) -> None:
    """No error of the console, no exception, no request elsewhere, no sideways scroll, nothing that axe-core minds."""
    tab = visit()
    tab.open(study=lab.labels[kind])
    wrong: list[str] = []
    for path in tab.pages():
        tab.turn_to(path)
        found = [*tab.boxes(), *tab.sideways(), *(tab.violations(axe) if kind in EXAMINED else [])]
        tab.page.set_viewport_size(PHONE)
        tab.page.wait_for_timeout(200)
        found += tab.sideways()
        tab.page.set_viewport_size(DESKTOP)
        found += [
            f"a link: {link}"
            for link in tab.page.locator("[href^='http://evil'], [src^='http://evil']").all_inner_texts()
        ]
        wrong += [f"/{path}: {each}" for each in [*found, *tab.complaints]]
        tab.complaints.clear()
    assert "owned" not in tab.page.title()
    assert not wrong, "\n".join(dict.fromkeys(wrong))
