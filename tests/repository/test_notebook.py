"""The notebook of docs/ runs from its first cell to its last, here on a CPU."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial" / "own-rule.ipynb"

SHOW = """
def show(value):
    text = value._repr_html_() if hasattr(value, "_repr_html_") else value.to_json()
    print("shown:", type(value).__name__, len(text))
"""


def cells() -> list[str]:
    """The code of the notebook, but what installs deltalab."""
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in code if "install" not in cell["metadata"].get("tags", [])]


def shown(cell: str) -> str:
    """The cell as a script, which shows the value of its last line as a notebook does."""
    last = ast.parse(cell).body[-1]
    if not isinstance(last, ast.Expr) or isinstance(last.value, ast.Call):
        return cell
    lines = cell.splitlines()
    return "\n".join([*lines[: last.lineno - 1], f"show({ast.unparse(last.value)})"])


def test_the_notebook_holds_no_results_and_no_long_lines() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in notebook["cells"])
    assert max(len(line) for cell in cells() for line in cell.splitlines()) <= 120


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    script = "\n".join([SHOW, *map(shown, cells())])
    # From stdin, since a notebook's cells are no file that a process could import again.
    said = subprocess.run([sys.executable, "-"], input=script, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    kinds = [line.split()[1] for line in said.stdout.splitlines() if line.startswith("shown:")]
    assert kinds == ["Report", "LayerChart"]
    assert "FAILED" not in said.stdout
    assert (tmp_path / "deltalab.db").is_file()
