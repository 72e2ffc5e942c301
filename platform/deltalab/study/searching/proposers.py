"""Asks a program for candidates of a search, and refuses what the search cannot train.

The program reads a request as JSON from stdin, and prints an answer as JSON:

    {"proposals": [{"values": {"rule.decay": "scalar", ...}}, {"source": "...a rule's file...", "values": {...}}]}

A proposal is a point of the space, or a rule that the space does not have, with values for the settings beside the
rule. The program runs in a process of its own, in the folder of the command, for a limited time. The checks of its
rules run in a process and a folder of their own (`deltalab.authoring.quarantine`). Whatever they do costs the search a
place, which is then drawn at random.
"""

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from deltalab.authoring.quarantine import quarantined
from deltalab.errors import InputError, one_line, unknown
from deltalab.registry import add_plugin, list_rules
from deltalab.study.searching import evolution
from deltalab.study.specs.sections.budget import EVOLUTION, Searching

SECONDS = 600.0
"""How long a program may think about one request."""
MOST_BYTES = 10 * 2**20
"""The longest answer of a program."""
WANTED = 8
"""How many proposals one request asks a program for. `evolution` breeds one at a time, which knows all results."""
MOST_FAILURES = 3
"""After so many requests in a row without a proposal that can train, the program is asked no more."""

FUNCTION = re.compile(r"[\w.]+:\w+")
"""A program that is a function, `module:name`."""

_log = logging.getLogger("deltalab")


class Proposer:
    """The program that proposes candidates of one search."""

    def __init__(self, space: Searching, about: Mapping[str, Any], folder: Path) -> None:
        """Begins without a proposal, with the rules that the program proposed before a kill.

        Args:
            space: The space of the search; `space.proposals` says what is asked.
            about: What every request tells: the study's name, its objectives and its base.
            folder: Where the files of proposed rules stay.
        """
        self._space, self._about, self._folder = space, about, folder
        self._waiting: deque[Any] = deque()
        self._failures = 0
        for file in sorted(folder.glob("*.py")):
            add_plugin(file)

    def next(
        self, number: int, front: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Returns the next proposal that can be a candidate; None if there is none now.

        Args:
            number: The candidate's number, which seeds `evolution`. It breeds none before the first result.
            front: The candidates that no other beats: `values`, `scores` and, of a proposed rule, its `source`.
            tried: The values of all candidates.
        """
        if self._space.proposals == EVOLUTION and not front:
            return None
        if not self._waiting and self._failures < MOST_FAILURES:
            self._waiting += self._asked(number, front, tried)
        while self._waiting:
            try:
                values = self._candidate(self._waiting.popleft())
            except InputError as error:
                _log.warning("search.proposals: a proposal is refused: %s", one_line(str(error), 500))
            else:
                self._failures = 0
                return values
        self._failures += 1
        if self._failures == MOST_FAILURES:
            _log.warning("search.proposals: %d requests gave no candidate: no more are made", MOST_FAILURES)
        return None

    def _asked(self, number: int, front: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Asks for proposals; [] with a warning if there is no answer."""
        breeds = self._space.proposals == EVOLUTION
        request = {
            **self._about,
            "space": {path: knob.model_dump(mode="json") for path, knob in self._space.searched.items()},
            "front": front,
            "tried": tried,
            "wanted": 1 if breeds else WANTED,
            "seed": f"{self._about['study']}/{number}",
        }
        assert self._space.proposals is not None
        try:
            if breeds:
                answer: Any = evolution.propose(request)
            else:
                answer = json.loads(_printed(self._space.proposals, json.dumps(request)))
        except (InputError, ValueError) as error:
            _log.warning("search.proposals: no answer: %s", one_line(str(error), 500))
            return []
        proposals = answer.get("proposals") if isinstance(answer, dict) else None
        if not isinstance(proposals, list):
            _log.warning(
                'search.proposals: the answer must be {"proposals": [...]}, not %s', one_line(str(answer), 100)
            )
            return []
        return proposals[:WANTED]

    def _candidate(self, proposal: Any) -> dict[str, Any]:
        """The candidate of a proposal. Raises `InputError` if the search cannot train it."""
        if not isinstance(proposal, dict):
            raise InputError(f"must be a mapping, not {proposal!r:.100}")
        for key in proposal:
            if key not in ("values", "source"):
                raise unknown("key", key, ("values", "source"))
        values, source = proposal.get("values", {}), proposal.get("source")
        if not isinstance(values, dict):
            raise InputError(f"values must be a mapping, not {values!r:.100}")
        for path in values:
            if path not in self._space.searched:
                raise unknown("setting", path, self._space.searched)
        if source is None:
            if self._space.drawn(values) is None:
                raise InputError(f"{json.dumps(values):.300} is no point of the space")
            return values
        if not isinstance(source, str):
            raise InputError(f"source must be the text of a rule's file, not {source!r:.100}")
        return self._of_rule(source, values)

    def _of_rule(self, source: str, values: dict[str, Any]) -> dict[str, Any]:
        """The candidate of a rule that passes its checks, with values of the settings beside it."""
        for path, value in values.items():
            knob = self._space.knobs.get(path)
            if path.partition(".")[0] == "rule" or knob is None:
                raise InputError(
                    f"values.{path}: a proposed rule has no setting of the space but single ones beside it"
                )
            if not knob.holds(value):
                raise InputError(f"values.{path} must be one of {knob.said}, not {value!r:.100}")
        self._folder.mkdir(parents=True, exist_ok=True)
        text = source.encode("utf-8", "replace")
        file = self._folder / f"{hashlib.sha256(text).hexdigest()[:16]}.py"
        proposed = file.with_suffix(".proposed")
        proposed.write_bytes(text)
        with tempfile.TemporaryDirectory(prefix="deltalab-proposal-") as folder:
            apart = Path(folder) / file.name
            apart.write_bytes(text)
            found = quarantined(apart)
        if found.rule is None or found.problem:
            raise InputError(f"its rule ({proposed}) {found.problem}")
        if not file.exists() and found.rule in list_rules():
            raise InputError(f"its rule ({proposed}): there is a rule '{found.rule}' already: give it another name")
        proposed.replace(file)
        add_plugin(file)
        return {"rule": found.rule, **values}


def _printed(command: str, request: str) -> str:
    """Runs a program in a process group of its own, and returns what it printed."""
    words = shlex.split(command)
    if FUNCTION.fullmatch(command):
        words = [sys.executable, "-P", "-m", __spec__.name, command]
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory(prefix="deltalab-propose-", ignore_cleanup_errors=True) as folder:
        asked, told, errors = (Path(folder) / name for name in ("request.json", "answer.json", "errors.txt"))
        asked.write_text(request, encoding="utf-8")
        with asked.open("rb") as reads, told.open("wb") as writes, errors.open("wb") as complains:
            try:
                process = subprocess.Popen(
                    words,
                    stdin=reads,
                    stdout=writes,
                    stderr=complains,
                    start_new_session=True,
                    preexec_fn=_limited,
                    env={**os.environ, "PYTHONPATH": path},
                )
            except OSError as error:
                raise InputError(f"{words[0]}: {error.strerror}") from None
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                raise InputError(f"{command}: did not end within {SECONDS:g} s") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            lines = errors.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
            raise InputError(f"{command}: ended with exit code {code}{last}")
        return told.read_text(encoding="utf-8", errors="replace")


def _limited() -> None:
    """Bounds the length of every file that the program writes, its answer among them."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))


def own_file(program: str) -> Path | None:
    """Returns the file of the working folder that runs first for a program `module:name`; None if there is none."""
    if not FUNCTION.fullmatch(program):
        return None
    top = Path.cwd() / program.partition(":")[0].partition(".")[0]
    return next((file for file in (top.with_suffix(".py"), top / "__init__.py") if file.is_file()), None)


def _imported(module: str) -> ModuleType:
    """Imports a module, which is a file of the working folder also where a library has its name."""
    file = Path.cwd() / f"{module}.py"
    if not file.is_file():
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(f"proposals of {module}", file)
    assert spec is not None
    assert spec.loader is not None
    own = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    return own


def _main(entry: str) -> None:
    """Answers a request by the function `module:name`, whose own output goes to stderr."""
    module, _, name = entry.partition(":")
    request, printed = json.load(sys.stdin), os.dup(1)
    os.dup2(2, 1)
    sys.path.append(os.getcwd())  # after all others: random.py there is nobody's standard library
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]] = getattr(_imported(module), name)
    answer = json.dumps(function(request))
    sys.stdout.flush()
    with os.fdopen(printed, "w", encoding="utf-8") as out:
        out.write(answer)


if __name__ == "__main__":
    _main(sys.argv[1])
