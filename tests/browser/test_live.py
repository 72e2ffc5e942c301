"""The dashboard in a real browser: what a stranger sees after `deltalab dashboard`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab_dashboard.picture import WIDTH, served, take

pytestmark = pytest.mark.browser
ARMS = ["base", "without_output_gate", "alpha_not_near_1"]
PATIENCE_MILLISECONDS = 120_000  # on a busy machine, torch alone takes 20 s to load


def record(store: Store, study: int, arm: str, shift: float) -> None:
    runs = [
        RunRecord(seed, metrics=[("validation", "accuracy", step, 0.5 + 0.01 * seed + shift) for step in (1, 2)])
        for seed in range(1, 9)
    ]
    for run in runs:
        run.metrics.append(("test", "accuracy", 2, 0.5 + 0.01 * run.seed + shift))
    rule = RuleRecord("comba", "hash", "source")
    trial = TrialRecord(arm, "mqar", 1, "confirm", {}, "done", 1e9, 1e9, 1.0, rule, runs=runs)
    store.record_trial(study, arm, trial, 0, {})


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Store, int]]:
    with Store.open(tmp_path / "lab.db") as store:
        tasks = {"mqar": {"metric": "accuracy", "maximize": True, "chance": 0.1, "version": 1}}
        arms = [ArmRecord(arm, arm == "base", {} if arm == "base" else {arm: [0, 1]}, {}) for arm in ARMS]
        study = store.begin_study("ablation", None, "id", {"seeds": 8}, arms, {"tasks": tasks})
        record(store, study, "base", 0.0)
        record(store, study, "without_output_gate", -0.2)
        yield store, study


def test_a_study_shows_its_arms_as_they_come(running: tuple[Store, int], chromium: Browser, tmp_path: Path) -> None:
    store, study = running
    asked: list[str] = []
    with served(tmp_path / "lab.db") as url, chromium.new_page(viewport={"width": WIDTH, "height": 1000}) as page:
        expect.set_options(timeout=PATIENCE_MILLISECONDS)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        answer = page.get_by_test_id("stMain")
        expect(answer).to_contain_text("▼ 1 worse")
        expect(answer).not_to_contain_text("1 better")
        expect(page.get_by_role("table").locator(".interval")).to_have_count(1)
        picker = page.get_by_test_id("stSidebar").get_by_test_id("stSelectbox")
        expect(picker.locator("svg")).to_have_count(1)  # the arrow; an x beside it would leave no study chosen

        record(store, study, "alpha_not_near_1", 0.1)  # the page looks for it by itself
        expect(answer).to_contain_text("▲ 1 better")
        store.finish_study(study, "done")
        expect(page.get_by_test_id("stMain").get_by_text("done", exact=True)).to_be_visible()

        page.get_by_role("link", name="Curves").click()
        expect(page.get_by_role("heading", name="Learning curves")).to_be_visible()
        page.wait_for_function("location.href.endsWith('/curves?study=1+ablation')")
        page.reload()
        expect(page.get_by_test_id("stVegaLiteChart").locator("canvas, svg").first).to_be_visible()
    assert [address for address in asked if not address.startswith((url, "data:", "blob:"))] == []


def test_the_picture_of_a_study(running: tuple[Store, int], chromium: Browser, tmp_path: Path) -> None:
    take(chromium, tmp_path / "lab.db", "ablation", tmp_path / "study.png")
    header = (tmp_path / "study.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = int.from_bytes(header[16:20]), int.from_bytes(header[20:24])
    assert width == WIDTH
    assert 300 < height < 1000  # down to the forest and no further
