"""Two thousand study files that nobody should write: each is planned, or refused in one line."""

import random
from pathlib import Path

import pytest
from tests.support.hostile import hostile
from tests.support.watched import Watched

FILES = 2000


@pytest.mark.chaos
def test_hostile_files_are_planned_or_refused_in_one_line(tmp_path: Path) -> None:
    watched, wrong = Watched(tmp_path), []
    try:
        for number in range(FILES):
            if why := watched.plan(hostile(random.Random(f"chaos/{number}"))).wrong:
                wrong.append(f"hostile(Random('chaos/{number}')): {why}")
    finally:
        watched.close()
    assert not wrong, "\n".join(wrong)
