"""The benchmark of decoding, on a CPU at toy size: its rows, and that both ways write the same text."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.folders import BENCHMARKS


def test_rows_of_a_toy(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    command = [sys.executable, str(BENCHMARKS / "decode.py"), "--size", "toy", "--model", "comba", "--batch", "2"]
    subprocess.run([*command, "--prompt", "8", "--new", "5", "--out", str(out)], check=True, capture_output=True)
    graphs, without = json.loads(out.read_text())["rows"]
    assert (graphs["by"], without["by"]) == ("deltalab", "deltalab without graphs")
    assert graphs["text"] == without["text"]
    assert len(graphs["text"]) == 5
    assert not graphs["graph"], "a CPU has none"
    assert (graphs["batch"], graphs["prompt"], graphs["new"]) == (2, 8, 5)
