"""Runs `streamlit` with its arguments, and loads what the pages need while no browser has asked yet."""

import sys
from importlib import import_module
from threading import Thread

NEEDED = ("pandas", "altair", "deltalab.study.report", "deltalab_dashboard.recorded")
"""Modules that every study's page imports; they take a second."""


def _load() -> None:
    for name in NEEDED:
        import_module(name)


if __name__ == "__main__":
    from streamlit.web.cli import main

    Thread(target=_load, name="imports", daemon=True).start()
    sys.exit(main(prog_name="streamlit"))
