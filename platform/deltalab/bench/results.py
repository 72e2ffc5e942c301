"""The results of a benchmark: the figures of each contestant at each shape, as a table, as JSON and as a plot."""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deltalab.errors import InputError


@dataclass(frozen=True)
class Shape:
    """The sizes B, T, H, K, V of a call."""

    batch: int
    length: int
    heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return ",".join(map(str, dataclasses.astuple(self)))

    @classmethod
    def parse(cls, given: str) -> "Shape":
        """A shape written as B,T,H,K,V. Raises `InputError` for anything else.

        >>> Shape.parse("8,4096,16,128,128").length
        4096
        """
        numbers = whole_numbers(given, where="--shape")
        if len(numbers) != 5:
            raise InputError(f"--shape {given}: give B,T,H,K,V, like {GPU_SHAPE}")
        return cls(*numbers)

    def at(self, length: int) -> "Shape":
        """The same number of tokens in sequences of another length.

        >>> str(Shape(8, 4096, 16, 128, 128).at(1024))
        '32,1024,16,128,128'
        """
        return dataclasses.replace(self, batch=max(1, self.batch * self.length // length), length=length)


GPU_SHAPE = Shape(8, 4096, 16, 128, 128)
CPU_SHAPE = Shape(1, 512, 2, 64, 64)


def whole_numbers(given: str, *, where: str) -> list[int]:
    """The numbers of a list like `1,2`. Raises `InputError` for anything but whole numbers of at least 1."""
    words = [word.strip() for word in given.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise InputError(f"{where} {given}: give whole numbers of at least 1, with commas between them")
    return [int(word) for word in words]


@dataclass(frozen=True)
class Figures:
    """The figures of one contestant at one shape. None if it does not apply, or did not run, for the reason in `why`.

    Times are in ms, the first call's in s; extra memory is in bytes. `*_copy` and `*_matmul` are shares of this
    machine's `ceilings`. error: the relative difference of o from that of the first contestant that computes the
    rule's function.
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
    """All figures of a run, and the machine. ceilings: the rates of a copy in bytes/s and of a matmul in flop/s."""

    device: str
    dtype: str
    ceilings: dict[str, float]
    versions: dict[str, str]
    date: str
    figures: list[Figures] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> "Results":
        """The results that `to_json` wrote."""
        return cls(**{**given, "figures": [Figures(**one) for one in given["figures"]]})

    def to_text(self) -> str:
        """A line for each contestant, then the reasons for missing figures, then the machine."""
        rows = [tuple(_COLUMNS), *(tuple(show(one) for show in _COLUMNS.values()) for one in self.figures)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        reasons = [f"{one.rule} by {one.by} at {one.shape}: {one.why}" for one in self.figures if one.why]
        copy, matmul = self.ceilings["copy"], self.ceilings["matmul"]
        where = f"{self.device}, {self.dtype}: a copy {copy / 1e12:.3g} TB/s, a matmul {matmul / 1e12:.3g} TFLOP/s"
        software = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return "\n".join([*(line.rstrip() for line in lines), *reasons, where, f"{software}; {self.date}"])

    def plot(self, file: Path) -> None:
        """Time against length, forward and with backward; where matplotlib is not installed, a line that says so."""
        if importlib.util.find_spec("matplotlib") is None:
            print(f"{file.name}: not drawn, matplotlib is not installed", file=sys.stderr)
            return
        import matplotlib.pyplot as plt

        figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
        for panel, what, title in zip(panels, ("forward", "both"), ("forward", "forward + backward"), strict=True):
            curves: dict[str, list[tuple[int, float]]] = {}
            for one in self.figures:
                if (ms := getattr(one, what)) is not None:
                    curves.setdefault(f"{one.rule}, {one.by}", []).append((int(one.shape.split(",")[1]), ms))
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


def _shown(name: str, form: str, times: float = 1.0) -> Callable[[Figures], str]:
    def show(one: Figures) -> str:
        value = getattr(one, name)
        return "-" if value is None else format(times * value, form)

    return show


_COLUMNS: dict[str, Callable[[Figures], str]] = {
    "rule": lambda one: one.rule,
    "by": lambda one: one.by,
    "B,T,H,K,V": lambda one: one.shape,
    "fwd ms": _shown("forward", ".3f"),
    "launch": _shown("forward_launch", ".2f"),
    "copy": _shown("forward_copy", ".0%"),
    "matmul": _shown("forward_matmul", ".0%"),
    "f+b ms": _shown("both", ".3f"),
    "launch ": _shown("both_launch", ".2f"),
    "copy ": _shown("both_copy", ".0%"),
    "matmul ": _shown("both_matmul", ".0%"),
    "decode us": _shown("decode", ".1f", 1e3),
    "copy  ": _shown("decode_copy", ".0%"),
    "fwd MiB": _shown("forward_memory", ".0f", 2**-20),
    "f+b MiB": _shown("both_memory", ".0f", 2**-20),
    "first s": _shown("first_call", ".1f"),
    "error": _shown("error", ".1e"),
}
