"""The examples in docstrings are true. (pytest's own collector would shadow the standard library's `platform`.)"""

import doctest
import importlib
import pkgutil

import pytest

import deltalab
import deltalab_dashboard
import deltalab_rules

ELSEWHERE = ("migrations", "modeling_", "deltalab_dashboard.app", "deltalab_train.titan")
"""Modules that are loaded by another program: Alembic, transformers, Streamlit, torchtitan."""


def _modules():
    for package in (deltalab, deltalab_rules, deltalab_dashboard):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(part in info.name for part in ELSEWHERE):
                yield info.name


@pytest.mark.parametrize("name", sorted(_modules()))
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
