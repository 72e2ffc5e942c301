"""Writes the tables of figures in docs/ from the JSON files in this folder.

    python benchmarks/tables.py            # writes the tables
    python benchmarks/tables.py --check    # exits 1 if a page differs from what would be written

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is a function in `page_tables/`.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from page_tables import calibration, kernels, stability, studies, trainings

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    DOCS / "performance.md",
    DOCS / "explanation" / "statistics.md",
    DOCS / "how-to" / "train.md",
    DOCS / "stability.md",
)
REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
TABLES: dict[str, Callable[[], list[str]]] = {
    make.__name__: make for subject in (kernels, trainings, studies, calibration, stability) for make in subject.TABLES
}


def written(page: str) -> str:
    """Returns the page with every table made anew."""
    return REGION.sub(lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    names = [name for text in pages.values() for _, name, _ in REGION.findall(text)]
    if sorted(names) != sorted(TABLES):
        sys.exit(f"the pages have the tables {sorted(names)}, and this script makes {sorted(TABLES)}")
    for page, text in pages.items():
        if not options.check:
            page.write_text(written(text), encoding="utf-8")
        elif written(text) != text:
            sys.exit(f"{page.name} differs from the JSON files: run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
