"""How a person works the pages: by address, by keyboard, by wheel, in the dark, and with files to take along."""

import ast
import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.browser.ledgers import Ledgers
from tests.browser.visit import PHONE, Visit

from deltalab_dashboard.picture import served

pytestmark = pytest.mark.browser
RICH = ("tuned", "search")  # they have a figure on every page
BEGINNINGS = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<svg", ".json": b"{", ".md": b"#", ".html": b"<"}


@pytest.mark.parametrize("kind", RICH)
def test_the_address_restores_what_was_chosen(visit: Callable[..., Visit], lab: Ledgers, kind: str) -> None:
    tab, fresh = visit(), visit()
    tab.open(study=lab.labels[kind])
    wrong = []
    for path in tab.pages():
        tab.turn_to(path)
        for number in range(len(tab.widgets())):
            if number < len(tab.widgets()):  # a choice may take later widgets away
                tab.change(number)
        fresh.page.goto(tab.page.url)
        fresh.settle()
        wrong += [
            f"{tab.page.url}: {was} is {now}"
            for was, now in zip(tab.widgets(), fresh.widgets(), strict=False)
            if was != now
        ]
        if len(tab.widgets()) != len(fresh.widgets()):
            wrong.append(f"{tab.page.url}: {len(tab.widgets())} widgets are {len(fresh.widgets())}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("path", "names"), [("curves", 6), ("compare", 3)])
def test_curves_and_their_legend_fit_a_phone(visit: Callable[..., Visit], lab: Ledgers, path: str, names: int) -> None:
    """Compare draws one arm of two studies at first."""
    tab = visit(viewport=PHONE)
    tab.open(path, study=lab.labels["many"])
    chart = tab.page.get_by_test_id("stVegaLiteChart").last
    room = chart.bounding_box()
    entries = [text.bounding_box() for text in chart.locator(".role-legend-label text").all()]
    plot = chart.locator(".role-frame path.background").first.bounding_box()
    assert room is not None
    assert plot is not None
    assert len(entries) == names
    assert max(entry["x"] + entry["width"] for entry in entries if entry) <= room["x"] + room["width"]
    assert plot["width"] >= room["width"] / 2
    assert plot["height"] >= 300, "the legend leaves the lines no room"
    titles = [text.bounding_box() for text in chart.locator(".role-axis-title text").all()]
    assert all(title["y"] >= room["y"] for title in titles if title), "a title is cut off"


def test_tab_reaches_all_that_a_mouse_reaches(visit: Callable[..., Visit], lab: Ledgers) -> None:
    tab = visit()
    tab.open(study=lab.labels["search"])
    wrong = []
    for path in tab.pages():
        tab.turn_to(path)
        wrong += [f"/{path}: {missed}" for missed in tab.missed_by_tab()]
    assert not wrong, "\n".join(wrong)


def test_keys_choose_another_study(visit: Callable[..., Visit], lab: Ledgers) -> None:
    tab = visit()
    tab.open(study=lab.labels["tuned"])
    tab.page.get_by_test_id("stSidebar").get_by_role("combobox", name="Study").focus()
    tab.page.keyboard.press("ControlOrMeta+a")
    tab.page.keyboard.type("2 ablation")
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("heading", name="ablation", level=1).wait_for()
    tab.page.wait_for_function("() => location.search.includes('study=2+ablation')")


@pytest.mark.parametrize("kind", RICH)
def test_every_download_delivers_its_file(visit: Callable[..., Visit], lab: Ledgers, tmp_path: Path, kind: str) -> None:
    """Each button is worked by the keyboard, those in popovers after Enter has opened them."""
    tab = visit()
    tab.open(study=lab.labels[kind])
    wrong, endings = [], set()
    for path in tab.pages():
        tab.turn_to(path)
        for number in range(-1, tab.page.locator(POPOVERS).count()):
            if number >= 0:
                tab.page.locator(POPOVERS).nth(number).focus()
                tab.page.keyboard.press("Enter")
                tab.page.wait_for_timeout(300)
            for button in tab.page.locator(DOWNLOADS).all():
                if not button.is_visible():
                    continue
                name = f"/{path}: {button.inner_text()!r}"
                button.focus()
                with tab.page.expect_download() as downloaded:
                    tab.page.keyboard.press("Enter")
                file = tmp_path / downloaded.value.suggested_filename
                downloaded.value.save_as(file)
                endings.add(file.suffix)
                if why := _empty(file):
                    wrong.append(f"{name}: {file.name}: {why}")
            if number >= 0:
                tab.page.keyboard.press("Escape")
    assert not wrong, "\n".join(wrong)
    assert endings >= {".csv", ".tex", ".png", ".svg"}


POPOVERS = "[data-testid=stMain] [data-testid=stPopover] button"
DOWNLOADS = "[data-testid=stDownloadButton] button"


def _empty(file: Path) -> str:
    """Why a file is not what its ending says; an empty string where it is."""
    content = file.read_bytes()
    if not content.strip():
        return "it is empty"
    if file.suffix == ".csv":
        rows = list(csv.reader(io.StringIO(content.decode())))
        return "" if len(rows) > 1 and len(set(map(len, rows))) == 1 else f"no table: {rows[:3]}"
    if file.suffix == ".tex":
        return "" if b"\\begin{tabular}" in content else "no tabular"
    if file.suffix == ".py":
        return "" if ast.parse(content).body else "no Python"
    return "" if content.startswith(BEGINNINGS[file.suffix]) else f"begins with {content[:20]!r}"


def test_the_wheel_over_a_chart_scrolls_the_page(visit: Callable[..., Visit], lab: Ledgers) -> None:
    tab = visit(viewport={"width": 1280, "height": 500})
    tab.open(study=lab.labels["ablation"])
    wrong = []
    for path in tab.pages():
        tab.turn_to(path)
        for number, chart in enumerate(tab.page.get_by_test_id("stVegaLiteChart").all()):
            chart.scroll_into_view_if_needed()
            tab.page.evaluate("() => { document.querySelector('[data-testid=stMain]').scrollTop -= 100 }")
            before = tab.look("scrolled")
            chart.hover(position={"x": 150, "y": 30})
            tab.page.mouse.wheel(0, 60)
            tab.page.wait_for_timeout(300)
            if tab.look("scrolled") <= before:
                wrong.append(f"/{path}: chart {number} holds the wheel")
            tab.page.mouse.move(5, 5)
    assert not wrong, "\n".join(wrong)


def test_the_dark_theme_is_readable(visit: Callable[..., Visit], lab: Ledgers, axe: str) -> None:
    tab = visit(color_scheme="dark")
    tab.open(study=lab.labels["tuned"])
    background = tab.page.get_by_test_id("stApp").evaluate("app => getComputedStyle(app).backgroundColor")
    assert max(map(int, background[4:-1].split(", "))) < 64
    wrong = []
    for path in tab.pages():
        tab.turn_to(path)
        wrong += [f"/{path}: {each}" for each in (*tab.violations(axe), *tab.pale())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ledger", ["empty", "trainings"])
def test_a_ledger_without_studies(visit: Callable[..., Visit], lab: Ledgers, axe: str, ledger: str) -> None:
    with served(getattr(lab, ledger)) as url:
        tab = visit(url)
        tab.open()
        for path in tab.pages():
            tab.turn_to(path)
            assert [*tab.boxes(), *tab.sideways(), *tab.violations(axe), *tab.complaints] == []
        tab.close()
