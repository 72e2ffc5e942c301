"""Where things stand in the repository, whatever folder a test is in."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
STUDIES, BENCHMARKS, DOCS = ROOT / "studies", ROOT / "benchmarks", ROOT / "docs"
PLANTED, UNUSUAL = TESTS / "authoring" / "planted", TESTS / "authoring" / "unusual"
"""Rule files with one mistake each, and rule files that are right and look wrong."""
