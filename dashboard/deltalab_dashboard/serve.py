"""Runs `streamlit` with its arguments, and imports what the pages need before a browser asks for one."""

import gc
import sys
from importlib import import_module
from threading import Thread

NEEDED = ("pandas", "altair", "scipy.special", "deltalab.study.reports.report", "deltalab_dashboard.cache")
"""The modules that the page of every study imports, which takes a second."""


def load() -> None:
    """Imports the modules that pages need."""
    for name in NEEDED:
        import_module(name)
    # A search for garbage among these modules would take a third of the time that a large study takes to read.
    gc.freeze()


if __name__ == "__main__":
    from streamlit.web.cli import main

    Thread(target=load, name="imports", daemon=True).start()
    sys.exit(main(prog_name="streamlit"))
