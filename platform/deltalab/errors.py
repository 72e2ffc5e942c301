"""The error that wrong input causes, and the sentence that helps to mend it."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class InputError(ValueError):
    """The user's input is wrong. The message is one line that says what is allowed."""


class WrongRules(InputError):
    """Rules of a study fail their checks. lines: one for each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


def shortened(text: str, letters: int) -> str:
    """The text, or its beginning and its end where it has more than so many letters.

    >>> shortened("abcdefghijklmnopqrstuvwxyz", 16)
    'abcdefghij...xyz'
    """
    if len(text) <= letters:
        return text
    end = letters // 5
    return f"{text[: letters - end - 3]}...{text[-end:]}"


def one_line(text: str, letters: int = 2000) -> str:
    """The text in one line that any terminal can show, shortened to so many letters.

    >>> one_line("not\\n  a \\x1b[31mname")
    'not a \\\\x1b[31mname'
    """
    line = " ".join(text[: 100 * letters].split())
    return shortened("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), letters)


def unknown(what: str, given: object, allowed: Iterable[object], *, where: str = "") -> InputError:
    """An `InputError` that lists what is allowed and suggests the nearest spelling.

    >>> print(unknown("rule", "comb", ["comba", "mamba2"]))
    unknown rule 'comb'; did you mean 'comba'? allowed: comba, mamba2
    """
    names = [str(name) for name in allowed]
    given = shortened(str(given), 100)
    near = get_close_matches(given, names, n=1)
    hint = f" did you mean '{near[0]}'?" if near else ""
    listing = ", ".join(names) or "nothing"
    return InputError(f"{where + ': ' if where else ''}unknown {what} '{given}';{hint} allowed: {listing}")
