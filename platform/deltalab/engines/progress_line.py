"""Makes the lines of progress of a training."""

import json
from collections.abc import Mapping
from typing import Any


class Progress:
    """The progress of a training, as `metrics.jsonl` shows it."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.steps = recipe["steps"]
        self.tokens = recipe["batch"]["sequences"] * recipe["batch"]["length"]
        self.step = 0
        self.values: dict[tuple[str, str], tuple[int, float | None]] = {}
        """(split, name) -> the last step with a value, and the value."""
        self.news = self.news_is_validation = False
        self.rest = ""

    def read(self, lines: Any) -> None:
        """Reads the lines that were written since the last call."""
        text = self.rest + lines.read()
        *whole, self.rest = text.split("\n")
        for line in whole:
            row = json.loads(line)
            self.step = row["step"]
            self.values[row["split"], row["name"]] = row["step"], row["value"]
            self.news = True
            self.news_is_validation |= row["split"] == "validation"

    def line(self) -> str:
        """Returns a line with the last values. A loss from before the last step is shown with its step."""
        self.news = self.news_is_validation = False
        parts = [f"step {self.step}/{self.steps}"]
        for key, form in (
            (("train", "loss"), "loss {:.4f}"),
            (("validation", "loss"), "validation {:.4f}"),
            (("train", "tokens_per_second"), "{:,.0f} tokens/s"),
            (("train", "mfu"), "{:.1%} of peak"),
            (("train", "memory_gib"), "{:.1f} GiB"),
        ):
            step, value = self.values.get(key, (0, None))
            if value is not None and not (key[1] == "mfu" and value < 0.001):
                earlier = f" (step {step})" if key[1] == "loss" and step != self.step else ""
                parts.append(form.format(value) + earlier)
        _, speed = self.values.get(("train", "tokens_per_second"), (0, None))
        if speed and self.step < self.steps:
            parts.append(f"{_duration((self.steps - self.step) * self.tokens / speed)} to go")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    """Returns a duration as text."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
