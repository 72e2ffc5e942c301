"""The files that `platform rule new`, `task new` and `study new` write: each works as it stands, to start from."""

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
    comes from and what it is for: `platform rule show NAME` prints all of this.
    """

    name: ClassVar[str] = "NAME"
    paper: ClassVar[str] = ""  # "arXiv:2506.02475", where there is one

    # What the state does before it is written to. To let it decay, import SPLR from deltalab.structure, set it here,
    # declare the log-decay `g: Gate = knob(gates.mamba2_decay())`, and take g in `operands` and give it to Operands.
    transition: Transition = HOUSEHOLDER

    # Every symbol of the equation that is computed or learned is a gate. A knob lists what a study may choose from,
    # the full method's choice first; `const` is what `ablate: [write]` turns it to.
    erase: Gate = knob(gates.sigmoid(max=1), gates.sigmoid(max=2))
    write: Gate = knob(gates.sigmoid(), gates.const(1))

    # A knob may also be a switch, a word or a whole number, for `operands` to act on.
    correct_output: bool = knob(False, True)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """Of the transition, for any values of the gates: 1 off k_t, and 1 - erase_t along it."""
        return (1 - self.erase.high, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, erase: Tensor, write: Tensor) -> Operands:
        """q, k [B, T, H, K] of unit norm; v [B, T, H, V]; the gates by their symbols, [B, T, H] or [H]."""
        r = q - k if self.correct_output else q
        return Operands(r=r, k=k, u=v, e=erase, beta=write)
'''


TASK = '''"""NAME: say in one line what a model must be able to do here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks import IGNORE, Batch, Random, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class CLASS(Task):
    """Copying: `tokens` random tokens, then 0, and the tokens are to be said once more, in their order.

    Metric: accuracy, the share of right tokens. Say here what follows which law, and where the task comes from.
    """

    name: ClassVar[str] = "NAME"
    version: ClassVar[int] = 1  # raise it whenever a batch or a metric changes: recorded trials are of the old one
    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    example: ClassVar[Mapping[str, object]] = {"tokens": 8}  # for `platform task show` and `check`

    # Parameters, as a study gives them: `task: {NAME: {tokens: 16}}`.
    tokens: int
    vocab_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()  # holds the parameters to their types
        self.require(self.tokens >= 1, "tokens", "must be at least 1")
        self.require(self.vocab_size >= 3, "vocab_size", "must be at least 3")

    @property
    def length(self) -> int:
        return 2 * self.tokens

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        """From `random` alone, on its device: it differs by split, seed and step, and by nothing else."""
        said = 1 + random.integers("tokens", self.vocab_size - 1, size, self.tokens)
        again = torch.cat([torch.zeros_like(said[:, :1]), said[:, :-1]], dim=1)
        # The target at a position is what the model is to predict there, having read the inputs up to it.
        return Batch(torch.cat([said, again], dim=1), torch.cat([torch.full_like(said, IGNORE), said], dim=1))

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """logits [N, vocab_size] of the N positions that have a target; totals and counts, never means."""
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

# What every arm starts from. `platform rule list` lists the rules; `platform rule show gated_deltanet` shows the
# knobs of one, set as in `rule: {name: gated_deltanet, g: gla_decay}`.
base:
  rule: gated_deltanet
  model: {d_model: 32, layers: 1, heads: 2}
  train: {steps: 300, batch_size: 32, lr: 2e-2}

# Parts taken away one at a time, each an arm `without_PART`: knobs of the rule, or parts of the model.
ablate: [g]

# Further arms. Each states what it changes in the base.
arms:
  linear_attention: {rule: linear_attention}
  one_head: {model: {heads: 1}}

# Every arm tunes these settings with as many trials, on seeds that are not used again.
tune:
  train.lr: {log_uniform: [5e-3, 5e-2]}
  trials: 3

# Fresh seeds, on which every arm is compared with the base. 7 are the fewest with which 3 arms can reach p = 0.05.
seeds: 7

# A profile changes the study: `platform study run FILE --profile longer`.
profiles:
  longer: {base: {train: {steps: 1000}}}
"""


def new_rule(name: str, directory: Path = Path("plugins")) -> Path:
    """Writes a new rule's file, NAME.py, and returns its path. Rules in ./plugins are found by their names.

    Raises `InputError` for a name that Python or another rule has taken, a file that exists, and a directory that
    cannot be written to.
    """
    return _write(name, directory / f"{name}.py", "rule", RULE, list_rules())


def new_task(name: str, directory: Path = Path("plugins")) -> Path:
    """Writes a new task's file, as `new_rule` does a rule's."""
    return _write(name, directory / f"{name}.py", "task", TASK, list_tasks())


def new_study(name: str, directory: Path = Path("studies")) -> Path:
    """Writes a new study's file, NAME.yaml, as `new_rule` does a rule's. The name is in lower case."""
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
