"""Ten questions that a stranger asks of a study: each has its answer within two clicks of the first page."""

import re
from collections.abc import Callable

import pytest
from tests.browser.ledgers import Ledgers
from tests.browser.visit import Visit

pytestmark = pytest.mark.browser


@pytest.fixture
def first_page(visit: Callable[..., Visit], lab: Ledgers) -> Callable[[str], Visit]:
    """Opens the first page of a study of a kind."""

    def of(kind: str) -> Visit:
        tab = visit()
        tab.open(study=lab.labels[kind])
        return tab

    return of


def turn_to(tab: Visit, page: str) -> None:
    tab.page.get_by_role("link", name=page, exact=True).first.click()
    tab.settle()


def test_the_first_page_says_which_arm_is_best_and_by_how_much_and_at_what_cost(
    first_page: Callable[[str], Visit],
) -> None:
    said = first_page("tuned").text()
    assert re.search(r"^late beats the base on mqar by [\d.]+ accuracy \(p [\d.]+, \d+ seeds\)", said, re.MULTILINE)
    assert re.search(r"^[\d.]+ [CG]PU hours$", said, re.MULTILINE)
    assert "lr 0.01" in said


def test_a_seed_has_a_curve_of_its_own(first_page: Callable[[str], Visit]) -> None:
    tab = first_page("tuned")
    turn_to(tab, "Curves")
    tab.page.get_by_test_id("stMain").get_by_role("radio", name="2", exact=True).first.click(force=True)
    tab.page.wait_for_function("() => location.search.includes('seed=2')")


def test_two_studies_are_compared(first_page: Callable[[str], Visit]) -> None:
    tab = first_page("tuned")
    turn_to(tab, "Compare")
    assert {"Settings that differ", "Verdicts"} <= {*tab.page.get_by_test_id("stHeading").all_inner_texts()}


def test_the_table_is_there_as_latex(first_page: Callable[[str], Visit]) -> None:
    tab = first_page("tuned")
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="LaTeX").first.click()
    assert "\\toprule" in download.value.path().read_text()


def test_a_failed_study_leads_to_its_traceback(first_page: Callable[[str], Visit]) -> None:
    tab = first_page("failed")
    turn_to(tab, "Tracebacks")
    rows = tab.page.get_by_test_id("stDataFrame").bounding_box()
    assert rows is not None
    tab.page.mouse.click(rows["x"] + 17, rows["y"] + 47)  # the box of the first row, which is drawn on a canvas
    tab.page.get_by_text("RuntimeError: out of memory").first.wait_for()


def test_the_front_of_a_search_is_drawn(first_page: Callable[[str], Visit]) -> None:
    tab = first_page("search")
    turn_to(tab, "Search")
    assert "The front of" in tab.text()


def test_the_front_of_the_arms_is_with_the_exact_tables(first_page: Callable[[str], Visit]) -> None:
    tab = first_page("tuned")
    tab.page.get_by_test_id("stMain").get_by_text("Exact tables", exact=True).click()
    tab.settle()
    tab.page.get_by_text("Pareto front of").first.wait_for(state="attached")
