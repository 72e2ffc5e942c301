"""Settings as one would write them down: a rule as its name with its knobs, a gate as its form with its numbers."""

from collections.abc import Mapping
from typing import Any


def setting_text(value: Any, digits: int | None = None) -> str:
    """A setting in one line.

    Args:
        value: A number, a word, a list, a gate as {form: {parameter: number}}, or a rule as {"name": ..., knob: ...}.
        digits: Significant digits of numbers that are not whole. None writes them in full, so that two numbers that
            differ look different.

    >>> setting_text({"name": "comba", "d": {"head": {"init": 0.02}}}), setting_text({"metala_decay": {}})
    ('comba(d=head(init=0.02))', 'metala_decay')
    >>> setting_text(0.1 + 0.2), setting_text(0.1 + 0.2, 3), setting_text([1, "x"]), setting_text(True)
    ('0.30000000000000004', '0.3', '[1, x]', 'true')
    >>> setting_text(None)
    'absent'
    """
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and digits is not None:
        return f"{value:.{digits}g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(setting_text(item, digits) for item in value)}]"
    if not isinstance(value, Mapping):
        return str(value)
    if "name" in value:
        value = {value["name"]: {key: knob for key, knob in value.items() if key != "name"}}
    if len(value) == 1 and isinstance(inner := next(iter(value.values())), Mapping):
        form = str(next(iter(value)))
        return f"{form}({settings_text(inner, digits)})" if inner else form
    return f"{{{', '.join(f'{key}: {setting_text(item, digits)}' for key, item in value.items())}}}"


def settings_text(values: Mapping[str, Any], digits: int | None = None) -> str:
    """Settings by path in one line.

    >>> settings_text({"rule": {"name": "comba"}, "train.lr": 0.0123456}, 3)
    'rule=comba, train.lr=0.0123'
    """
    return ", ".join(f"{path}={setting_text(value, digits)}" for path, value in values.items())
