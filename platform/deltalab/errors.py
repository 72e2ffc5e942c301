"""The error that wrong input causes, and the sentence that helps to mend it."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

NEAR = 0.65
"""The least likeness of a name that is suggested: `silu` for `slu` has 0.86, `rms` for `rsm` 0.67."""


class InputError(ValueError):
    """The user's input is wrong. The message is one line that says what is allowed."""


class WrongRules(InputError):
    """Rules of a study fail their checks.

    Args:
        lines: The failures, one line for each rule.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


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
    near = get_close_matches(given.removeprefix(start), beside, n=1, cutoff=NEAR)
    hint = f" did you mean '{start}{near[0]}'?" if near else ""
    listing = ", ".join(names) or "nothing"
    return InputError(f"{where + ': ' if where else ''}unknown {what} '{given}';{hint} allowed: {listing}")
