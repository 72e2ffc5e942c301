"""What goes with no task of images is refused before anything trains."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deltalab.errors import InputError
from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study

STUDY: dict[str, Any] = {
    "name": "pictures",
    "task": {"digit_patches": {}},
    "base": {
        "rule": "comba",
        "model": {"d_model": 16, "layers": 1, "heads": 2, "chunk_size": 16},
        "train": {"steps": 20, "batch_size": 8, "lr": 0.01},
    },
    "seeds": 6,
}
OBJECTIVES = {"trials": 4, "finalists": 2, "train.lr": {"log_uniform": [1e-3, 1e-2]}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"search": {**OBJECTIVES, "objectives": ["accuracy", "decode_us"]}},
            "decode_us times a token, and task 'digit_patches' has images",
        ),
        ({"engine": "torchtitan"}, "torchtitan trains language models"),
        ({"engine": "accelerate"}, "accelerate trains language models"),
        ({"task": {"digit_patches": {"patch": 3}}}, "'patch' must divide the 8 pixels of an image, not 3"),
    ],
)
def test_a_plan_refuses_in_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = tmp_path / "pictures.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    make_plan(load_study(file))
    file.write_text(yaml.safe_dump({**STUDY, **changes}))
    with pytest.raises(InputError) as raised:
        make_plan(load_study(file))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
