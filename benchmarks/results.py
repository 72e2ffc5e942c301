"""Makes a page of each study in the ledgers of this folder, and an index with the sentence of each.

    python benchmarks/results.py site/results

A page is what `deltalab study report STUDY --html` prints.
"""

import argparse
import lzma
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import deltalab
from deltalab.store import Store
from deltalab.study.reports.html.page import PAGE
from deltalab.study.reports.report import report
from deltalab.study.reports.sentence import sentence

HERE = Path(__file__).parent


def pages(ledger: Path, folder: Path) -> Iterator[str]:
    """Writes the page of each study of a ledger, and yields its entry of the index, the newest first.

    Args:
        ledger: A SQLite ledger, packed by xz.
        folder: Where to write the pages.
    """
    name = ledger.name.removesuffix(".db.xz")
    with tempfile.TemporaryDirectory() as unpacked:
        db = Path(unpacked) / "ledger.db"
        db.write_bytes(lzma.decompress(ledger.read_bytes()))
        Store.upgrade(db)
        with Store.open(db, create=False) as store:
            for study in sorted(store.studies(), key=lambda study: -study.id):
                print(f"{ledger.name}: {study.address}, id {study.id}", file=sys.stderr, flush=True)
                found = report(store, study.id)
                file = f"{name}-{study.id}.html"
                (folder / file).write_text(found.to_html(), encoding="utf-8")
                about = f"<br>{escape(study.spec['description'])}" if study.spec.get("description") else ""
                yield (
                    f'<h2><a href="{escape(file)}">{escape(study.address)}</a></h2><p>{escape(sentence(found))}</p>'
                    f"<p><small>{study.created_at:%Y-%m-%d}, {escape(study.state)}{about}</small></p>"
                )


def index(entries: Sequence[str]) -> str:
    """Returns the page that leads to all others."""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>What the studies found</title><style>{PAGE}</style></head><body>",
            f"<h1>What the studies found, as deltalab {escape(deltalab.__version__)} reports it</h1>",
            "<p>Each answer is made anew from the study's ledger, which the repository has in benchmarks. Its page has "
            "the figures, the charts and the notes that belong to them.</p>",
            *entries,
            "</body></html>",
        ]
    )


def main(words: Sequence[str] | None = None) -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the pages")
    parser.add_argument("--ledgers", type=Path, nargs="+", default=sorted(HERE.glob("*.db.xz")), metavar="FILE")
    given = parser.parse_args(words)
    for file in given.ledgers:
        if not file.is_file():
            parser.error(f"--ledgers: {file} does not exist")
    given.folder.mkdir(parents=True, exist_ok=True)
    entries = [entry for ledger in given.ledgers for entry in pages(ledger, given.folder)]
    (given.folder / "index.html").write_text(index(entries), encoding="utf-8")
    print(f"{given.folder / 'index.html'}: {len(entries)} studies")


if __name__ == "__main__":
    main()
