"""All checks of a rule. Each check catches a defect that published code of rules has had, or that is easy to write.

A check measures a rule in one setting of its knobs and yields figures. The table `CHECKS` at the end gives each check
its limit. The measurements are in the other modules of this package.
"""

from collections.abc import Callable
from dataclasses import dataclass

from deltalab.authoring.check import Check
from deltalab.authoring.inputs import learned
from deltalab.authoring.rule_checks import (
    form_checks,
    independence_checks,
    number_checks,
    stability_checks,
    use_checks,
    wide_checks,
)
from deltalab.authoring.rule_checks.rule_runs import EXACT, combinations
from deltalab.gates import Gate
from deltalab.rule import UpdateRule
from deltalab.structure import Transition


@dataclass(frozen=True)
class RuleCheck(Check[UpdateRule]):
    """A check of a rule.

    Attributes:
        settings: Returns the settings to measure: the rule, and the rule with other options of its knobs.
        only: Returns whether the check applies to a setting.
        slow: Whether a quick run leaves the check out.
        seconds: The least time before the check tries no further settings.
    """

    settings: Callable[[UpdateRule], list[UpdateRule]] = lambda rule: rule.variants()
    only: Callable[[UpdateRule], bool] = lambda rule: True
    slow: bool = False
    seconds: float = 0.0


def _declared(rule: UpdateRule) -> list[UpdateRule]:
    """Returns one setting: the rule with the default of every knob."""
    return [type(rule)()]


def _knobs_together(rule: UpdateRule) -> list[UpdateRule]:
    """Returns the settings of `combinations` with more than one knob turned."""
    variants = rule.variants()
    return [setting for setting in combinations(rule) if setting not in variants]


def _recurrences(rule: UpdateRule) -> list[UpdateRule]:
    """Returns the rule's variants, without those that differ by a gate of the same shape and range alone."""

    def recurrence(setting: UpdateRule) -> tuple[object, ...]:
        values = (setting.gates.get(name, value) for name, value in setting.knobs().items())
        return tuple((v.per, v.low, v.high, v.features) if isinstance(v, Gate) else v for v in values)

    return list({recurrence(setting): setting for setting in reversed(rule.variants())}.values())[::-1]


def _gate_ranges(rule: UpdateRule) -> list[UpdateRule]:
    """Returns the settings of `_recurrences` that differ by the range of a gate, or by the transition, if at all."""
    chosen = {name for name, value in rule.knobs().items() if isinstance(value, Gate | Transition)}
    return [
        setting
        for setting in _recurrences(rule)
        if {name for name in rule.options() if getattr(setting, name) != getattr(rule, name)} <= chosen
    ]


def _has_gates(rule: UpdateRule) -> bool:
    """Returns whether the rule has gates that are not constant."""
    return bool(learned(rule))


def _is_algebraic(rule: UpdateRule) -> bool:
    """Returns whether the rule belongs to the algebra: whether it has a transition."""
    return rule.transition is not None


def _has_one_form(rule: UpdateRule) -> bool:
    """Returns whether the rule states its equation only once.

    Such a rule is outside the algebra, and has neither a `step` nor a kernel of its own.
    """
    return rule.transition is None and not form_checks.has_step(rule) and not rule.brings_kernel


CHECKS = (
    RuleCheck(
        "repetition",
        independence_checks.repetition,
        0.0,
        "the code draws random numbers, or keeps something between calls",
        mend="draw fixed numbers from a generator with a seed of its own",
        settings=combinations,
    ),
    RuleCheck(
        "rows of the batch",
        independence_checks.rows_of_the_batch,
        1e-12,
        "a sum, mean, norm or index goes over the batch",
        mend="reduce over channels alone: dimension 0 is the batch",
        settings=combinations,
    ),
    RuleCheck(
        "heads",
        independence_checks.heads,
        1e-12,
        "a value of one head is used for another, or a sum, mean or norm goes over the heads",
        mend="keep dimension 2 of q, k, v and of gates; what differs between heads is a constant gate",
        settings=combinations,
    ),
    RuleCheck(
        "causality of values",
        independence_checks.causality_of_values,
        1e-12,
        "the output of a token depends on later tokens",
        settings=combinations,
    ),
    RuleCheck(
        "causality of gradients",
        independence_checks.causality_of_gradients,
        0.0,
        "the output of a token depends on later tokens",
        settings=combinations,
    ),
    RuleCheck(
        "initial state",
        use_checks.initial_state,
        use_checks.FAINT,
        "the given state is not read",
        at_least=True,
        settings=_declared,
    ),
    RuleCheck(
        "backends",
        form_checks.backends,
        EXACT,
        "the parallel and the token-by-token form compute different functions",
    ),
    RuleCheck(
        "knobs together",
        form_checks.together,
        EXACT,
        "the code is wrong where two knobs are turned together",
        settings=_knobs_together,
        slow=True,
    ),
    RuleCheck(
        "long chunks",
        form_checks.lengths,
        1e-8,
        "the code takes another path in long sequences, or an internal chunk is wrong",
        slow=True,
    ),
    RuleCheck(
        "slow decays",
        wide_checks.slow_decays,
        1e-8,
        "the code drops, or weighs otherwise, what is older than some number of tokens",
        settings=_recurrences,
        slow=True,
    ),
    RuleCheck(
        "every length",
        wide_checks.every_length,
        1e-8,
        "the code pads or cuts some lengths wrongly",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "far tokens",
        wide_checks.far_tokens,
        1e-8,
        "the code takes another path in sequences of so many tokens",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "packed sequences",
        wide_checks.packed,
        1e-9,
        "the rule lets one sequence depend on another, or keeps something between calls",
        settings=_recurrences,
    ),
    RuleCheck(
        "other sizes",
        form_checks.other_sizes,
        1e-9,
        "the code is right at some sizes of H, K and V alone",
    ),
    RuleCheck(
        "kernel",
        form_checks.kernel,
        EXACT,
        "`fused` computes another function than the equation",
        settings=combinations,
        only=lambda rule: rule.brings_kernel,
        slow=True,
        seconds=2.0,  # Triton's interpreter is slow, and a kernel's paths differ by setting
    ),
    RuleCheck(
        "step",
        form_checks.step,
        1e-9,
        "this form and `step` are two different equations",
        mend="see which of the two is the equation of the docstring",
        settings=combinations,
        only=form_checks.has_step,
    ),
    RuleCheck("nothing independent", form_checks.nothing_independent, 0.0, "", settings=_declared, only=_has_one_form),
    RuleCheck(
        "state carry",
        form_checks.state_carry,
        EXACT,
        "the given state is not used, or it lacks values that later tokens need",
        settings=combinations,
    ),
    RuleCheck(
        "gradients",
        number_checks.gradients,
        number_checks.GRADIENTS,
        "a `detach`, a `no_grad` or a backward written by hand that misses a term, a factor or a sign",
        mend="compare `backward` with the derivative of `forward`, term by term",
        settings=combinations,
    ),
    RuleCheck(
        "gradients at other sizes",
        number_checks.gradients_at_other_sizes,
        number_checks.GRADIENTS,
        "a backward that is wrong at these sizes or values",
        slow=True,
    ),
    RuleCheck(
        "extreme gates",
        number_checks.extreme_gates,
        0.0,
        "the code divides by a decay, which overflows",
        only=_has_gates,
        settings=combinations,
    ),
    RuleCheck(
        "gate ranges",
        number_checks.gate_ranges,
        0.0,
        "the parameterization computes values outside its declared range",
        only=_has_gates,
    ),
    RuleCheck(
        "gate gradients",
        number_checks.gate_gradients,
        0.0,
        "an exp, a division or a root in the gate overflows, also in a branch that `where` leaves out",
        mend="clamp the argument first, or take softplus and logsigmoid of torch.nn.functional",
        only=_has_gates,
    ),
    RuleCheck(
        "eigenvalues",
        number_checks.eigenvalues,
        1e-9,
        "the erase strength exceeds what the range allows",
        only=_is_algebraic,
        settings=combinations,
    ),
    RuleCheck(
        "channels",
        use_checks.channels,
        use_checks.FAINT,
        "the code does not read all of its inputs",
        at_least=True,
        settings=combinations,
    ),
    RuleCheck(
        "gate liveness",
        use_checks.gate_liveness,
        use_checks.LIVE,
        "a later normalization cancels the gate, or the rule does not use it, or it hardly changes",
        at_least=True,
        mend="use it, or refuse this combination of options with an InputError in `__post_init__`",
        settings=combinations,
        only=_has_gates,
    ),
    RuleCheck(
        "knob options",
        use_checks.knob_options,
        use_checks.SAME,
        "the rule does not use the knob, or both options are one function",
        at_least=True,
        settings=_declared,
    ),
    RuleCheck(
        "twin options",
        use_checks.twin_options,
        use_checks.SAME,
        "two knobs do the same in these options, so that a study compares a rule with itself",
        at_least=True,
        mend="leave one of the options out, or refuse it by an InputError",
        settings=_declared,
    ),
    RuleCheck(
        "spec",
        use_checks.spec,
        0.0,
        "`__post_init__` changes a knob, or two options have the same text",
        settings=combinations,
    ),
    RuleCheck(
        "scale",
        use_checks.scale,
        0.0,
        "`mix` does not use `scale`, or has K ** -0.5 in its place",
        at_least=True,
        only=lambda rule: rule.transition is None,
    ),
    RuleCheck(
        "precision",
        number_checks.precision,
        number_checks.BF16,
        "the rule keeps the state, a decay or a sum over tokens in bf16, or takes another path in this dtype",
        mend="compute in torch.promote_types(v.dtype, torch.float32)",
    ),
    RuleCheck(
        "long sequences",
        number_checks.long_sequences,
        0.0,
        "the state grows without bound",
        mend="subtract sums before you take exp, and keep the transition's eigenvalues in [-1, 1]",
        slow=True,
    ),
    RuleCheck(
        "products of steps",
        stability_checks.products,
        number_checks.MOST_GROWTH,
        "the steps stretch the state in a part of the gates' declared ranges",
        mend="bound the gates: at a momentum eta, for example, a delta rule needs beta <= 2 (1 - eta)^2 / (1 + eta)",
        settings=_gate_ranges,
        slow=True,
    ),
    RuleCheck(
        "zeros",
        number_checks.zeros,
        0.0,
        "a division by a norm of 0, or the root or logarithm of 0",
        mend="add an eps, as F.normalize does",
        settings=combinations,
    ),
    RuleCheck(
        "long forms",
        wide_checks.long_forms,
        1e-8,
        "the code takes another path in long sequences, or an internal chunk is wrong",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "wide channels",
        wide_checks.wide_channels,
        use_checks.FAINT,
        "the code does not read all channels at these widths",
        at_least=True,
        slow=True,
    ),
    RuleCheck(
        "wide precision",
        wide_checks.wide_precision,
        5e-4,
        "the code rounds to another dtype at these widths",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "many rows and heads",
        wide_checks.many_rows_and_heads,
        1e-12,
        "the code takes another path with many sequences or heads, and mixes them there",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "large values",
        wide_checks.large_values,
        1e-8,
        "the code clamps numbers, or takes another path, where values are large",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "uneven sequences",
        wide_checks.uneven_sequences,
        1e-9,
        "one look at all numbers, such as their mean, decides for each sequence and token",
        settings=_declared,
        slow=True,
    ),
    RuleCheck("other numbers", wide_checks.other_numbers, 0.0, "the code takes the listed numbers alone"),
    RuleCheck("sizes", form_checks.sizes, 0.0, "a shape or a dtype breaks the contract", settings=combinations),
    RuleCheck(
        "token by token",
        form_checks.token_by_token,
        EXACT,
        "the state does not carry over, or T = 1 is a special case",
    ),
)
