"""The contract of an update rule: data (a transition, gates, knobs) and one method.

The recurrence of a head, with state S [K, V], keys of unit norm, and a scale that is K ** -0.5 by default:

    S_t = D_t S_{t-1} + a_t (b_t^T X_{t-1}) + k_t u_t^T        X = S_{t-1} or D_t S_{t-1}
    o_t = scale * S_t^T r_t, or scale * (S_{t-1}^T r_t + bonus_t u_t)

`UpdateRule.operands` returns the vectors. `structure.Transition` says how the vectors act. `Fit` adds a second state
that learns from the error of the first. Vectors may depend on a small `carry` from token to token, and the state may
have other widths than keys and values. A rule of several recurrences is a `passes.Passes`. Any other rule overrides
`mix` and `initial_state` instead of `operands`; its knobs, gates, layer, checks and search space work the same.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast, final

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
from deltalab.operands import Fit as Fit
from deltalab.operands import Operands as Operands
from deltalab.operands import fields_of as fields_of
from deltalab.structure import Transition

State: TypeAlias = tuple[Tensor, ...]
"""The memory of a rule. For a rule of the algebra: S [B, H, K, V], then R of the same shape if there is a `Fit`, then
the carry."""

MOST_KNOB = 2**20
"""The largest whole number that a knob may have."""

Option: TypeAlias = Transition | Gate | str | float | bool


def knob(default: Option, *others: Option) -> Any:
    """Declares a field of a rule that a study may vary; `rule check` tries every option.

    A study may choose any listed option. It may also choose a gate of a listed kind with other numbers. A knob whose
    options are numbers also takes any number that is not below the smallest of them.

    Args:
        default: The option of the published method.
        *others: The other options.
    """
    return dataclasses.field(default=cast(Any, default), metadata={"options": (default, *others)})


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """A recurrent update rule. Subclass it as a frozen, keyword-only dataclass whose fields are `knob`s.

    Attributes:
        name: The name of the rule in YAML.
        paper: The paper that the rule comes from; empty for a rule without a paper.
        per_step: The gates that have a value for each of a token's steps.
        ignores: The inputs, such as "q" or a gate, that have no effect in some or all of their channels. `rule check`
            fails if an input that is not listed here has no effect.
        published: The authors' own form, which `rule: NAME@published` asks for: `source`, their code; `knobs`, those
            that differ from the defaults, as YAML writes them; `layer`, the settings of the layer that differ from
            those of a plain model; and `lacks`, what the authors' block has beyond them. Empty if there is none. It is
            no part of a trial's identity, since a trial holds the settings themselves.
        transition: The transition of the state; None for a rule outside the algebra.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    published: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    per_step: ClassVar[frozenset[str]] = frozenset()
    ignores: ClassVar[frozenset[str]] = frozenset()

    transition: Transition | None = None

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        """The activation of q and k in the layer: `unit` is SiLU and unit norm, `silu` is SiLU, `raw` is none."""
        return "unit"

    @property
    def silu_of_v(self) -> bool:
        """Whether v gets SiLU if q and k get it. With `raw` features, v never gets SiLU."""
        return True

    @property
    def steps(self) -> int:
        """The number of keys and values that the layer projects for each token.

        By default it is `Transition.steps`. A rule whose `operands` makes several writes from one key returns a smaller
        number.
        """
        return self.transition.steps if self.transition is not None else 1

    def scale(self, key_dim: int) -> float:
        """Returns the factor of the output for keys of width K = `key_dim`: K ** -0.5, unless the rule has another."""
        return float(key_dim**-0.5)

    def key_width(self, key_dim: int) -> int:
        """Returns the width of the state's keys; `operands` may map keys of width `key_dim` to another width."""
        return key_dim

    def value_width(self, value_dim: int) -> int:
        """Returns the width of the state's values; `operands` may map values of width `value_dim` to another width."""
        return value_dim

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns the carry of an empty sequence, for inputs like k and v; no tensors by default.

        The tensors begin with [B, H]. The `operands` of a rule that overrides this method takes `carry=` and returns
        the next carry in `Operands.carry`.
        """
        return ()

    @property
    def grouped(self) -> bool:
        """Whether `mix` accepts k and v with fewer heads than q. If it does not, the layer repeats k and v.

        It is True for the built-in attention alone. The file of the attention cannot declare this, because the hash of
        the file is part of the identity of every trial that was run with the attention.
        """
        return self.name == "attention"

    @property
    def second_state(self) -> bool:
        """Whether the operands have a `Fit`. The state is then a pair of tensors."""
        return False

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """The closed interval (low, high) of the eigenvalues of each state's transition, for keys of unit norm.

        It is (1, 1) without decay or low rank, and (0, 1) with a decay alone. A rule with a low rank must override this
        property.
        With one step per token and no free low rank, eigenvalues must be real and in the interval. In other rules,
        only the real parts must be in the interval, and no modulus may exceed max(|low|, |high|).
        """
        if self.transition is None or self.transition.low_rank != "none":
            raise NotImplementedError(f"rule '{self.name}' has a low rank: declare its eigenvalues")
        return (1.0, 1.0) if self.transition.decay == "none" else (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **gates: Any) -> Operands:
        """Returns the operands of the recurrence. A rule with a carry also takes `carry`.

        With n `steps`, k, v and gates `per` step have n T rows.

        Args:
            q: Queries of unit norm, [B, T, H, K].
            k: Keys of unit norm, [B, T, H, K].
            v: Values, [B, T, H, V].
            **gates: Each gate by its symbol, in the shape of its `per`.
        """
        raise NotImplementedError(f"rule '{self.name}' gives neither operands nor mix")

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Any
    ) -> tuple[Tensor, State | Tensor]:
        """Computes o and the next state, for a rule outside the algebra. It must accept any T >= 1.

        Args:
            q: Queries, [B, T, H, K].
            k: Keys, [B, T, H, K].
            v: Values, [B, T, H, V].
            gates: Each gate by its symbol, in the shape of its `per`.
            scale: The factor of o.
            state: One tensor or a tuple, in the form that `initial_state` returns.

        Returns:
            o [B, T, H, V] with the scale, and the next state in the same form.
        """
        if type(self).operands is not UpdateRule.operands:
            raise NotImplementedError(f"rule '{self.name}' gives operands and no transition: declare `transition`")
        raise NotImplementedError(f"rule '{self.name}' gives neither operands nor mix")

    def step(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **given: Any) -> tuple[Tensor, State | Tensor]:
        """Computes one token as the paper's equation is written; `rule check` compares all other code with it.

        With n `steps`, k is [B, n, H, K], v is [B, n, H, V], and gates `per` step are [B, n, H].

        Args:
            q: The query, [B, H, K].
            k: The key, [B, H, K].
            v: The value, [B, H, V].
            **given: `scale`, the factor of o; `state`, the tuple that `scan` returns; and each gate by its symbol,
                without its time axis.

        Returns:
            o [B, H, V] with the scale, and the next state.
        """
        raise NotImplementedError(f"rule '{self.name}' gives no step")

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Any
    ) -> tuple[Tensor, State | Tensor]:
        """Computes o and the next state, as `mix` does, by the rule's own kernel.

        `rule check` compares the kernel with the reference, also in fp64 if the kernel takes fp64.
        """
        raise NotImplementedError(f"rule '{self.name}' brings no kernel of its own")

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        """Returns why `fused` cannot handle this setting or these inputs, for an error message; None if it can."""
        return None if self.brings_kernel else f"rule '{self.name}' brings no Triton kernel"

    def initial_state(self, k: Tensor, v: Tensor) -> State | Tensor:
        """Returns an empty state for inputs like k [B, T, H, K] and v [B, T, H, V], in at least fp32.

        It is one tensor [B, H, K, V], or a tuple of two if there is a second state. A rule outside the algebra may
        return any tensor, or tuple of tensors, that begin with [B, H]. The carry is not included.
        """
        dtype = torch.promote_types(v.dtype, torch.float32)
        widths = self.key_width(k.shape[-1]), self.value_width(v.shape[-1])
        empty = v.new_zeros(v.shape[0], v.shape[2], *widths, dtype=dtype)
        return (empty, empty.clone()) if self.second_state else empty

    # All members below are derived from the declaration. A rule does not override them.

    @final
    def start(self, k: Tensor, v: Tensor) -> State:
        """Returns `initial_state` and the carry as one tuple."""
        return _tuple(self.initial_state(k, v)) + self.carried(k, v)

    @final
    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        *,
        scale: float,
        state: State | None,
        fused: bool = False,
    ) -> tuple[Tensor, State]:
        """Calls `mix`, or `fused`, with states as tuples. A state of None is an empty one."""
        # A state of a single tensor does not tell whether the rule wants the tensor in a tuple.
        empty = self.initial_state(k, v) if state is None or len(state) == 1 else state
        before = empty if state is None else state[0] if isinstance(empty, Tensor) else state
        o, after = (self.fused if fused else self.mix)(q, k, v, gates, scale=scale, state=before)
        return o, _tuple(after)

    @property
    def states(self) -> int:
        """The number of a state's tensors that are states of the recurrence. The others are the carry."""
        return 2 if self.second_state else 1

    @property
    def carries(self) -> bool:
        """Whether the rule has a carry."""
        return type(self).carried is not UpdateRule.carried

    @property
    def brings_kernel(self) -> bool:
        """Whether the rule has a kernel of its own."""
        return type(self).fused is not UpdateRule.fused

    @property
    def gates(self) -> dict[str, Gate]:
        """The gates by their symbols, in order of declaration.

        A log-decay `g` has a value for each channel if the transition decays diagonally. A gate in `per_step` has a
        value for each of a token's steps.
        """
        gates = {name: value for name, value in self.knobs().items() if isinstance(value, Gate)}
        for name, gate in gates.items():
            if gate.per == "token" and name in self.per_step:
                gates[name] = dataclasses.replace(gate, per="step")
            if gate.per == "token" and name == "g" and self.transition and self.transition.decay == "diagonal":
                gates[name] = dataclasses.replace(gate, per="channel")
        return gates

    def knobs(self) -> dict[str, Option]:
        """Returns the value of each knob."""
        return {name: getattr(self, name) for name in self.options()}

    @classmethod
    def options(cls) -> dict[str, tuple[Option, ...]]:
        """Returns the options of each knob, the default first."""
        # torch.compile does not take dataclasses.fields(cls).
        return {f.name: f.metadata["options"] for f in cls.__dataclass_fields__.values() if "options" in f.metadata}

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def spec(self) -> dict[str, Any]:
        """Returns the rule as YAML writes it, with every knob."""
        plain = {
            name: v.spec() if isinstance(v, Gate) else str(v) if isinstance(v, Transition) else v
            for name, v in self.knobs().items()
        }
        return {"name": self.name, **plain}

    def variants(self) -> list[Self]:
        """Returns the rule itself, then the rule with one knob at another option, for each option that it accepts."""
        rules = [self]
        for name, options in self.options().items():
            for option in options:
                if option != getattr(self, name):
                    with suppress(InputError):  # some options are valid only if another knob changes too
                        rules.append(dataclasses.replace(self, **cast(Any, {name: option})))
        return rules

    def turned(self, other: Self) -> str:
        """Returns the knobs of `other` that differ from this rule's, as text for people: `d=const(value=0)`."""
        changes = [f"{n}={getattr(other, n)}" for n in self.options() if getattr(self, n) != getattr(other, n)]
        return ", ".join(changes) or "as declared"

    @classmethod
    def configured(cls, knobs: Mapping[str, object]) -> Self:
        """Returns the rule with knobs as YAML writes them.

        Args:
            knobs: The option of each knob that differs from the default, by the knob's name.

        Raises:
            InputError: The rule does not take a knob, an option or a number.
        """
        options = cls.options()
        chosen: dict[str, Option] = {}
        for name, value in knobs.items():
            if name not in options:
                raise unknown("knob", name, options, where=f"rule '{cls.name}'")
            chosen[name] = _choose(value, options[name], where=f"{cls.name}.{name}")
        return cls(**cast(Any, chosen))

    @classmethod
    def without(cls, name: str) -> Option:
        """Returns the option that takes a part away, for a leave-one-out arm: a constant gate, or False.

        Args:
            name: The name of the knob of the part.

        Raises:
            InputError: The rule has no knob of this name, or the knob has no option that takes the part away.
        """
        options = cls.options()
        if name not in options:
            raise unknown("knob", name, options, where=f"rule '{cls.name}'")
        for option in options[name]:
            if option is False or (isinstance(option, Gate) and option.constant):
                return option
        raise InputError(
            f"rule '{cls.name}': '{name}' has no option that takes it away; write an arm for one of: "
            + ", ".join(map(str, options[name]))
        )

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if isinstance(value, Gate):
                raise TypeError(f"{cls.__name__}.{name} is a gate: declare it as `{name}: Gate = knob(...)`")
        if "transition" in vars(cls) and "transition" not in inspect.get_annotations(cls):
            raise TypeError(f"{cls.__name__}.transition must be annotated, as in `transition: Transition = SPLR`")
        if "operands" in vars(cls):
            names = list(inspect.signature(cls.operands).parameters)[1:4]
            if names != ["q", "k", "v"]:
                raise TypeError(f"{cls.__name__}.operands must take (self, q, k, v, ...), not {names}")


def _unpickled(kind: type[UpdateRule], values: Mapping[str, Option]) -> UpdateRule:
    """Makes a rule from pickled values, and replaces each value by the knob's option that equals it.

    The replacement is needed because a rule may test identity, as in `transition is SPLR`.
    """
    settings = {}
    for field in dataclasses.fields(kind):
        if field.name in values:
            value = values[field.name]
            options = field.metadata.get("options", (field.default,))
            settings[field.name] = next((o for o in options if type(o) is type(value) and o == value), value)
    return kind(**cast(Any, settings))


def _tuple(state: State | Tensor) -> State:
    return (state,) if isinstance(state, Tensor) else state


def _choose(value: object, options: tuple[Option, ...], *, where: str) -> Option:
    if isinstance(options[0], Gate):
        return _choose_gate(value, [o for o in options if isinstance(o, Gate)], where=where)
    for option in options:
        if (type(value) is type(option) and value == option) or str(option) == value:
            return option
    if type(options[0]) in (int, float) and type(value) in (int, type(options[0])):
        smallest = min(option for option in options if isinstance(option, int | float))
        kind = "whole number" if isinstance(options[0], int) else "number"
        most = MOST_KNOB if kind == "whole number" else math.inf
        if isinstance(value, int | float) and value > most:
            raise InputError(f"is at most {most:,}, not {value:,}", where=where, key=str(value))
        if isinstance(value, int | float) and smallest <= value < math.inf:
            return type(options[0])(value)  # type: ignore[call-arg, arg-type]
        raise InputError(f"takes a {kind} of at least {smallest}, not {value}", where=where, key=str(value))
    raise unknown("option", value, options, where=where)


def _choose_gate(value: object, options: list[Gate], *, where: str) -> Gate:
    kinds = {gate.kind: gate for gate in reversed(options)}
    if isinstance(value, Gate):
        value = value.spec()
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = {"const": {"value": value}}
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        wrong = InputError(f"takes one gate, like {options[0].spec()}, not {value!r}", where=where)
        raise wrong.with_fields(allowed=[*kinds])
    ((kind, numbers),) = value.items()
    if kind not in kinds:
        raise unknown("gate", kind, kinds, where=where)
    gate = kinds[kind]
    if kind == "const" and not isinstance(numbers, Mapping):
        numbers = {"value": numbers}
    if numbers is not None and not isinstance(numbers, Mapping):
        raise InputError(f"{where}: {kind} takes {{name: number}} with {[n for n, _ in gate.options]}, not {numbers!r}")
    return gate.remade(numbers or {}, where=where)
