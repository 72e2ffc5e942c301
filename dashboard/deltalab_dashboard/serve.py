"""Runs `streamlit` with its arguments, and loads what the pages need while no browser has asked yet."""

import gc
import sys
from importlib import import_module
from threading import Thread

NEEDED = ("pandas", "altair", "scipy.special", "deltalab.study.reports.report", "deltalab_dashboard.cache")
"""Modules that every study's page imports; they take a second."""


def load() -> None:
    for name in NEEDED:
        import_module(name)
    gc.freeze()  # modules stay; looking for garbage among them takes a third of the time of reading a large study


if __name__ == "__main__":
    from streamlit.web.cli import main

    Thread(target=load, name="imports", daemon=True).start()
    sys.exit(main(prog_name="streamlit"))
