"""The views that readers saved: listed beside each page, saved by the form, and opened by their name in an address."""

from tests.support.ledgers import open_page, texts

from deltalab.store import Store
from deltalab.store.studies import saved_views


def test_what_a_page_shows_is_saved_by_name(store: Store, ablation: int) -> None:
    app = open_page("curves.py", study="1 ablation", arms="late", logx="true")
    [name] = [field for field in app.text_input if field.label == "Save this view as"]
    name.input("late *alone*")
    next(button for button in app.button if button.label == "Save").click().run()
    [view] = saved_views.saved(store)
    assert (view.name, view.page, view.study_id) == ("late *alone*", "curves", ablation)
    assert view.parameters == {"arms": ["late"], "logx": ["true"]}
    assert [link.proto.label for link in app.get("page_link")] == ["late \\*alone\\*"]
    [name] = [field for field in app.text_input if field.label == "Save this view as"]
    assert name.value == "", "the next view has a name of its own"


def test_a_view_is_renamed_and_deleted(store: Store, ablation: int) -> None:
    saved_views.save(store, "one", "curves", {}, ablation)
    app = open_page("arms.py")
    next(field for field in app.text_input if field.label == "Its new name").input("two")
    next(button for button in app.button if button.label == "Rename").click().run()
    assert [view.name for view in saved_views.saved(store)] == ["two"]
    next(button for button in app.button if button.label == "Delete this view").click().run()
    assert saved_views.saved(store) == []


def test_an_address_names_a_view(store: Store, ablation: int) -> None:
    saved_views.save(store, "one", "answer", {"arms": ["late"], "tables": ["true"]}, ablation)
    app = open_page(saved="one")
    assert "saved" not in app.query_params
    assert app.multiselect(key="arms").value == ["late"]
    assert list(app.dataframe[0].value["arm"]) == ["base", "late"]
    assert "unknown view 'two'" in texts(open_page(saved="two"))


def test_a_view_of_a_page_that_is_gone_says_so(store: Store, ablation: int) -> None:
    saved_views.save(store, "old", "heatmap", {}, ablation)
    assert "has no page" not in texts(open_page())
    assert "view 'old': this deltalab has no page 'heatmap'" in texts(open_page(saved="old"))
