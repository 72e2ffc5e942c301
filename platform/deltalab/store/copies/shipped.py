"""The ledgers of the studies that come with deltalab, as one that can be read only."""

import hashlib
import lzma
import os
import tempfile
from pathlib import Path

from deltalab.store.copies.whole_ledger import Say, export_ledger, import_ledger
from deltalab.store.database import revisions
from deltalab.store.ledger import Store

SHIPPED = "shipped"
"""The name of this ledger in place of a path."""
_PACKAGE = Path(__file__).parents[2]
_LEDGERS = _PACKAGE / "ledgers" if (_PACKAGE / "ledgers").is_dir() else _PACKAGE.parents[1] / "benchmarks" / "ledgers"
"""`deltalab/ledgers` in an installed package, `benchmarks/ledgers` in a checkout."""


def shipped_ledgers() -> list[Path]:
    """Returns the packed ledgers, in the order in which they are joined."""
    return sorted(_LEDGERS.glob("*.db.xz"))


def shipped_ledger(say: Say) -> Path:
    """Returns the file of all shipped studies: $XDG_CACHE_HOME/deltalab/shipped-KEY.db, by default in ~/.cache.

    The first call makes it. KEY follows from the packed ledgers and the revision of the database.

    Args:
        say: Is called with a line before each packed ledger is joined.
    """
    packed = {file.name: file.read_bytes() for file in shipped_ledgers()}
    key = hashlib.sha256(revisions()[-1].encode() + b"".join(packed.values())).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deltalab"
    file = folder / f"{SHIPPED}-{key}.db"
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        joined = Path(made) / "joined.db"
        with Store.open(joined) as store:
            for name, content in packed.items():
                say(f"the shipped ledger {name.removesuffix('.db.xz')} is unpacked, once")
                _join(store, content, Path(made) / name.removesuffix(".xz"), say)
            whole = Path(made) / "whole.db"
            export_ledger(store, whole, say)
        whole.chmod(0o444)
        whole.replace(file)
    return file


def _join(store: Store, content: bytes, unpacked: Path, say: Say) -> None:
    unpacked.write_bytes(lzma.decompress(content))
    Store.upgrade(unpacked)
    with Store.open(unpacked, create=False) as source:
        import_ledger(store, source, say)
