"""Makes a page of each study that comes along, and an index: the picture, the sentence and the study of each.

    python benchmarks/results.py site/results

A page is what `deltalab study report STUDY --html` prints.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import yaml

import deltalab
from deltalab.store import Store
from deltalab.store.copies.shipped import shipped_ledger
from deltalab.study.reports.html.forest import LEGEND, STYLE, forest
from deltalab.study.reports.html.page import PAGE
from deltalab.study.reports.report import report
from deltalab.study.reports.sentence import sentence


def pages(db: Path, folder: Path) -> Iterator[str]:
    """Writes the page of each study of a ledger, and yields its entry of the index, the newest first.

    Args:
        db: A ledger.
        folder: Where to write the pages.
    """
    with Store.open(db, create=False) as store:
        for study in sorted(store.studies(), key=lambda study: study.created_at, reverse=True):
            print(f"{study.address}, id {study.id}", file=sys.stderr, flush=True)
            found = report(store, study.id)
            file = f"{study.name}-{study.id}.html"
            (folder / file).write_text(found.to_html(), encoding="utf-8")
            about = f"<br>{escape(study.spec['description'])}" if study.spec.get("description") else ""
            spec = yaml.safe_dump(study.spec, sort_keys=False, allow_unicode=True)
            yield (
                f'<h2><a href="{escape(file)}">{escape(study.address)}</a></h2>'
                f'<p class="answer">{escape(sentence(found))}</p>{forest(found)}'
                f"<p><small>{study.created_at:%Y-%m-%d}, {escape(study.state)}{about}<br>"
                f"<code>deltalab study report {study.id} --db shipped</code></small></p>"
                f"<details><summary>As recorded</summary><pre>{escape(spec)}</pre></details>"
            )


def index(entries: Sequence[str]) -> str:
    """Returns the page that leads to all others."""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>What the studies found</title><style>{PAGE}{STYLE}</style></head><body>",
            f"<h1>What the studies found, as deltalab {escape(deltalab.__version__)} reports it</h1>",
            "<p>Each answer is made anew from the study's ledger, which comes with deltalab. Its page has "
            "the figures, the charts and the notes that belong to them.</p>",
            f"<p><small>{escape(LEGEND)}</small></p>",
            *entries,
            "</body></html>",
        ]
    )


def main(words: Sequence[str] | None = None) -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the pages")
    given = parser.parse_args(words)
    given.folder.mkdir(parents=True, exist_ok=True)
    entries = [*pages(shipped_ledger(print), given.folder)]
    (given.folder / "index.html").write_text(index(entries), encoding="utf-8")
    print(f"{given.folder / 'index.html'}: {len(entries)} studies")


if __name__ == "__main__":
    main()
