"""The contract of an update rule: data (transition, gates, knobs) and one method.

Per head, with state S [K, V], keys of unit norm and a scale that defaults to K ** -0.5:

    S_t = D_t S_{t-1} + a_t (b_t^T X_{t-1}) + k_t u_t^T        X = S_{t-1} or D_t S_{t-1}
    o_t = scale * S_t^T r_t, or scale * (S_{t-1}^T r_t + bonus_t u_t)

`UpdateRule.operands` returns the vectors, `structure.Transition` says how they act, and `Fit` adds a second state
that learns from the first one's error. Vectors may depend on a small `carry` from token to token, and the state may
have other widths than keys and values. A rule of several recurrences is a `passes.Passes`. Any other rule overrides
`mix` and `initial_state` instead; its knobs, gates, layer, checks and search space work the same.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast, final

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
from deltalab.structure import ResidualState, Transition

State: TypeAlias = tuple[Tensor, ...]
MOST_KNOB = 2**20
"""The most that a whole number among a rule's knobs may be."""
"""What a rule remembers of a sequence. In the algebra: S [B, H, K, V], R like it where there is a `Fit`, the carry."""

Option: TypeAlias = Transition | Gate | str | float | bool


@dataclass(frozen=True)
class Fit:
    """The operands of a second state, R, under the same transition and with the same keys (RLA, RDN).

        R_t = D_t R_{t-1} - e_t k_t (k_t^T X) + strength_t k_t residual(v_t - S_{t-1}^T k_t)^T
        o_t = scale * (S_{t-1}^T r_t of the first + R_t^T r_t of this)

    In o_t, r_t of the first is `Operands.r`, and r_t of this is the `r` below.

    r: [B, T, H, K]. v: the value that S should have predicted, [B, T, H, V]. strength: [B, T, H].
    read: as in `Operands`. g, e: of R; those of S where None.
    """

    residual: ResidualState
    r: Tensor
    v: Tensor
    strength: Tensor
    read: Tensor | None = None
    g: Tensor | None = None
    e: Tensor | None = None

    def operands(self, first: "Operands") -> "Operands":
        """The operands of R, except u: u is the first state's prediction error, known only after its scan."""
        g = first.g if self.g is None else self.g
        return dataclasses.replace(first, r=self.r, g=g, e=self.e, beta=self.strength, read=self.read, d=None, fit=None)


@dataclass(frozen=True)
class Operands:
    """The vectors and scalars of every step of the recurrence.

    K and V are the widths of the state: `UpdateRule.key_width` and `value_width`. With n steps per token
    (`Transition.steps`), all but r, read and bonus have n T rows in place of T: a token's steps follow each other.

    r: read vector [B, T, H, K]; k: write key [B, T, H, K]; u: value to write [B, T, H, V].
    beta, read, d: [B, T, H], and 1, 1 and 0 where None. The step writes beta_t u_t and reads with read_t r_t - d_t k_t.
        Kept as separate scalars: a kernel can apply them for free. d needs a single step per token.
    g: log-decay, <= 0, where the transition decays: [B, T, H] if scalar, [B, T, H, K] if diagonal.
    sign: 1 or -1 in the shape of g, so that D_t = sign_t exp(g_t); 1 where None. Not with a fit.
    e: erase strength [B, T, H], where the low rank is tied to k.
    a, b: [B, T, H, K] where the low rank is free: a_t (b_t^T X) is added.
    bonus: [B, T, H], where the output reads S_{t-1}: bonus_t u_t is added to it.
    fit: the operands of a second state, if there is one; the first state is then read before it is written.
    carry: what `operands` needs for the tokens that follow, in the form of `UpdateRule.carried`.
    output: makes o [B, T, H, v's width] of what is read, [B, T, H, V] with the scale; for a normalizer, say.
    """

    r: Tensor
    k: Tensor
    u: Tensor
    g: Tensor | None = None
    e: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    beta: Tensor | None = None
    read: Tensor | None = None
    d: Tensor | None = None
    fit: Fit | None = None
    sign: Tensor | None = None
    bonus: Tensor | None = None
    carry: tuple[Tensor, ...] = ()
    output: Callable[[Tensor], Tensor] | None = None

    def changed(self, **changes: Any) -> "Operands":
        """`dataclasses.replace` in a tenth of the time: operands check nothing when they are made."""
        if torch.compiler.is_compiling():
            return dataclasses.replace(self, **changes)
        new = object.__new__(type(self))
        vars(new).update(vars(self), **changes)
        return new

    def resolved(self) -> "Operands":
        """The same with beta, read and d multiplied into the vectors."""
        u = self.u if self.beta is None else self.beta[..., None] * self.u
        r = self.r if self.read is None else self.read[..., None] * self.r
        r = r if self.d is None else r - self.d[..., None] * self.k
        fit = self.fit
        if fit is not None and fit.read is not None:
            fit = dataclasses.replace(fit, r=fit.read[..., None] * fit.r, read=None)
        return dataclasses.replace(self, r=r, u=u, beta=None, read=None, d=None, fit=fit)


def knob(default: Option, *others: Option) -> Any:
    """A field of a rule that a study may vary. The default is the published method's; `rule check` tries every option.

    A study may choose a listed option. A gate of a listed kind may take other numbers. A study may set a number
    knob to any value not below the smallest listed option.
    """
    return dataclasses.field(default=cast(Any, default), metadata={"options": (default, *others)})


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """A recurrent update rule. Subclass it as a frozen, keyword-only dataclass whose fields are `knob`s.

    name: how YAML names the rule. paper: where it comes from, empty for a rule without a paper.
    per_step: gates with a value for each of a token's steps.
    ignores: inputs of which some or all channels have no effect, such as "q" or a gate, so that `rule check` allows it.
    eigenvalues: (low, high), the closed interval of the eigenvalues of each state's transition, for unit-norm keys.
        With one step per token and no free low rank, eigenvalues must be real and in the interval. Otherwise only their
        real parts must be in it, and no modulus may exceed max(|low|, |high|).
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""

    per_step: ClassVar[frozenset[str]] = frozenset()
    ignores: ClassVar[frozenset[str]] = frozenset()

    transition: Transition | None = None
    """None for a rule outside the algebra."""

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        """How the layer treats q and k: `unit` is SiLU and unit norm, `silu` is SiLU, `raw` leaves them as they are."""
        return "unit"

    @property
    def silu_of_v(self) -> bool:
        """Whether v gets SiLU where q and k do; with `raw` features it never does."""
        return True

    @property
    def steps(self) -> int:
        """Keys and values that the layer projects for each token.

        Those of the transition; fewer where `operands` makes several writes of one key.
        """
        return self.transition.steps if self.transition is not None else 1

    def key_width(self, key_dim: int) -> int:
        """The width of the state's keys where `operands` maps keys of width `key_dim` to others."""
        return key_dim

    def value_width(self, value_dim: int) -> int:
        """The width of the state's values where `operands` maps values of width `value_dim` to others."""
        return value_dim

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The carry of an empty sequence for inputs like k and v: tensors that begin with [B, H], none by default.

        A rule that overrides it gets `carry=` in `operands`, and returns the next one in `Operands.carry`.
        """
        return ()

    @property
    def grouped(self) -> bool:
        """Whether `mix` takes k and v of fewer heads than q, and keeps them so; the layer repeats them otherwise.

        The built-in attention does. It cannot say so in its own file, whose hash is part of the identity of every trial
        that was run with it.
        """
        return self.name == "attention"

    @property
    def second_state(self) -> bool:
        """Whether the operands have a `Fit`, so that the state is a pair."""
        return False

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """[1, 1] without decay or low rank, [0, 1] with decay alone; a rule with a low rank declares its own."""
        if self.transition is None or self.transition.low_rank != "none":
            raise NotImplementedError(f"rule '{self.name}' has a low rank: declare its eigenvalues")
        return (1.0, 1.0) if self.transition.decay == "none" else (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **gates: Any) -> Operands:
        """The operands of the recurrence.

        q, k [B, T, H, K] of unit norm; v [B, T, H, V]; each gate by its symbol in the shape of its `per`. With n
        `steps`, k, v and gates `per` step have n T rows. A rule with a carry also takes `carry`.
        """
        raise NotImplementedError(f"rule '{self.name}' gives neither operands nor mix")

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Any
    ) -> tuple[Tensor, State | Tensor]:
        """Computes o [B, T, H, V], scale included, and the next state.

        For a rule outside the algebra. Must accept any T >= 1.

        state: one tensor or a tuple, as `initial_state` returns it; the next state has the same form.
        """
        raise NotImplementedError(f"rule '{self.name}' gives neither operands nor mix")

    def step(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **given: Any) -> tuple[Tensor, State | Tensor]:
        """One token as the paper's equation stands: a second statement, which `rule check` holds all else to.

        Takes q [B, H, K], k [B, H, K], v [B, H, V], and by name scale, state and each gate without its time axis. With
        n `steps`, k and v are [B, n, H, K] and [B, n, H, V], and gates `per` step [B, n, H].
        state: the tuple that `scan` returns. Returns o [B, H, V], scale included, and the next state.
        """
        raise NotImplementedError(f"rule '{self.name}' gives no step")

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Any
    ) -> tuple[Tensor, State | Tensor]:
        """The rule's own kernel, with the arguments of `mix`. `rule check` compares it with the reference, in fp64 too
        if it takes fp64.
        """
        raise NotImplementedError(f"rule '{self.name}' brings no kernel of its own")

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        """A reason for an error message if `fused` cannot handle this setting or these inputs; else None."""
        return None if self.brings_kernel else f"rule '{self.name}' brings no Triton kernel"

    def initial_state(self, k: Tensor, v: Tensor) -> State | Tensor:
        """An empty state for inputs like k [B, T, H, K] and v [B, T, H, V], in at least fp32.

        One tensor [B, H, K, V], or two in a tuple with a second state. A rule outside the algebra may return any
        tensor or tuple of tensors that begin with [B, H]. The carry is not in it.
        """
        dtype = torch.promote_types(v.dtype, torch.float32)
        widths = self.key_width(k.shape[-1]), self.value_width(v.shape[-1])
        empty = v.new_zeros(v.shape[0], v.shape[2], *widths, dtype=dtype)
        return (empty, empty.clone()) if self.second_state else empty

    # The rest is derived from the declaration; a rule does not override it.

    @final
    def start(self, k: Tensor, v: Tensor) -> State:
        """`initial_state` and the carry as a tuple."""
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
        """`mix`, or `fused`, with states as tuples; from an empty state where it is None."""
        # A state of one tensor alone does not tell whether the rule wants it in a tuple.
        own = self.initial_state(k, v) if state is None or len(state) == 1 else state
        given = own if state is None else state[0] if isinstance(own, Tensor) else state
        o, after = (self.fused if fused else self.mix)(q, k, v, gates, scale=scale, state=given)
        return o, _tuple(after)

    @property
    def states(self) -> int:
        """How many tensors of a state are states of the recurrence; the rest is the carry."""
        return 2 if self.second_state else 1

    @property
    def carries(self) -> bool:
        return type(self).carried is not UpdateRule.carried

    @property
    def brings_kernel(self) -> bool:
        return type(self).fused is not UpdateRule.fused

    @property
    def gates(self) -> dict[str, Gate]:
        """The gates by their symbols, in order of declaration.

        A log-decay `g` has a value for each channel where the transition decays diagonally. A gate that `per_step`
        names has one for each of a token's steps.
        """
        found = {name: value for name, value in self.knobs().items() if isinstance(value, Gate)}
        for name, gate in found.items():
            if gate.per == "token" and name in self.per_step:
                found[name] = dataclasses.replace(gate, per="step")
            if gate.per == "token" and name == "g" and self.transition and self.transition.decay == "diagonal":
                found[name] = dataclasses.replace(gate, per="channel")
        return found

    def knobs(self) -> dict[str, Option]:
        """The value of each knob."""
        return {name: getattr(self, name) for name in self.options()}

    @classmethod
    def options(cls) -> dict[str, tuple[Option, ...]]:
        """The options of each knob, the default first."""
        # dataclasses.fields(cls) would do, but torch.compile does not take it.
        return {f.name: f.metadata["options"] for f in cls.__dataclass_fields__.values() if "options" in f.metadata}

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def spec(self) -> dict[str, Any]:
        """The rule as YAML says it, every knob spelled out."""
        plain = {
            name: v.spec() if isinstance(v, Gate) else str(v) if isinstance(v, Transition) else v
            for name, v in self.knobs().items()
        }
        return {"name": self.name, **plain}

    def variants(self) -> list[Self]:
        """The rule itself, then with one knob at another option, for all that the rule accepts."""
        turned = [self]
        for name, options in self.options().items():
            for option in options:
                if option != getattr(self, name):
                    with suppress(InputError):  # an option that needs another knob turned too
                        turned.append(dataclasses.replace(self, **cast(Any, {name: option})))
        return turned

    def turned(self, other: Self) -> str:
        """The knobs of `other` that differ from this rule's, for people: `d=const(value=0)`."""
        changes = [f"{n}={getattr(other, n)}" for n in self.options() if getattr(self, n) != getattr(other, n)]
        return ", ".join(changes) or "as declared"

    @classmethod
    def configured(cls, knobs: Mapping[str, object]) -> Self:
        """The rule with knobs as YAML gives them.

        Raises `InputError` for a knob, an option or a number that the rule does not take.
        """
        options = cls.options()
        chosen: dict[str, Option] = {}
        for name, given in knobs.items():
            if name not in options:
                raise unknown("knob", name, options, where=f"rule '{cls.name}'")
            chosen[name] = _choose(given, options[name], where=f"{cls.name}.{name}")
        return cls(**cast(Any, chosen))

    @classmethod
    def without(cls, name: str) -> Option:
        """The option that takes a part away, for a leave-one-out arm: a constant gate, or False.

        Raises `InputError` where the rule has no such knob, or the knob has no such option.
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
            taken = list(inspect.signature(cls.operands).parameters)[1:4]
            if taken != ["q", "k", "v"]:
                raise TypeError(f"{cls.__name__}.operands must take (self, q, k, v, ...), not {taken}")


def _unpickled(kind: type[UpdateRule], given: Mapping[str, Option]) -> UpdateRule:
    """The rule with its own options where equal ones were pickled: a rule may ask whether its transition `is` SPLR."""
    own = {}
    for field in dataclasses.fields(kind):
        if field.name in given:
            value = given[field.name]
            options = field.metadata.get("options", (field.default,))
            own[field.name] = next((o for o in options if type(o) is type(value) and o == value), value)
    return kind(**cast(Any, own))


def _tuple(state: State | Tensor) -> State:
    return (state,) if isinstance(state, Tensor) else state


def _choose(given: object, options: tuple[Option, ...], *, where: str) -> Option:
    if isinstance(options[0], Gate):
        return _choose_gate(given, [o for o in options if isinstance(o, Gate)], where=where)
    for option in options:
        if (type(given) is type(option) and given == option) or str(option) == given:
            return option
    if type(options[0]) in (int, float) and type(given) in (int, type(options[0])):
        smallest = min(option for option in options if isinstance(option, int | float))
        what = "whole number" if isinstance(options[0], int) else "number"
        most = MOST_KNOB if what == "whole number" else math.inf
        if isinstance(given, int | float) and given > most:
            raise InputError(f"{where}: is at most {most:,}, not {given:,}")
        if isinstance(given, int | float) and smallest <= given < math.inf:
            return type(options[0])(given)  # type: ignore[call-arg, arg-type]
        raise InputError(f"{where}: takes a {what} of at least {smallest}, not {given}")
    raise unknown("option", given, options, where=where)


def _choose_gate(given: object, options: list[Gate], *, where: str) -> Gate:
    kinds = {gate.kind: gate for gate in reversed(options)}
    if isinstance(given, Gate):
        given = given.spec()
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = {"const": {"value": given}}
    if isinstance(given, str):
        given = {given: {}}
    if not isinstance(given, Mapping) or len(given) != 1:
        raise InputError(f"{where}: takes one gate, like {options[0].spec()}, not {given!r}")
    ((kind, numbers),) = given.items()
    if kind not in kinds:
        raise unknown("gate", kind, kinds, where=where)
    gate = kinds[kind]
    if kind == "const" and not isinstance(numbers, Mapping):
        numbers = {"value": numbers}
    if numbers is not None and not isinstance(numbers, Mapping):
        raise InputError(f"{where}: {kind} takes {{name: number}} with {[n for n, _ in gate.options]}, not {numbers!r}")
    return gate.remade(numbers or {}, where=where)
