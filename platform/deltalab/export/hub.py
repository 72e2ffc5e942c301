"""Puts an exported folder on the Hugging Face Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltalab import progress
from deltalab.errors import InputError, NotInstalled, one_line

OF_THE_HUB = {".gitattributes"}
"""The files that the Hub itself puts into a new repository."""


def require_access(repository: str) -> None:
    """Asks the Hub for the token's owner, so that a long export does not end before a closed door.

    Args:
        repository: USER/NAME.

    Raises:
        InputError: The name has another form, there is no token, or the Hub refuses it or is not reached.
    """
    try:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ImportError:
        raise NotInstalled("needs huggingface_hub", "'deltalab[hf]'", where="--push") from None
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(f"{repository}: {error}", where="--push", key=repository) from None
    if repository.count("/") != 1:
        raise InputError(f"'{repository}' is no name on the Hub: give USER/NAME", where="--push", key=repository)
    if get_token() is None:
        raise InputError("the Hub asks for a token", where="--push", mend="hf auth login, or set HF_TOKEN")
    with _refusals("--push"):
        HfApi().whoami()


def push(directory: Path, repository: str) -> str:
    """Makes the files of a repository those of an exported folder, in one commit.

    A repository that does not exist is made, and is private.

    Args:
        directory: The exported folder.
        repository: USER/NAME.

    Returns:
        The address of the repository.

    Raises:
        InputError: The repository has files that the folder lacks, or the Hub refuses something or is not reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if progress.is_json():
        disable_progress_bars()
    hub = HfApi()
    mend = f"the folder is whole; hf upload {repository} {directory} puts it there"
    with _refusals(f"--push {repository}", mend):
        address = str(hub.create_repo(repository, private=True, exist_ok=True))
        written = {file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()}
        others = sorted(set(hub.list_repo_files(repository)) - written - OF_THE_HUB)
    if others:
        # Weights of another model beside this one's configuration would load without a word.
        raise InputError(
            f"the repository has files that {directory} lacks: {', '.join(others[:5])}",
            where=f"--push {repository}",
            mend=f"name a new one, or delete them there; {mend}",
        )
    with _refusals(f"--push {repository}", mend):
        hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="Export of deltalab")
    return address


@contextmanager
def _refusals(where: str, mend: str | None = None) -> Iterator[None]:
    """Turns what the Hub's client raises into one line, without the token, which an answer may quote."""
    from httpx import HTTPError
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        answered = isinstance(error, HfHubHTTPError)
        text = f"{constants.ENDPOINT} {'refuses' if answered else 'cannot be used'}: {error}"
        raise InputError(one_line(text.replace(get_token() or "\0", "***"), 300), where=where, mend=mend) from None
