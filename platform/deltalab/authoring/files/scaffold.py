"""Writes the files of `deltalab rule new`, `task new` and `study new` from templates. Each file works as it is."""

import keyword
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from deltalab import trust
from deltalab.authoring.files.study_folder import SCHEMA, shipped_studies
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
    comes from and what it is for. `deltalab rule show NAME` prints this docstring.
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


KERNEL = '''"""NAME: a memory whose entries saturate, with a Triton kernel of its own, forward and backward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.ops.vmap import Folded
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class CLASS(UpdateRule):
    """S_t = squash(alpha_t S_{t-1} + k_t v_t^T),   o_t = scale S_t^T q_t,   alpha_t = exp(g_t)
    squash(z) = z / sqrt(1 + (z / bound)^2), elementwise

    No entry of the state leaves (-bound, bound). squash stands between the tokens, so no parallel form exists:
    PyTorch launches ten kernels for each token, and the kernel below is one launch for the whole sequence.
    """

    name: ClassVar[str] = "NAME"

    g: Gate = knob(forms.mamba2_decay(), forms.const(0))
    bound: float = knob(1.0, 4.0)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The equation in PyTorch: what `fused` is compared with, and what runs where it does not."""
        q, k, v, g = (x.to(state.dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        out = []
        for t in range(q.shape[1]):
            z = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            state = z / (1 + (z / self.bound).square()).sqrt()
            out.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(out, dim=1), state

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same by the kernels. A gate may be [B, T, H] or [H]: expand it."""
        g = gates["g"].expand(k.shape[:3]).to(state.dtype)
        o, last, _ = _Scan.apply(q, k, v, g, state, scale, self.bound, torch.is_grad_enabled())
        return o, last

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        """Why `fused` does not take inputs like these: the platform then takes `mix` and logs this reason."""
        return f"the kernel of NAME takes K up to 256, not {k.shape[-1]}" if k.shape[-1] > 256 else None


class _Scan(Folded):
    """The kernels as one differentiable function: o, the last state, and the states before each token if `keep`."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, start: Tensor, scale: float, bound: float, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, g, start = (x.contiguous() for x in (q, k, v, g, start))
        o, last = torch.empty_like(v), torch.empty_like(start)
        before = start.new_empty(*v.shape[:3], *start.shape[2:]) if keep else start.new_empty(v.shape[0], 0)
        sizes, grid = _sizes(k, v)
        _forward[grid](q, k, v, g, start, o, last, before, scale, bound, **sizes, KEEP=keep)
        return o, last, before

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, ctx.scale, ctx.bound, _ = inputs
        ctx.save_for_backward(*tensors, output[2])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_last: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, g, before, d_o, d_last = (x.contiguous() for x in (*ctx.saved_tensors, d_o, d_last))
        sizes, grid = _sizes(k, v)
        # Each program adds over its own channels of v: what q, k and g get is the sum over the programs.
        d_q, d_k = (d_last.new_empty(grid[1], *k.shape) for _ in range(2))
        d_g, d_v, d_start = d_last.new_empty(grid[1], *g.shape), torch.empty_like(v), torch.empty_like(d_last)
        _backward[grid](q, k, v, g, before, d_o, d_last, d_q, d_k, d_v, d_g, d_start, ctx.scale, ctx.bound, **sizes)
        return d_q.sum(0).to(q.dtype), d_k.sum(0).to(k.dtype), d_v, d_g.sum(0), d_start, None, None, None


def _sizes(k: Tensor, v: Tensor) -> tuple[dict[str, int], tuple[int, int]]:
    """The sizes that both kernels take, and the grid: heads of sequences by blocks of BV channels of v."""
    batch, tokens, heads, key_dim = k.shape
    value_dim, width = v.shape[-1], 32
    sizes = {"T": tokens, "H": heads, "K": key_dim, "V": value_dim, "BK": triton.next_power_of_2(key_dim), "BV": width}
    return sizes, (batch * heads, triton.cdiv(value_dim, width))


@triton.jit
def _forward(
    q, k, v, g, start, o, last, before, scale, bound,
    T, H, K, V, BK: tl.constexpr, BV: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # of a sequence: sequence * H + head; 32 bits overflow for large tensors
    i, j = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    tile, inside = i[:, None] * V + j[None, :], (i < K)[:, None] & (j < V)[None, :]  # blocks are powers of 2
    S = tl.load(start + head * K * V + tile, inside, 0)  # fp32, or fp64 for inputs in fp64
    for t in range(T):
        row = (head // H * T + t) * H + head % H
        q_t = tl.load(q + row * K + i, i < K, 0).to(S.dtype)[:, None]
        k_t = tl.load(k + row * K + i, i < K, 0).to(S.dtype)[:, None]
        v_t = tl.load(v + row * V + j, j < V, 0).to(S.dtype)[None, :]
        if KEEP:
            tl.store(before + row * K * V + tile, S, inside)
        z = tl.exp(tl.load(g + row)) * S + k_t * v_t
        S = z / tl.sqrt(1 + (z / bound) * (z / bound))
        tl.store(o + row * V + j, scale * tl.sum(S * q_t, 0), j < V)
    tl.store(last + head * K * V + tile, S, inside)


@triton.jit
def _backward(
    q, k, v, g, before, d_o, d_last, d_q, d_k, d_v, d_g, d_start, scale, bound,
    T, H, K, V, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    tile, inside = i[:, None] * V + j[None, :], (i < K)[:, None] & (j < V)[None, :]
    dS = tl.load(d_last + head * K * V + tile, inside, 0)
    for back in range(T):
        row = (head // H * T + T - 1 - back) * H + head % H
        part = row + block * tl.num_programs(0) * T
        q_t = tl.load(q + row * K + i, i < K, 0).to(dS.dtype)[:, None]
        k_t = tl.load(k + row * K + i, i < K, 0).to(dS.dtype)[:, None]
        v_t = tl.load(v + row * V + j, j < V, 0).to(dS.dtype)[None, :]
        d_o_t = scale * tl.load(d_o + row * V + j, j < V, 0).to(dS.dtype)[None, :]
        alpha, S = tl.exp(tl.load(g + row)), tl.load(before + row * K * V + tile, inside, 0)
        z = alpha * S + k_t * v_t
        slope = 1 / tl.sqrt(1 + (z / bound) * (z / bound))
        tl.store(d_q + part * K + i, tl.sum(z * slope * d_o_t, 1), i < K)
        dz = (dS + q_t * d_o_t) * slope * slope * slope
        tl.store(d_k + part * K + i, tl.sum(dz * v_t, 1), i < K)
        tl.store(d_v + row * V + j, tl.sum(dz * k_t, 0), j < V)
        tl.store(d_g + part, alpha * tl.sum(dz * S))
        dS = alpha * dz
    tl.store(d_start + head * K * V + tile, dS, inside)
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
    example: ClassVar[Mapping[str, object]] = {"tokens": 8}  # the parameters of `deltalab task show` and `check`
    shortcuts: ClassVar[frozenset[str]] = frozenset({"distance"})  # a copy has its answers at a fixed distance

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


STUDY = """# yaml-language-server: $schema=study.schema.json
# NAME: say in one line which question this study answers.
name: NAME
description: Does the decay of Gated DeltaNet matter for recall?

# One task or several, each with its parameters. `deltalab task list` lists them.
task:
  mqar: {length: 32, pairs: 4, vocab_size: 64}

# The settings that every arm starts from. `deltalab rule list` lists the rules, and `deltalab rule show gated_deltanet`
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

# The number of seeds. It takes 6 to decide anything; more of them find smaller differences (`deltalab study plan`).
# {at_least: 6, at_most: 15} adds seeds until each arm is decided or has little prospect of it.
seeds: 7

# A profile changes the study: `deltalab study run FILE --profile longer`.
profiles:
  longer: {base: {train: {steps: 1000}}}
"""


def new_rule(name: str, directory: Path = Path("plugins"), *, kernel: bool = False) -> Path:
    """Writes the file of a new rule, NAME.py. The platform finds rules in ./plugins by name.

    Args:
        kernel: Whether to write a rule with a Triton kernel of its own instead of a rule of the algebra.

    Returns:
        The path of the file.

    Raises:
        InputError: Python or another rule uses the name, the file exists, or the directory cannot be written to.
    """
    return _write(name, directory / f"{name}.py", "rule", KERNEL if kernel else RULE, list_rules())


def new_task(name: str, directory: Path = Path("plugins")) -> Path:
    """Writes the file of a new task, as `new_rule` does for a rule."""
    return _write(name, directory / f"{name}.py", "task", TASK, list_tasks())


def new_study(name: str, directory: Path = Path("studies")) -> Path:
    """Writes the file of a new study, NAME.yaml, as `new_rule` does for a rule. The name must be in lower case.

    The schema of study files, which the first line of the file names for editors, is written beside it and replaces an
    older schema.
    """
    if name != name.lower():
        raise InputError(f"'{name}' cannot name a study: take lower case, as in {name.lower()}", key=name)
    file = _write(name, directory / f"{name}.yaml", "study", STUDY, list(shipped_studies()))
    schema = directory / SCHEMA.name
    with suppress(OSError):  # only editors use the schema: the study works without it
        if not schema.exists() or not schema.samefile(SCHEMA):
            schema.write_text(SCHEMA.read_text(encoding="utf-8"), encoding="utf-8")
    return file


def _write(name: str, file: Path, kind: str, text: str, taken: list[str]) -> Path:
    """Checks that a name is free, fills it into the template `text` and writes the file."""
    free_name(name, kind, taken)
    return write_file(file, text.replace("NAME", name).replace("CLASS", class_name(name, kind, text)))


def free_name(name: str, kind: str, taken: list[str]) -> None:
    """Checks that a name is free for a new rule, task or study.

    Args:
        kind: "rule", "task" or "study".
        taken: The names that are in use.

    Raises:
        InputError: Python or another rule, task or study uses the name.
    """
    if not name.isidentifier() or name.startswith("_"):
        problem = f"'{name}' cannot name a {kind}: take letters, digits and _, a letter first, as in my_{kind}"
        raise InputError(problem, key=name)
    if keyword.iskeyword(name):
        raise InputError(f"'{name}' cannot name a {kind}: it is a word of Python's own", key=name)
    if name in taken:
        raise InputError(f"there is a {kind} '{name}' already", key=name, mend="take another name")


def class_name(name: str, kind: str, text: str) -> str:
    """Returns the name of the class for a rule or task, such as MyRule for my_rule.

    If the file's text has this word already, the kind is appended to the name, as in GateRule.
    """
    camel_case = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    # A new class `Gate`, for example, would shadow the class `Gate` that the file imports.
    return camel_case + kind.capitalize() if camel_case in text else camel_case


def write_file(file: Path, text: str) -> Path:
    """Writes a new file, so that no reader ever sees a part of it.

    A folder whose first Python file this is becomes trusted, since deltalab wrote all that would run.

    Raises:
        InputError: The file exists or cannot be written.
    """
    partial = file.with_name(f".{file.stem}.{uuid4().hex[:8]}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            raise InputError(f"{file} exists already", key=file.name, mend="take another name")
        partial.write_text(text, encoding="utf-8")
        is_first = file.suffix == ".py" and not any(file.parent.glob("*.py"))
        partial.replace(file)
        if is_first and not trust.is_trusted(file.parent):
            trust.record(file.parent)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return file
