"""The public page of results: a page of each shipped study, and an index that says what each found."""

import html
import runpy
from pathlib import Path

import pytest
from tests.support.folders import ROOT
from tests.support.shipped import only_proxies

from deltalab.store import Store
from deltalab.store.copies.shipped import shipped_ledger
from deltalab.study.reports.report import report
from deltalab.study.reports.sentence import sentence


def test_the_index_leads_to_the_report_of_each_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_proxies(tmp_path, monkeypatch)
    runpy.run_path(str(ROOT / "benchmarks" / "results.py"))["main"]([str(tmp_path / "results")])
    index = (tmp_path / "results" / "index.html").read_text(encoding="utf-8")
    with Store.open(shipped_ledger(print), create=False) as store:
        studies = store.studies()
        for study in studies:
            found = report(store, study.id)
            file = f"proxies-{study.id}.html"
            assert f'<a href="{file}">{html.escape(study.address)}</a>' in index
            assert html.escape(sentence(found)) in index
            assert f"deltalab study report {study.id} --db shipped" in index
            assert (tmp_path / "results" / file).read_text(encoding="utf-8") == found.to_html()
    assert index.count("<h2>") == len(studies) == len(list((tmp_path / "results").glob("proxies-*.html")))
