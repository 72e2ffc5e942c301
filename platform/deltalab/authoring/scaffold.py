"""The files that `platform rule new`, `task new` and `study new` write: starting points that work unchanged."""

import keyword
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from deltalab.authoring.shipped import shipped_studies
from deltalab.errors import InputError
from deltalab.registry import list_rules, list_tasks

RULE = '''"""NAME: say in one line what is new about this rule."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class CLASS(UpdateRule):
    """S_t = (I - erase_t k_t k_t^T) S_{t-1} + write_t k_t v_t^T,   o_t = scale S_t^T r_t
    r_t = q_t,   or q_t - k_t where correct_output

    A delta rule that erases with one strength and writes with another. Below the equations, say where the rule
    comes from and what it is for. `platform rule show NAME` prints this docstring.
    """

    name: ClassVar[str] = "NAME"
    paper: ClassVar[str] = ""  # such as "arXiv:2506.02475"

    # The change of the state before the write. For a state that decays: import SPLR from deltalab.structure and use it
    # here, declare the log-decay `g: Gate = knob(gates.mamba2_decay())`, and pass g from `operands` to Operands.
    transition: Transition = HOUSEHOLDER

    # Every computed or learned symbol of the equation is a gate. A knob lists the options of a study, the default
    # first. `ablate: [write]` in a study selects the option `const`.
    erase: Gate = knob(gates.sigmoid(max=1), gates.sigmoid(max=2))
    write: Gate = knob(gates.sigmoid(), gates.const(1))

    # A knob may also be a switch, a word or a number that `operands` uses.
    correct_output: bool = knob(False, True)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """The range of the transition's eigenvalues for all values of the gates: 1 - erase_t along k_t, else 1."""
        return (1 - self.erase.high, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, erase: Tensor, write: Tensor) -> Operands:
        """q, k: [B, T, H, K] of unit norm; v: [B, T, H, V]; each gate by its symbol: [B, T, H] or [H]."""
        r = q - k if self.correct_output else q
        return Operands(r=r, k=k, u=v, e=erase, beta=write)
'''


TASK = '''"""NAME: say in one line what a model must learn in this task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks import IGNORE, Batch, Random, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class CLASS(Task):
    """Copying: the input is `tokens` random tokens and a 0; the model then repeats the tokens in order.

    Metric: accuracy, the share of correct tokens. Say here how examples are drawn and where the task comes from.
    """

    name: ClassVar[str] = "NAME"
    version: ClassVar[int] = 1  # raise it when batches or metrics change: earlier trials do not compare with later
    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    example: ClassVar[Mapping[str, object]] = {"tokens": 8}  # the parameters of `platform task show` and `check`

    # The parameters. A study sets them, as in `task: {NAME: {tokens: 16}}`.
    tokens: int
    vocab_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()  # checks the types of the parameters
        self.require(self.tokens >= 1, "tokens", "must be at least 1")
        self.require(self.vocab_size >= 3, "vocab_size", "must be at least 3")

    @property
    def length(self) -> int:
        return 2 * self.tokens

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        """A batch that depends on `random` alone, which differs by split, seed and step, and is on its device."""
        said = 1 + random.integers("tokens", self.vocab_size - 1, size, self.tokens)
        again = torch.cat([torch.zeros_like(said[:, :1]), said[:, :-1]], dim=1)
        # The target at a position is the prediction of a model that has read the inputs up to that position.
        return Batch(torch.cat([said, again], dim=1), torch.cat([torch.full_like(said, IGNORE), said], dim=1))

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """A total and a count for each metric, not a mean. logits: [N, vocab_size], at the N scored positions."""
        right = (logits.argmax(-1) == batch.labels).double()
        nats = surprisal(batch, logits).double()
        count = nats.new_tensor(len(nats))
        return {"accuracy": (right.sum(), count), "loss": (nats.sum(), count)}
'''


STUDY = """# NAME: say in one line which question this study answers.
name: NAME
description: Does the decay of Gated DeltaNet matter for recall?

# One task or several, each with its parameters. `platform task list` lists them.
task:
  mqar: {length: 32, pairs: 4, vocab_size: 64}

# The settings that every arm starts from. `platform rule list` lists the rules, and `platform rule show gated_deltanet`
# the knobs of one. A study sets them as in `rule: {name: gated_deltanet, g: gla_decay}`.
base:
  rule: gated_deltanet
  model: {d_model: 32, layers: 1, heads: 2}
  train: {steps: 300, batch_size: 32, lr: 2e-2}

# Parts to remove, one in each arm `without_PART`: knobs of the rule, or parts of the model.
ablate: [g]

# Further arms. Each states what it changes in the base.
arms:
  linear_attention: {rule: linear_attention}
  one_head: {model: {heads: 1}}

# The settings to tune. Every seed of every arm trains these candidates, here 3 learning rates, and chooses its best.
# With extend, the range moves while the best value is the lowest or the highest tried.
tune:
  train.lr: {log_uniform: [7e-3, 6e-2]}
  trials: 3
  extend: true

# The number of seeds. It takes 6 to decide anything; more of them find smaller differences (`platform study plan`).
# {at_least: 6, at_most: 15} adds seeds until each arm is decided or has little prospect of it.
seeds: 7

# A profile changes the study: `platform study run FILE --profile longer`.
profiles:
  longer: {base: {train: {steps: 1000}}}
"""


def new_rule(name: str, directory: Path = Path("plugins")) -> Path:
    """Writes the file of a new rule, NAME.py, and returns its path. The platform finds rules in ./plugins by name.

    Raises `InputError` for a name that Python or another rule uses, a file that exists, and a directory that cannot be
    written to.
    """
    return _write(name, directory / f"{name}.py", "rule", RULE, list_rules())


def new_task(name: str, directory: Path = Path("plugins")) -> Path:
    """Writes the file of a new task, as `new_rule` does for a rule."""
    return _write(name, directory / f"{name}.py", "task", TASK, list_tasks())


def new_study(name: str, directory: Path = Path("studies")) -> Path:
    """Writes the file of a new study, NAME.yaml, as `new_rule` does for a rule. The name must be in lower case."""
    if name != name.lower():
        raise InputError(f"'{name}' cannot name a study: take lower case, as in {name.lower()}")
    return _write(name, directory / f"{name}.yaml", "study", STUDY, list(shipped_studies()))


def _write(name: str, file: Path, what: str, text: str, taken: list[str]) -> Path:
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise InputError(f"'{name}' cannot name a {what}: take letters, digits and _, a letter first, as in my_{what}")
    if name in taken:
        raise InputError(f"there is a {what} '{name}' already: take another name")
    partial = file.with_name(f".{name}.{uuid4().hex[:8]}")
    kind = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if kind in text:  # `gate` would shadow the Gate that the file imports
        kind += what.capitalize()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            raise InputError(f"{file} exists already: take another name")
        partial.write_text(text.replace("NAME", name).replace("CLASS", kind), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return file
