"""The text that the task `text` reads by default. SOURCE.md says where it comes from and how it was made."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""The folder of train.txt, validation.txt and test.txt, in UTF-8. They are not compressed, to be mapped into memory."""

FINGERPRINT = "f7a468db511c9db7b6a901c927e1ae91f90736a9bac806273b6272783e9a11f0"
"""The `fingerprint` of these files; see `deltalab.tasks.corpus`."""
