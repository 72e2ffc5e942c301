"""The results of a benchmark: the figures of each contestant at each shape, as a table, as JSON and as a plot."""

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deltalab import progress
from deltalab.errors import InputError


@dataclass(frozen=True)
class Shape:
    """The sizes B, T, H, K and V of a call."""

    batch: int
    length: int
    heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return ",".join(map(str, dataclasses.astuple(self)))

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Returns a shape from a text B,T,H,K,V.

        Raises:
            InputError: The text is no shape.

        Examples:
            >>> Shape.parse("8,4096,16,128,128").length
            4096
        """
        numbers = whole_numbers(text, where="--shape")
        if len(numbers) != 5:
            raise InputError(f"--shape {text}: give B,T,H,K,V, like {GPU_SHAPE}")
        return cls(*numbers)

    def at(self, length: int) -> "Shape":
        """Returns a shape with the same number of tokens in sequences of another length.

        Examples:
            >>> str(Shape(8, 4096, 16, 128, 128).at(1024))
            '32,1024,16,128,128'
        """
        return dataclasses.replace(self, batch=max(1, self.batch * self.length // length), length=length)


ALONE = "recurrence"
"""The name in `Figures.by` of a rule's recurrence alone, in which the rule's time is told."""

GPU_SHAPE = Shape(8, 4096, 16, 128, 128)
CPU_SHAPE = Shape(1, 512, 2, 64, 64)


def whole_numbers(text: str, *, where: str) -> list[int]:
    """Returns the numbers of a list such as `1,2`.

    Args:
        text: The list.
        where: The option that the list was given to, for the message.

    Raises:
        InputError: The text has anything but whole numbers of at least 1.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise InputError(f"{where} {text}: give whole numbers of at least 1, with commas between them")
    return [int(word) for word in words]


@dataclass(frozen=True)
class Figures:
    """The figures of one contestant at one shape.

    A figure is None if it does not apply, or if the contestant did not run. Fields that end in `_copy` and `_matmul`
    are shares of this machine's `ceilings`. `both` means forward with backward.

    Attributes:
        rule: The rule, by its label.
        by: The name of the contestant.
        shape: The sizes B,T,H,K,V.
        forward: Time of a forward call, in ms.
        forward_launch: Time to launch a forward call, in ms.
        both: Time of forward with backward, in ms.
        both_launch: Time to launch forward with backward, in ms.
        decode: Time of a call on one token, in ms.
        forward_memory: Extra memory of a forward call, in bytes.
        both_memory: Extra memory of forward with backward, in bytes.
        first_call: Time of the first call, in s.
        error: The relative difference of o from that of the first contestant that computes the rule's function.
        why: The reason for missing figures.
    """

    rule: str
    by: str
    shape: str
    forward: float | None = None
    forward_launch: float | None = None
    forward_copy: float | None = None
    forward_matmul: float | None = None
    both: float | None = None
    both_launch: float | None = None
    both_copy: float | None = None
    both_matmul: float | None = None
    decode: float | None = None
    decode_copy: float | None = None
    forward_memory: int | None = None
    both_memory: int | None = None
    first_call: float | None = None
    error: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Results:
    """All figures of a run, and the machine that made them.

    Attributes:
        dtype: The dtype of the inputs.
        ceilings: The rates of this machine: "copy" in bytes/s and "matmul" in flop/s.
        versions: The versions of the software.
        date: The date and time in UTC.
        figures: The figures, a row for each contestant and shape.
    """

    device: str
    dtype: str
    ceilings: dict[str, float]
    versions: dict[str, str]
    date: str
    figures: list[Figures] = field(default_factory=list)

    def to_json(self) -> str:
        """Returns the results as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Results":
        """Returns the results that `to_json` wrote."""
        return cls(**{**values, "figures": [Figures(**row) for row in values["figures"]]})

    def to_text(self) -> str:
        """Returns a line for each contestant, the reasons for missing figures, prices of recurrences, the machine."""
        rows = [
            tuple(_COLUMNS),
            *(tuple(show(row_figures) for show in _COLUMNS.values()) for row_figures in self.figures),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        reasons = [
            f"{row_figures.rule} by {row_figures.by} at {row_figures.shape}: {row_figures.why}"
            for row_figures in self.figures
            if row_figures.why
        ]
        reasons += [line for row_figures in self.figures if (line := self._price(row_figures))]
        copy, matmul = self.ceilings["copy"], self.ceilings["matmul"]
        where = f"{self.device}, {self.dtype}: a copy {copy / 1e12:.3g} TB/s, a matmul {matmul / 1e12:.3g} TFLOP/s"
        software = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return "\n".join([*(line.rstrip() for line in lines), *reasons, where, f"{software}; {self.date}"])

    def _price(self, alone: Figures) -> str:
        """Returns what a rule takes beside its recurrence alone, as a line; empty for other figures."""
        if alone.by != ALONE or alone.forward is None:
            return ""
        rule = next(row for row in self.figures if (row.rule, row.shape) == (alone.rule, alone.shape))
        if rule.forward is None:
            return ""
        line = (
            f"{rule.rule} by {rule.by} at {rule.shape}: {rule.forward / alone.forward:.2f} times its recurrence alone"
        )
        return (
            line if rule.both is None or alone.both is None else f"{line}, {rule.both / alone.both:.2f} with backward"
        )

    def plot(self, file: Path) -> None:
        """Draws the time of a call against the length of sequences, for forward and for forward with backward.

        If matplotlib is not installed, a line on stderr says so.
        """
        if importlib.util.find_spec("matplotlib") is None:
            progress.note(f"{file.name}: not drawn, matplotlib is not installed")
            return
        import matplotlib.pyplot as plt

        figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
        for panel, what, title in zip(panels, ("forward", "both"), ("forward", "forward + backward"), strict=True):
            curves: dict[str, list[tuple[int, float]]] = {}
            for row in self.figures:
                if (ms := getattr(row, what)) is not None:
                    curves.setdefault(f"{row.rule}, {row.by}", []).append((int(row.shape.split(",")[1]), ms))
            for name, points in curves.items():
                panel.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
            panel.set(title=title, xlabel="tokens in a sequence", ylabel="ms")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(alpha=0.3)
        if panels[0].has_data():
            panels[0].legend(fontsize=8)
        figure.suptitle(f"as many tokens in all; {self.device}, {self.dtype}")
        figure.tight_layout()
        figure.savefig(file, dpi=120)
        plt.close(figure)


def _cell(name: str, form: str, times: float = 1.0) -> Callable[[Figures], str]:
    """Returns a function that formats one field of `Figures`."""

    def show(row: Figures) -> str:
        value = getattr(row, name)
        return "-" if value is None else format(times * value, form)

    return show


_COLUMNS: dict[str, Callable[[Figures], str]] = {
    "rule": lambda row: row.rule,
    "by": lambda row: row.by,
    "B,T,H,K,V": lambda row: row.shape,
    "fwd ms": _cell("forward", ".3f"),
    "launch": _cell("forward_launch", ".2f"),
    "copy": _cell("forward_copy", ".0%"),
    "matmul": _cell("forward_matmul", ".0%"),
    "f+b ms": _cell("both", ".3f"),
    "launch ": _cell("both_launch", ".2f"),
    "copy ": _cell("both_copy", ".0%"),
    "matmul ": _cell("both_matmul", ".0%"),
    "decode us": _cell("decode", ".1f", 1e3),
    "copy  ": _cell("decode_copy", ".0%"),
    "fwd MiB": _cell("forward_memory", ".0f", 2**-20),
    "f+b MiB": _cell("both_memory", ".0f", 2**-20),
    "first s": _cell("first_call", ".1f"),
    "error": _cell("error", ".1e"),
}
