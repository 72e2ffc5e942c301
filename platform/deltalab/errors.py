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


def unknown(what: str, given: object, allowed: Iterable[object], *, where: str = "") -> InputError:
    """An `InputError` that lists what is allowed and suggests the nearest spelling.

    >>> print(unknown("rule", "comb", ["comba", "mamba2"]))
    unknown rule 'comb'; did you mean 'comba'? allowed: comba, mamba2
    """
    names = [str(name) for name in allowed]
    near = get_close_matches(str(given), names, n=1)
    hint = f" did you mean '{near[0]}'?" if near else ""
    listing = ", ".join(names) or "nothing"
    return InputError(f"{where + ': ' if where else ''}unknown {what} '{given}';{hint} allowed: {listing}")
