"""Runs `streamlit` with the arguments of this script. Meanwhile, a thread imports the modules that pages need."""

import gc
import sys
from importlib import import_module
from threading import Thread

NEEDED = ("pandas", "altair", "scipy.special", "deltalab.study.reports.report", "deltalab_dashboard.cache")
"""The modules that every page of a study imports. Importing them takes a second."""


def load() -> None:
    """Imports the modules in `NEEDED`, so that the first page need not wait for them."""
    for name in NEEDED:
        import_module(name)
    # Without this, the garbage collector would search the modules' objects again and again while a large study is read.
    # These searches would take a third of the reading time.
    gc.freeze()


if __name__ == "__main__":
    from streamlit.web.cli import main

    Thread(target=load, name="imports", daemon=True).start()
    sys.exit(main(prog_name="streamlit"))
