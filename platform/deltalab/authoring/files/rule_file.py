"""Writes a rule at one setting of its knobs as a file: its equation, and only the code that this setting uses."""

import ast
import dataclasses
import inspect
import math
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from deltalab import gates, structure
from deltalab.authoring.files.scaffold import class_name
from deltalab.authoring.files.trace import (
    TIMES,
    Equation,
    Symbol,
    Untraceable,
    Writer,
    helpers_kept,
    locals_of,
    of_gate,
)
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import Fit, Operands, UpdateRule
from deltalab.structure import Transition

WIDTH = 120
NEUTRAL = {"beta": 1, "read": 1, "d": 0, "bonus": 0}
"""Maps an operand to its neutral constant. The code leaves out an operand that has this value."""


def write_rule(rule: UpdateRule, name: str, about: str) -> str:
    """Returns the text of a file whose class computes what `rule` does at its setting.

    Args:
        name: The name of the new rule.
        about: A paragraph for the docstring that says where the new rule comes from.

    Raises:
        InputError: The rule is outside the algebra, it carries more than its states, or its `operands` look at values
            or shapes.
    """
    if rule.transition is None or rule.carries:
        reason = "is outside the algebra" if rule.transition is None else "carries more than its states"
        raise InputError(f"rule '{rule.name}' {reason}: {_as_it_is(rule)}")
    try:
        return _RuleFile(rule, name, about).text()
    except Untraceable as error:
        raise InputError(
            f"the operands of rule '{rule.name}' cannot be written down: {error}; {_as_it_is(rule)}"
        ) from None


def _as_it_is(rule: UpdateRule) -> str:
    """Returns advice on how to use a rule that cannot be written."""
    default = type(rule)().spec()
    settings = "".join(f", {knob}: {value}" for knob, value in rule.spec().items() if value != default[knob])
    return f"copy its file, or take it in a study as {{name: {rule.name}{settings}}}"


class _RuleFile:
    """The parts of the file of a new rule."""

    def __init__(self, rule: UpdateRule, name: str, about: str) -> None:
        assert rule.transition is not None
        self.rule, self.name, self.about = rule, name, about
        self.transition: Transition = rule.transition
        self.module = sys.modules[type(rule).__module__]
        self.gates = {symbol: gate for symbol, gate in rule.gates.items() if gate.kind != "const"}
        gate_symbols = {symbol: of_gate(symbol, gate) for symbol, gate in rule.gates.items()}
        inputs = [Symbol("name", symbol, vector=True) for symbol in "qkv"]
        with helpers_kept(self.module), locals_of(type(rule).operands) as names:
            operands = rule.operands(*inputs, **gate_symbols)  # type: ignore[arg-type]
        self.fields = _fields(operands)
        self.fit = _fields(operands.fit) if operands.fit is not None else {}
        if operands.output is not None:
            self.fields["output"] = operands.output
        results = [value for value in [*self.fields.values(), *self.fit.values()] if isinstance(value, Symbol)]
        names_read = _names_read(results)
        names_read |= {gate.of for symbol, gate in self.gates.items() if symbol in names_read and gate.of is not None}
        self.gates = {symbol: gate for symbol, gate in self.gates.items() if symbol in names_read}
        self.writer = Writer(results, names, {"q", "k", "v", "self", *self.gates})

    def text(self) -> str:
        """Returns the text of the file."""
        body = self._class()
        helpers = self._definitions(body)
        code = "\n\n\n".join([*helpers, body, *self._functions(body)])
        title = f'"""{self.name}: {self.rule.name} at one setting of its knobs, as a rule of its own."""'
        after = "\n\n" if code.startswith(("@", "def", "class")) else "\n"
        text = f"{title}\n\n{self._imports(code)}{after}{code}\n"
        return text.replace("class CLASS(", f"class {class_name(self.name, 'rule', text)}(", 1)

    # --- the class ------------------------------------------------------------------------------------------

    def _class(self) -> str:
        """Returns the code of the class, with CLASS in place of its name."""
        operands = self._operands()
        lines = [
            "@dataclass(frozen=True, kw_only=True)",
            "class CLASS(UpdateRule):",
            *self._docstring(),
            "",
            f'    name: ClassVar[str] = "{self.name}"',
            *self._class_variables(),
            "",
            *self._transition(),
            *self._knobs(),
            *self._properties(),
            "",
            *operands,
        ]
        return "\n".join(lines)

    def _docstring(self) -> list[str]:
        """Returns the lines of the docstring."""
        equation = self._equation()
        lines = [line for formula in equation for line in _filled(formula, hanging="    ")]
        about = self.about.replace("\\", "/").replace('"', "'")  # \ and " could end the docstring
        lines += ["", *[line for paragraph in about.split("\n") for line in _filled(paragraph)]]
        lines[0] = f'    """{lines[0].strip()}'
        return [line.rstrip() for line in [*lines, '    """']]

    def _class_variables(self) -> list[str]:
        """Returns the lines of the class variables that concern gates of the new rule."""
        rule, lines = self.rule, []
        for name in ("per_step", "ignores"):
            symbols = {symbol for symbol in getattr(rule, name) if symbol in self.gates or symbol in "qkv"}
            if symbols:
                listing = ", ".join(f'"{symbol}"' for symbol in sorted(symbols))
                lines.append(f"    {name}: ClassVar[frozenset[str]] = frozenset({{{listing}}})")
        return lines

    def _transition(self) -> list[str]:
        """Returns the lines of the transition: a known one by its name, or a new one."""
        own_fields = _without_name(self.transition)
        for name, constant in vars(structure).items():
            if isinstance(constant, Transition) and _without_name(constant) == own_fields:
                return [f"    transition: Transition = {name}"]
        defaults = {field.name: field.default for field in dataclasses.fields(Transition)}
        arguments = [f'name="{self.name}"']
        for field, value in own_fields.items():
            if value != defaults[field]:
                arguments.append(f"{field}={_quoted(value)}")
        return _call("    transition: Transition = Transition", arguments)

    def _knobs(self) -> list[str]:
        """Returns the lines that declare the gates."""
        knobs = self.rule.knobs()
        return [f"    {symbol}: Gate = knob({self._gate(knobs[symbol])})" for symbol in self.gates]  # type: ignore[arg-type]

    def _gate(self, gate: Gate) -> str:
        """Returns code that calls the function that makes a gate, with the numbers that differ from its defaults."""
        assert gate.again is not None
        defaults = {name: parameter.default for name, parameter in inspect.signature(gate.again).parameters.items()}
        options = [(name, value) for name, value in gate.options if value != defaults[name]]
        arguments = ", ".join(f"{name}={int(value) if value == int(value) else value!r}" for name, value in options)
        maker = gate.again.__name__
        return f"{'gates.' if getattr(gates, maker, None) is gate.again else ''}{maker}({arguments})"

    def _properties(self) -> list[str]:
        """Returns the lines of the properties that differ from those of `UpdateRule`."""
        rule, lines = self.rule, []

        def declared(name: str, kind: str, value: str, arguments: str = "self", decorated: bool = True) -> None:
            lines.extend(["", *["    @property"] * decorated])
            lines.extend([f"    def {name}({arguments}) -> {kind}:", f"        return {value}"])

        if rule.features != "unit":
            declared("features", 'Literal["unit", "silu", "raw"]', f'"{rule.features}"')
        if not rule.silu_of_v and rule.features != "raw":
            declared("silu_of_v", "bool", "False")
        if rule.second_state:
            declared("second_state", "bool", "True")
        if rule.steps != self.transition.steps:
            declared("steps", "int", str(rule.steps))
        for name, width in (("key_width", "key_dim"), ("value_width", "value_dim")):
            size = getattr(rule, name)(Symbol("name", width))
            if not isinstance(size, Symbol) or size.form != "name":
                code = Writer([size], {}, set()).code(size) if isinstance(size, Symbol) else str(size)
                declared(name, "int", code, f"self, {width}: int", decorated=False)
        default_range = (1.0, 1.0) if self.transition.decay == "none" else (0.0, 1.0)
        if self.transition.low_rank != "none" or rule.eigenvalues != default_range:
            low, high = (_number(end) for end in rule.eigenvalues)
            declared("eigenvalues", "tuple[float, float]", f"({low}, {high})")
        return lines

    # --- operands -------------------------------------------------------------------------------------------

    def _operands(self) -> list[str]:
        """Returns the lines of the method `operands`."""
        symbols = [f"{symbol}: Tensor" for symbol in self.gates]
        arguments = ["self", "q: Tensor", "k: Tensor", "v: Tensor", *(["*", *symbols] if symbols else [])]
        head = f"    def operands({', '.join(arguments)}) -> Operands:"
        if len(head) > WIDTH:
            one_line = f"        {', '.join(arguments)}"
            packed = [one_line] if len(one_line) <= WIDTH else [f"        {argument}," for argument in arguments]
            head = "\n".join(["    def operands(", *packed, "    ) -> Operands:"])
        fields = [f"{name}={self._field(value)}" for name, value in self.fields.items() if self._is_given(name, value)]
        fit: list[str] = []
        if self.fit:
            arguments_of_fit = [
                f"{name}={self._field(value)}" for name, value in self.fit.items() if self._is_given(name, value)
            ]
            fit = _call("        fit = Fit", arguments_of_fit)
            fields.append("fit=fit")
        lines = [f"        {line}" for line in self.writer.lines]
        return [head, *lines, *fit, *_call("        return Operands", fields)]

    def _is_given(self, name: str, value: Any) -> bool:
        """Returns whether the code must give an operand, since its value is not the constant in `NEUTRAL`."""
        constant = value.parts[0] if isinstance(value, Symbol) and value.form == "number" else None
        return constant is None or constant != NEUTRAL.get(name)

    def _field(self, value: Any) -> str:
        """Returns an operand as code."""
        if isinstance(value, Symbol):
            return self.writer.full(value) if value.form == "number" else self.writer.code(value)
        if value is True:
            return "True"
        if inspect.isfunction(value):
            self.writer.functions[value.__name__] = value
            return value.__name__
        if dataclasses.is_dataclass(value):
            kind: Any = type(value)
            default = kind()
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            arguments = [f"{n}={_quoted(v)}" for n, v in fields.items() if v != getattr(default, n)]
            return f"{type(value).__name__}({', '.join(arguments)})"
        raise Untraceable(f"it makes {value!r}")

    # --- what the class uses --------------------------------------------------------------------------------

    def _definitions(self, body: str) -> list[str]:
        """Returns the code that stands before the class: constants, functions that make gates, and what these use."""
        return [text for name, text, function in self._own_code(body) if not function or name in self._makers()]

    def _functions(self, body: str) -> list[str]:
        """Returns the code that stands after the class: the other functions of the rule's own file that it uses."""
        return [text for name, text, function in self._own_code(body) if function and name not in self._makers()]

    def _makers(self) -> set[str]:
        """Returns the names of the functions that make gates, and of all that these functions use."""
        return {gate.again.__name__ for gate in self.gates.values() if gate.again is not None} | self._of_makers

    def _own_code(self, body: str) -> list[tuple[str, str, bool]]:
        """Returns (name, text, whether it is a function) of each definition in the rule's file that the class uses."""
        source = inspect.getsource(self.module)
        lines, tree = source.splitlines(), ast.parse(source).body
        defined: dict[str, tuple[str, ast.stmt]] = {}
        for i, node in enumerate(tree):
            names = [node.name] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [
                    name_node.id
                    for target in targets
                    for name_node in ast.walk(target)
                    if isinstance(name_node, ast.Name)
                ]
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            end = node.end_lineno or node.lineno
            following = tree[i + 1] if i + 1 < len(tree) else None
            if not isinstance(node, ast.FunctionDef) and isinstance(following, ast.Expr):  # the docstring of a constant
                end = following.end_lineno or end
            for name in names:
                defined[name] = "\n".join(lines[start - 1 : end]), node
        wanted = _names(body) & set(defined)
        while more := {name for user in wanted for name in _names(defined[user][0]) & set(defined)} - wanted:
            wanted |= more
        makers = {gate.again.__name__ for gate in self.gates.values() if gate.again is not None} & set(defined)
        while more := {name for user in makers for name in _names(defined[user][0]) & set(defined)} - makers:
            makers |= more
        self._of_makers = makers
        return [(n, text, isinstance(node, ast.FunctionDef)) for n, (text, node) in defined.items() if n in wanted]

    def _imports(self, code: str) -> str:
        """Returns the imports that the code needs: those of the contract, and those of the rule's own file."""
        module_of = {"dataclass": "dataclasses", "ClassVar": "typing", "Literal": "typing", "Tensor": "torch"}
        module_of |= {"gates": "deltalab", "Gate": "deltalab.gates", "ResidualState": "deltalab.structure"}
        module_of |= dict.fromkeys(("Fit", "Operands", "UpdateRule", "knob"), "deltalab.rule")
        module_of |= {name: "deltalab.structure" for name, value in vars(structure).items() if _is_transition(value)}
        whole_modules = {"math": "import math", "torch": "import torch", "F": "import torch.nn.functional as F"}
        for node in ast.parse(inspect.getsource(self.module)).body:
            if isinstance(node, ast.ImportFrom):
                module_of.update({alias.asname or alias.name: node.module or "" for alias in node.names})
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    statement = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                    whole_modules[alias.asname or alias.name] = statement
        used = _names(code)
        lines = {statement for name, statement in whole_modules.items() if name in used}
        modules: dict[str, set[str]] = {}
        for name, module in module_of.items():
            if name in used and name not in whole_modules:
                modules.setdefault(module, set()).add(name)
        lines |= {f"from {module} import {', '.join(_sorted(names))}" for module, names in modules.items()}
        groups: dict[int, list[str]] = {}
        for line in sorted(lines, key=lambda line: (line.startswith("from"), line.split()[1])):
            package = line.split()[1].split(".")[0]
            groups.setdefault(
                0 if package in sys.stdlib_module_names else 2 if package == "deltalab" else 1, []
            ).append(line)
        return "\n\n".join("\n".join(groups[group]) for group in sorted(groups)) + "\n"

    # --- the equation ---------------------------------------------------------------------------------------

    def _equation(self) -> list[str]:
        """Returns the lines of the equation."""
        t = "t" if self.transition.steps == 1 else "{t,i}"
        leaf_names = {"q": "q_t", "k": f"k_{t}", "v": f"v_{t}"}
        for symbol, gate in self.gates.items():
            index = t if symbol in self.rule.per_step else "t"
            leaf_names[symbol] = f"{symbol}_{index}" if gate.projected else symbol
        return _equation(self.transition, self.fields, self.fit, Equation(leaf_names, self.writer.written, t))


def _equation(transition: Transition, x: dict[str, Any], fit: dict[str, Any], write: Equation) -> list[str]:
    """Returns the recurrence as papers write it: a line for each state, the output, and each name's meaning."""
    t = write.t
    alpha, k, u = f"alpha_{t}", write(x["k"]), write(x["u"])
    if x["k"].form != "name":
        write.where[f"k'_{t} = {k}"] = None
        k = f"k'_{t}"
    u = f"({u})" if " " in u else u
    if "sign" in x:
        write.where[f"|{alpha}| and its sign by {write(x['sign'])}"] = None
    elif "g" in x:
        write.where[f"{alpha} = exp({write(x['g'])})"] = None

    def times(value: Any) -> str:
        is_one = value is None or (value.form == "number" and value.parts[0] == 1)
        return "" if is_one else f"{write(value, TIMES)} "

    def decayed(before: str, e: Any) -> str:
        """Returns a state after its decay and its low rank."""
        decay = {"none": "", "scalar": f"{alpha} ", "diagonal": f"diag({alpha}) "}[transition.decay]
        if transition.low_rank == "none":
            return f"{decay}{before}"
        if transition.low_rank == "tied":
            erased = f"{times(e)}{k} {k}^T"
        else:
            erased = f"{_vector(write(-x['a']))} {_vector(write(x['b']))}^T"
        if transition.decay == "none":
            return f"(I - {erased}) {before}"
        if transition.reads == "state":
            return f"({decay if transition.decay == 'diagonal' else f'{alpha} I '}- {erased}) {before}"
        return f"{alpha} (I - {erased}) {before}" if transition.decay == "scalar" else f"(I - {erased}) {decay}{before}"

    steps = transition.steps
    before, state = ("S_{t-1}", "S_t") if steps == 1 else ("S_{t,i-1}", "S_{t,i}")
    lines = [f"{state} = {decayed(before, x.get('e'))} + {times(x.get('beta'))}{k} {u}^T"]
    if steps > 1:
        lines.append(f"i = 1 .. {steps},   S_{{t,0}} = S_{{t-1}},   S_t = S_{{t,{steps}}}")
    r, read = write(x["r"], TIMES), times(x.get("read"))
    if "d" in x:
        r, read = f"({read}{r} - {times(x['d'])}{k})", ""
    if fit:
        error, loss = f"{write(fit['v'])} - S_{{t-1}}^T {k}", fit["residual"]
        residuals = {
            "l2": error,
            "huber": f"clip({error}, {-loss.clip:g}, {loss.clip:g})",
            "log_cosh": f"tanh({error})",
        }
        lines.append(f"r_t = {residuals[loss.loss]}")
        lines.append(f"R_t = {decayed('R_{t-1}', fit.get('e', x.get('e')))} + {times(fit['strength'])}{k} r_t^T")
        lines.append(f"o_t = scale ({read}S_{{t-1}}^T {r} + {times(fit.get('read'))}R_t^T {write(fit['r'], TIMES)})")
    elif "bonus" in x:
        lines.append(f"o_t = scale ({read}S_{{t-1}}^T {r} + {times(x['bonus'])}{u})")
    else:
        lines.append(f"o_t = scale {read}{'S_t' if transition.output == 'after' else 'S_{t-1}'}^T {r}")
    return [*lines, *write.where]


# --- text ---------------------------------------------------------------------------------------------------


def _vector(text: str) -> str:
    """Returns a factor, in brackets if it is a sum or a product."""
    return f"({text})" if " " in text else text


def _fields(x: Operands | Fit) -> dict[str, Any]:
    """Returns the operands that are given, in the order of their declaration."""
    apart = ("output", "carry", "fit")
    return {
        name: value for name, value in vars(x).items() if value is not None and value is not False and name not in apart
    }


def _names_read(results: Iterable[Symbol]) -> set[str]:
    """Returns the names of the inputs and gates that some expressions read."""
    names: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = list(results)
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, tuple | list):
            waiting += value
        elif isinstance(value, Symbol) and id(value) not in seen:
            seen.add(id(value))
            names |= {value.parts[0]} if value.form == "name" else set()
            waiting += value.parts
    return names


def _names(code: str) -> set[str]:
    """Returns the names in a piece of code."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def _is_transition(value: object) -> bool:
    """Returns whether a value is a transition, or the class of transitions."""
    return value is Transition or isinstance(value, Transition)


def _without_name(transition: Transition) -> dict[str, Any]:
    """Returns the fields of a transition except its name, to compare transitions.

    Without a decay or a low rank, `reads` does not matter and is set to "state".
    """
    fields = {field: value for field, value in vars(transition).items() if field != "name"}
    if transition.decay == "none" or transition.low_rank == "none":
        fields["reads"] = "state"
    return fields


def _quoted(value: object) -> str:
    """Returns a text or a number as code."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _number(end: float) -> str:
    """Returns a number as code. An infinite number is written math.inf or -math.inf."""
    return repr(float(end)) if math.isfinite(end) else "math.inf" if end > 0 else "-math.inf"


def _call(before: str, arguments: list[str]) -> list[str]:
    """Returns a call on one line if it fits, else with one argument on each line."""
    line = f"{before}({', '.join(arguments)})"
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(before) - len(before.lstrip()))
    return [f"{before}(", *(f"{indent}    {argument}," for argument in arguments), f"{indent})"]


def _filled(text: str, hanging: str = "") -> list[str]:
    """Returns text in lines of at most `WIDTH` letters."""
    return textwrap.wrap(
        text,
        WIDTH - 1,
        initial_indent="    ",
        subsequent_indent=f"    {hanging}",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _sorted(names: Iterable[str]) -> list[str]:
    """Sorts names as ruff sorts imported names: constants, classes, functions."""
    return sorted(
        names, key=lambda name: (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)
    )
