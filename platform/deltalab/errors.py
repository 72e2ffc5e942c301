"""The error that wrong input causes, and the sentence that helps to mend it."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

NEAR = 0.65
"""The least likeness of a name that is suggested: `silu` for `slu` has 0.86, `rms` for `rsm` 0.67."""


class InputError(ValueError):
    """The user's input is wrong. The message is one line that says what is allowed.

    The line is made of the fields. An error that is raised while another is handled, and that quotes the other's line,
    has the other's fields, too.

    Args:
        problem: What is wrong. The whole line, where the fields are not known.
        where: The place of the wrong input: a file, an option, a key above it. The line begins with it.
        key: The word of the user that is wrong; for a value that is no word, the key of the value.
        allowed: What may stand in its place; None if this cannot be listed.
        nearest: The one of `allowed` with the nearest spelling.
        mend: What the user can do, such as a command. The line ends with it.
        kind: A name for the kind of error, in place of the class's own.

    Attributes:
        kind: A stable name for the kind of error. docs/reference/programs.md lists the kinds.
        exit_code: The exit code of a command that ends with this error.

    Examples:
        >>> print(InputError("needs pyarrow", where="a.parquet", mend="pip install 'deltalab[data]'"))
        a.parquet: needs pyarrow: pip install 'deltalab[data]'
    """

    kind = "input"
    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        where: str = "",
        key: str | None = None,
        allowed: Sequence[str] | None = None,
        nearest: str | None = None,
        mend: str | None = None,
        kind: str | None = None,
    ) -> None:
        place = f"{where}: " if where else ""
        hint = f" did you mean '{nearest}'?" if nearest is not None else ""
        listing = "" if allowed is None else f";{hint} allowed: {', '.join(allowed) or 'nothing'}"
        super().__init__(f"{place}{problem}{listing}{f': {mend}' if mend else ''}")
        self.kind = kind or self.kind
        self.where, self.key, self.nearest, self.mend = where or None, key, nearest, mend
        self.allowed = None if allowed is None else list(allowed)

    def with_fields(
        self, *, key: str | None = None, allowed: Sequence[str] | None = None, nearest: str | None = None
    ) -> "InputError":
        """Gives the error fields that its line says in words of its own, and returns it.

        Examples:
            >>> error = InputError("model.mlp must be true or false, not 'no!'")
            >>> error.with_fields(key="model.mlp", allowed=["true", "false"]).fields()["allowed"]
            ['true', 'false']
        """
        self.key, self.nearest = key or self.key, nearest or self.nearest
        self.allowed = self.allowed if allowed is None else list(allowed)
        return self

    def fields(self) -> dict[str, Any]:
        """Returns the fields for a program: `kind`, `where`, `key`, `allowed`, `nearest`, `mend` and `message`.

        A field is None where it is not known. `where` is at least the place that the line begins with.

        Examples:
            >>> wrong = unknown("rule", "comb", ["comba", "mamba2"], where="arms.x")
            >>> try:
            ...     try:
            ...         raise wrong
            ...     except InputError as error:
            ...         raise InputError(f"study.yaml: {error}") from None
            ... except InputError as error:
            ...     fields = error.fields()
            >>> fields["kind"], fields["where"], fields["key"], fields["nearest"]
            ('unknown', 'study.yaml: arms.x', 'comb', 'comba')
            >>> InputError("--sd must be a finite number, not nan").fields()["where"]
            '--sd'
        """
        line = str(self)
        known: dict[str, Any] = {"kind": self.kind, "where": self.where}
        known |= {name: getattr(self, name) for name in ("key", "allowed", "nearest", "mend")}
        inner = self.__cause__ or self.__context__
        while inner is not None and not (isinstance(inner, InputError) and str(inner) in line):
            inner = inner.__cause__ or inner.__context__
        if isinstance(inner, InputError):
            quoted = inner.fields()
            if known["kind"] == "input":
                known["kind"] = quoted["kind"]
            known |= {name: quoted[name] for name in quoted if known.get(name) is None and name != "message"}
            place = line[: line.index(str(inner))].strip().removesuffix(":")
            if place:
                known["where"] = place if quoted["where"] is None else f"{place}: {quoted['where']}"
        elif self.where is None and (beginning := _PLACE.match(line)):
            known["where"] = beginning[1] or beginning[2]
        return {**known, "message": line}


_PLACE = re.compile(r"(--[a-z][a-z-]*)\b|([^\s:'\"]\S*?): ")
"""The place that a line begins with: an option, or a file or a key without spaces before a colon."""


class WrongRules(InputError):
    """Rules of a study fail their checks.

    Args:
        lines: The failures, one line for each rule.
    """

    kind = "checks"

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class NotInstalled(InputError):
    """A package that the command needs is not installed.

    Args:
        problem: What needs the package.
        install: The words after `pip install`, which bring the package.
        where: The place of the input that needs it.
    """

    kind = "not_installed"

    def __init__(self, problem: str, install: str, *, where: str = "") -> None:
        super().__init__(problem, where=where, mend=f"pip install {install}")


def shortened(text: str, letters: int) -> str:
    """Shortens a text that has more than `letters` letters to its beginning and its end.

    Examples:
        >>> shortened("abcdefghijklmnopqrstuvwxyz", 16)
        'abcdefghij...xyz'
    """
    if len(text) <= letters:
        return text
    end = letters // 5
    return f"{text[: letters - end - 3]}...{text[-end:]}"


def one_line(text: str, letters: int = 2000) -> str:
    r"""Returns the text as one line that any terminal can show, shortened to `letters` letters.

    Examples:
        >>> one_line("not\n  a \x1b[31mname")
        'not a \\x1b[31mname'
    """
    line = " ".join(text[: 100 * letters].split())
    return shortened("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), letters)


def nearest_of(given: str, allowed: Iterable[str]) -> str | None:
    """Returns the name with the nearest spelling; None if none is near enough to suggest."""
    return next(iter(get_close_matches(given, list(allowed), n=1, cutoff=NEAR)), None)


def unknown(what: str, given: object, allowed: Iterable[object], *, where: str = "") -> InputError:
    """Returns an `InputError` that lists the allowed names and suggests the one with the nearest spelling.

    Args:
        what: The kind of thing that the name names, such as "rule".
        given: The name that is unknown.
        allowed: The names that exist.
        where: The place where the user wrote the name. The message begins with it.

    Examples:
        >>> print(unknown("rule", "comb", ["comba", "mamba2"]))
        unknown rule 'comb'; did you mean 'comba'? allowed: comba, mamba2

        Of dotted keys, only what follows a shared beginning is compared:

        >>> print(unknown("setting", "model.moe", ["model.rope", "model.d_model"]))
        unknown setting 'model.moe'; allowed: model.rope, model.d_model
        >>> print(unknown("setting", "model.rop", ["model.rope", "model.d_model"]))
        unknown setting 'model.rop'; did you mean 'model.rope'? allowed: model.rope, model.d_model
        >>> print(unknown("scale", "1.3b", ["340M", "1.3B"]))
        unknown scale '1.3b'; did you mean '1.3B'? allowed: 340M, 1.3B
    """
    names = [str(name) for name in allowed]
    given = shortened(str(given), 100)
    start = given[: given.rfind(".") + 1]
    if not start[:1].isalpha() or not any(name.startswith(start) for name in names):
        start = ""
    # Without the beginning that they share, `model.moe` is not near `model.rope`.
    beside = [name.removeprefix(start) for name in names if name.startswith(start)]
    near = nearest_of(given.removeprefix(start), beside)
    nearest = None if near is None else f"{start}{near}"
    problem = f"unknown {what} '{given}'"
    return InputError(problem, where=where, key=given, allowed=names, nearest=nearest, kind="unknown")


def missing_file(file: Path, what: str) -> InputError:
    """Returns an `InputError` about a file that is not there, which suggests the nearest one of its kind beside it.

    Args:
        file: The path of the user.
        what: What the file should be, such as "study".
    """
    try:
        beside = sorted(other.name for other in file.parent.iterdir() if other.suffix == file.suffix)
    except OSError:  # The folder is missing, too.
        beside = []
    near = nearest_of(file.name, beside)
    hint = "" if near is None else f"; did you mean {file.parent / near}?"
    error = InputError(f"no such {what}{hint}", where=str(file), key=file.name)
    return error.with_fields(allowed=beside, nearest=near)
