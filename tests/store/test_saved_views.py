"""Views that readers save by name: kept, renamed, removed, and gone with their study."""

import pytest
from tests.support.records import begin

from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.store.copies import whole_ledger
from deltalab.store.studies import saved_views, shelf

VIEW = {"arms": ["base", "other"], "logx": ["true"]}


def names(store: Store) -> list[str]:
    return [view.name for view in saved_views.saved(store)]


def test_a_view_is_kept_renamed_and_removed(store: Store) -> None:
    study = begin(store)
    saved_views.save(store, "  two arms ", "curves", VIEW, study)
    saved_views.save(store, "All studies", "studies", {}, None)
    kept = saved_views.saved(store)
    assert [(view.name, view.page, view.parameters, view.study_id) for view in kept] == [
        ("All studies", "studies", {}, None),
        ("two arms", "curves", VIEW, study),
    ]
    saved_views.rename(store, "two arms", "one")
    saved_views.rename(store, "one", "one")
    assert names(store) == ["All studies", "one"]
    saved_views.delete(store, "one")
    assert names(store) == ["All studies"]


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 81])
def test_a_name_that_is_none_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InputError, match="a name has 1 to 80 letters and no line break"):
        saved_views.save(store, name, "curves", {}, None)
    assert names(store) == []


def test_a_name_that_is_taken_or_unknown_is_one_line(store: Store) -> None:
    saved_views.save(store, "one", "curves", {}, None)
    saved_views.save(store, "two", "curves", {}, None)
    with pytest.raises(InputError, match="view 'one': exists; choose another name"):
        saved_views.save(store, "one ", "arms", {}, None)
    with pytest.raises(InputError, match="view 'two': exists"):
        saved_views.rename(store, "one", "two")
    for change in (lambda: saved_views.delete(store, "onee"), lambda: saved_views.rename(store, "onee", "x")):
        with pytest.raises(InputError, match=r"unknown view 'onee'.*one") as caught:
            change()
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"there is no study 99"):
        saved_views.save(store, "lost", "curves", {}, 99)
    assert names(store) == ["one", "two"]


def test_a_view_comes_and_goes_with_its_study(store: Store) -> None:
    study = begin(store)
    saved_views.save(store, "one", "curves", VIEW, study)
    store.finish_study(study, "done")
    shelf.delete(store, study)
    assert names(store) == []
    shelf.restore(store, study)
    assert names(store) == ["one"]
    shelf.delete(store, study)
    whole_ledger.vacuum(store)
    saved_views.save(store, "one", "studies", {}, None)
    assert names(store) == ["one"], "the name is free again"
