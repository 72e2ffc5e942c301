"""Studies found by their names: those in ./studies, and those that come with deltalab."""

from pathlib import Path

from deltalab.errors import unknown

_PACKAGE = Path(__file__).parents[1]
FOLDER = _PACKAGE / "studies" if (_PACKAGE / "studies").is_dir() else _PACKAGE.parents[1] / "studies"
"""`deltalab/studies` in an installed package, `studies` in a checkout."""
SCHEMA = FOLDER / "study.schema.json"
"""The JSON schema of a study file."""


def shipped_studies() -> dict[str, Path]:
    """The files of the shipped studies by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def study_file(given: str | Path) -> Path:
    """The file that a path or a study's name stands for: a file, else one in ./studies, else a shipped study.

    Raises `InputError` for a name that none of them has. A path need not exist: its reader says what is wrong.

    >>> study_file("quickstart").name
    'quickstart.yaml'
    """
    path = Path(given)
    if not path.name or path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return path
    own = Path("studies", f"{path.name}.yaml")
    if own.is_file():
        return own
    studies = shipped_studies()
    if path.name not in studies:
        raise unknown("study", given, studies)
    return studies[path.name]
