"""The public page of results: a page of each study in a shipped ledger, and an index that says what each found."""

import html
import lzma
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.support.folders import ROOT

from deltalab.store import Store
from deltalab.study.reports.report import report
from deltalab.study.reports.sentence import sentence

LEDGER = ROOT / "benchmarks" / "proxies.db.xz"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "results.py"))


def test_the_index_leads_to_the_report_of_each_study(results: dict[str, Any], tmp_path: Path) -> None:
    results["main"]([str(tmp_path / "results"), "--ledgers", str(LEDGER)])
    (tmp_path / "ledger.db").write_bytes(lzma.decompress(LEDGER.read_bytes()))
    Store.upgrade(tmp_path / "ledger.db")
    index = (tmp_path / "results" / "index.html").read_text(encoding="utf-8")
    with Store.open(tmp_path / "ledger.db", create=False) as store:
        studies = store.studies()
        for study in studies:
            found = report(store, study.id)
            file = f"proxies-{study.id}.html"
            assert f'<a href="{file}">{html.escape(study.address)}</a>' in index
            assert html.escape(sentence(found)) in index
            assert (tmp_path / "results" / file).read_text(encoding="utf-8") == found.to_html()
    assert index.count("<h2>") == len(studies) == len(list((tmp_path / "results").glob("proxies-*.html")))


def test_a_ledger_that_is_not_there_is_told_before_any_page(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        results["main"]([str(tmp_path / "results"), "--ledgers", str(LEDGER), str(tmp_path / "none.db.xz")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"--ledgers: {tmp_path / 'none.db.xz'} does not exist\n")
    assert not (tmp_path / "results").exists()
