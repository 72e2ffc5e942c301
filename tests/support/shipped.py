"""The shipped ledger, made of a single small one."""

import shutil
from pathlib import Path

import pytest

from deltalab.store.copies import shipped

PROXIES = shipped.shipped_ledgers()[-1].with_name("proxies.db.xz")


def only_proxies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the ledger of `proxies` alone in place of all, and the cache into the folder. Returns where it is packed."""
    packed = folder / "ledgers"
    packed.mkdir()
    shutil.copy(PROXIES, packed)
    monkeypatch.setattr(shipped, "_LEDGERS", packed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return packed
