"""The studies that come with deltalab, as a ledger that commands read by its name."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from tests.support.command import Platform
from tests.support.folders import ROOT
from tests.support.shipped import PROXIES, only_proxies

from deltalab.store import Store
from deltalab.store.copies import shipped


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return only_proxies(tmp_path, monkeypatch)


def test_a_report_names_the_shipped_ledger(packed: Path, platform: Platform) -> None:
    said = platform("study", "report", "proxies", "--db", "shipped", "--json")
    assert said.code == 0
    assert '"attention"' in said.out
    assert "proxies is unpacked" in said.err
    assert "unpacked" not in platform("study", "list", "--db", "shipped").err, "only once"


def test_nothing_is_written_into_it(packed: Path, platform: Platform) -> None:
    said = platform("study", "delete", "proxies", "--yes", "--db", "shipped")
    assert said.code == 2
    assert said.err.count("\n") == 1 + ("unpacked" in said.err)
    assert "readonly" in said.err
    with Store.open(shipped.shipped_ledger(print), create=False) as store:
        assert [study.address for study in store.studies()] == ["proxies"]


def test_shipped_studies_are_listed_by_words(platform: Platform) -> None:
    """In names, descriptions and names of arms."""
    found = [row["name"] for row in json.loads(platform("study", "list", "--shipped", "KDA", "--json").out)]
    assert "found_rules" in found
    assert "quickstart" not in found
    assert [row["name"] for row in json.loads(platform("study", "list", "--shipped", "tiny recall", "--json").out)] == [
        "quickstart"
    ]
    refused = platform("study", "list", "--shipped", "--tag", "best")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_ledgers_are_joined_and_another_one_is_another_file(packed: Path) -> None:
    said: list[str] = []
    first = shipped.shipped_ledger(said.append)
    assert shipped.shipped_ledger(said.append) == first
    assert len([line for line in said if "unpacked" in line]) == 1
    shutil.copy(PROXIES.with_name("pretrain_h200.db.xz"), packed)
    second = shipped.shipped_ledger(said.append)
    assert second != first
    with Store.open(second, create=False) as store:
        assert {study.name for study in store.studies()} == {"pretrain", "proxies"}
    assert not list(second.parent.glob("tmp*")), "what was unpacked is gone"


def test_a_wheel_holds_the_ledgers() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert built["wheel"]["force-include"]["benchmarks/ledgers"] == "deltalab/ledgers"
    assert PROXIES in shipped.shipped_ledgers()
