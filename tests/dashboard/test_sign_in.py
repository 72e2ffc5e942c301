"""A dashboard with a token shows nothing of a study, and deletes none, before the reader has given the token."""

import logging
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from tests.support.ledgers import open_page, texts

from deltalab.store import Store
from deltalab.store.studies import shelf
from deltalab_dashboard import sign_in
from deltalab_dashboard.app import VIEWS

TOKEN = "t0ken-of-the-té st"


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "dashboard-token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv(sign_in.TOKEN_FILE, str(file))
    return file


def give(app: AppTest, token: str) -> None:
    app.text_input[0].input(token)
    app.button[0].click().run()
    assert not app.exception


@pytest.mark.parametrize("page", [view.name for views in VIEWS.values() for view in views])
def test_no_page_shows_a_study_before_the_token_is_given(ablation: int, token_file: Path, page: str) -> None:
    app = open_page(f"{page}.py", study="1 ablation")
    assert [one.label for one in app.text_input] == ["Token"]
    assert len(app.button) == 1
    assert not app.sidebar
    assert "ablation" not in texts(app)
    assert not app.dataframe


def test_the_token_opens_the_page_of_the_address_for_this_session_alone(
    ablation: int, token_file: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    app = open_page("studies.py", find="ablation")
    for wrong in ("", "t0ken", TOKEN + "x", TOKEN[:-1], "é" * 20):
        give(app, wrong)
        assert "This is not the token." in texts(app)
        assert not app.dataframe
    give(app, f" {TOKEN} ")
    assert list(app.dataframe[0].value["study"]) == ["ablation"]
    assert not open_page("studies.py").dataframe
    assert TOKEN not in caplog.text + "".join(capfd.readouterr()) + str(app.query_params)


def test_a_study_is_deleted_only_with_the_token_given_again(store: Store, ablation: int, token_file: Path) -> None:
    app = open_page("studies.py")
    give(app, TOKEN)
    app.session_state[f"rows {ablation}"] = {"selection": {"rows": [0], "columns": [], "cells": []}}
    app.run()
    for given, left in (("wrong", 1), (TOKEN, 0)):
        [field] = [field for field in app.text_input if field.label == "Token"]
        field.input(given)
        [button] = [button for button in app.button if button.label == "Delete this study"]
        button.click().run()
        assert not app.exception
        assert len(shelf.listed(store)) == left


@pytest.mark.parametrize("content", [None, ""])
def test_without_a_token_in_its_file_nobody_gets_in(ablation: int, token_file: Path, content: str | None) -> None:
    app = open_page("studies.py")
    if content is None:
        token_file.unlink()
    else:
        token_file.write_text(content)
    give(app, "")
    assert not app.dataframe
    assert "cannot be read" in texts(app) or "This is not the token." in texts(app)
