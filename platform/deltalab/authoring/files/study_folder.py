"""The folder of the studies that come with deltalab, and how a study's name leads to its file."""

from pathlib import Path

from deltalab.errors import unknown

_PACKAGE = Path(__file__).parents[2]
FOLDER = _PACKAGE / "studies" if (_PACKAGE / "studies").is_dir() else _PACKAGE.parents[1] / "studies"
"""`deltalab/studies` in an installed package, `studies` in a checkout."""
SCHEMA = FOLDER / "study.schema.json"
"""The JSON schema of a study file."""


def shipped_studies() -> dict[str, Path]:
    """Returns a dictionary from the names of the shipped studies to their files."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def study_file(path_or_name: str | Path) -> Path:
    """Returns the file that a path or a study's name stands for.

    A name stands for the file with exactly this name if there is one, else for NAME.yaml in ./studies, else for a
    shipped study. A path is returned even if no file is there: the code that reads the file reports the error.

    Raises:
        InputError: No study has this name.

    Examples:
        >>> study_file("quickstart").name
        'quickstart.yaml'
    """
    path = Path(path_or_name)
    if not path.name or path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return path
    local = Path("studies", f"{path.name}.yaml")
    if local.is_file():
        return local
    studies = shipped_studies()
    if path.name not in studies:
        raise unknown("study", path_or_name, studies)
    return studies[path.name]
