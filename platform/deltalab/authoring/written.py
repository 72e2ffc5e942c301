"""A rule at one setting of its knobs as a file of its own: only what this setting uses, with its own equation."""

import ast
import dataclasses
import inspect
import math
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from deltalab import gates, structure
from deltalab.authoring.scaffold import class_name
from deltalab.authoring.trace import TIMES, Equation, Symbol, Untraceable, Writer, helpers_kept, locals_of, of_gate
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import Fit, Operands, UpdateRule
from deltalab.structure import Transition

WIDTH = 120
NEUTRAL = {"beta": 1, "read": 1, "d": 0, "bonus": 0}
"""The operands that a constant leaves out."""


def write_rule(rule: UpdateRule, name: str, about: str) -> str:
    """The text of a rule's file, whose class computes what `rule` does.

    name: of the new rule. about: where it comes from, a paragraph of the docstring.
    Raises `InputError` for a rule outside the algebra, one that carries more than its states, and one whose `operands`
    look at values or shapes.
    """
    if rule.transition is None or rule.carries:
        why = "is outside the algebra" if rule.transition is None else "carries more than its states"
        raise InputError(f"rule '{rule.name}' {why}: {_as_it_is(rule)}")
    try:
        return _Written(rule, name, about).text()
    except Untraceable as error:
        raise InputError(
            f"the operands of rule '{rule.name}' cannot be written down: {error}; {_as_it_is(rule)}"
        ) from None


def _as_it_is(rule: UpdateRule) -> str:
    default = type(rule)().spec()
    turned = "".join(f", {knob}: {value}" for knob, value in rule.spec().items() if value != default[knob])
    return f"copy its file, or take it in a study as {{name: {rule.name}{turned}}}"


class _Written:
    def __init__(self, rule: UpdateRule, name: str, about: str) -> None:
        assert rule.transition is not None
        self.rule, self.name, self.about = rule, name, about
        self.transition: Transition = rule.transition
        self.module = sys.modules[type(rule).__module__]
        self.gates = {symbol: gate for symbol, gate in rule.gates.items() if gate.kind != "const"}
        given = {symbol: of_gate(symbol, gate) for symbol, gate in rule.gates.items()}
        inputs = [Symbol("name", symbol, vector=True) for symbol in "qkv"]
        with helpers_kept(self.module), locals_of(type(rule).operands) as names:
            found = rule.operands(*inputs, **given)  # type: ignore[arg-type]
        self.fields = _fields(found)
        self.fit = _fields(found.fit) if found.fit is not None else {}
        if found.output is not None:
            self.fields["output"] = found.output
        results = [one for one in [*self.fields.values(), *self.fit.values()] if isinstance(one, Symbol)]
        read = _read(results)
        read |= {gate.of for symbol, gate in self.gates.items() if symbol in read and gate.of is not None}
        self.gates = {symbol: gate for symbol, gate in self.gates.items() if symbol in read}
        self.writer = Writer(results, names, {"q", "k", "v", "self", *self.gates})

    def text(self) -> str:
        body = self._class()
        helpers = self._defined(body)
        code = "\n\n\n".join([*helpers, body, *self._functions(body)])
        title = f'"""{self.name}: {self.rule.name} at one setting of its knobs, as a rule of its own."""'
        after = "\n\n" if code.startswith(("@", "def", "class")) else "\n"
        text = f"{title}\n\n{self._imports(code)}{after}{code}\n"
        return text.replace("class CLASS(", f"class {class_name(self.name, 'rule', text)}(", 1)

    # --- the class ------------------------------------------------------------------------------------------

    def _class(self) -> str:
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
        equation = self._equation()
        lines = [line for one in equation for line in _filled(one, hanging="    ")]
        about = self.about.replace("\\", "/").replace('"', "'")  # neither ends a docstring
        lines += ["", *[line for part in about.split("\n") for line in _filled(part)]]
        lines[0] = f'    """{lines[0].strip()}'
        return [line.rstrip() for line in [*lines, '    """']]

    def _class_variables(self) -> list[str]:
        rule, lines = self.rule, []
        for name in ("per_step", "ignores"):
            found = {one for one in getattr(rule, name) if one in self.gates or one in "qkv"}
            if found:
                said = ", ".join(f'"{one}"' for one in sorted(found))
                lines.append(f"    {name}: ClassVar[frozenset[str]] = frozenset({{{said}}})")
        return lines

    def _transition(self) -> list[str]:
        mine = _without_name(self.transition)
        for name, known in vars(structure).items():
            if isinstance(known, Transition) and _without_name(known) == mine:
                return [f"    transition: Transition = {name}"]
        defaults = {field.name: field.default for field in dataclasses.fields(Transition)}
        said = [f'name="{self.name}"']
        for field, value in mine.items():
            if value != defaults[field]:
                said.append(f"{field}={_quoted(value)}")
        return _call("    transition: Transition = Transition", said)

    def _knobs(self) -> list[str]:
        own = self.rule.knobs()
        return [f"    {symbol}: Gate = knob({self._gate(own[symbol])})" for symbol in self.gates]  # type: ignore[arg-type]

    def _gate(self, gate: Gate) -> str:
        """The gate as its maker is called, with the numbers that are not its defaults."""
        assert gate.again is not None
        defaults = {name: one.default for name, one in inspect.signature(gate.again).parameters.items()}
        turned = [(name, value) for name, value in gate.options if value != defaults[name]]
        said = ", ".join(f"{name}={int(value) if value == int(value) else value!r}" for name, value in turned)
        maker = gate.again.__name__
        return f"{'gates.' if getattr(gates, maker, None) is gate.again else ''}{maker}({said})"

    def _properties(self) -> list[str]:
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
        plain = (1.0, 1.0) if self.transition.decay == "none" else (0.0, 1.0)
        if self.transition.low_rank != "none" or rule.eigenvalues != plain:
            low, high = (_number(end) for end in rule.eigenvalues)
            declared("eigenvalues", "tuple[float, float]", f"({low}, {high})")
        return lines

    # --- operands -------------------------------------------------------------------------------------------

    def _operands(self) -> list[str]:
        symbols = [f"{symbol}: Tensor" for symbol in self.gates]
        arguments = ["self", "q: Tensor", "k: Tensor", "v: Tensor", *(["*", *symbols] if symbols else [])]
        head = f"    def operands({', '.join(arguments)}) -> Operands:"
        if len(head) > WIDTH:
            inside = f"        {', '.join(arguments)}"
            packed = [inside] if len(inside) <= WIDTH else [f"        {argument}," for argument in arguments]
            head = "\n".join(["    def operands(", *packed, "    ) -> Operands:"])
        fields = [f"{name}={self._field(value)}" for name, value in self.fields.items() if self._counts(name, value)]
        fit: list[str] = []
        if self.fit:
            said = [f"{name}={self._field(value)}" for name, value in self.fit.items() if self._counts(name, value)]
            fit = _call("        fit = Fit", said)
            fields.append("fit=fit")
        lines = [f"        {line}" for line in self.writer.lines]
        return [head, *lines, *fit, *_call("        return Operands", fields)]

    def _counts(self, name: str, value: Any) -> bool:
        constant = value.parts[0] if isinstance(value, Symbol) and value.form == "number" else None
        return constant is None or constant != NEUTRAL.get(name)

    def _field(self, value: Any) -> str:
        if isinstance(value, Symbol):
            return self.writer.full(value) if value.form == "number" else self.writer.code(value)
        if inspect.isfunction(value):
            self.writer.functions[value.__name__] = value
            return value.__name__
        if dataclasses.is_dataclass(value):
            kind: Any = type(value)
            default = kind()
            turned = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            said = [f"{n}={_quoted(v)}" for n, v in turned.items() if v != getattr(default, n)]
            return f"{type(value).__name__}({', '.join(said)})"
        raise Untraceable(f"it makes {value!r}")

    # --- what the class uses --------------------------------------------------------------------------------

    def _defined(self, body: str) -> list[str]:
        """The makers of gates and the constants of the rule's own file that the class uses, and what these use."""
        return [text for name, text, function in self._own(body) if not function or name in self._makers()]

    def _functions(self, body: str) -> list[str]:
        return [text for name, text, function in self._own(body) if function and name not in self._makers()]

    def _makers(self) -> set[str]:
        return {gate.again.__name__ for gate in self.gates.values() if gate.again is not None} | self._of_makers

    def _own(self, body: str) -> list[tuple[str, str, bool]]:
        """(name, text, whether a function) of what the rule's own file defines and the class uses, in its order."""
        source = inspect.getsource(self.module)
        lines, tree = source.splitlines(), ast.parse(source).body
        defined: dict[str, tuple[str, ast.stmt]] = {}
        for i, node in enumerate(tree):
            names = [node.name] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            end = node.end_lineno or node.lineno
            after = tree[i + 1] if i + 1 < len(tree) else None
            if not isinstance(node, ast.FunctionDef) and isinstance(after, ast.Expr):  # its docstring
                end = after.end_lineno or end
            for name in names:
                defined[name] = "\n".join(lines[start - 1 : end]), node
        wanted = _names(body) & set(defined)
        while more := {name for one in wanted for name in _names(defined[one][0]) & set(defined)} - wanted:
            wanted |= more
        makers = {gate.again.__name__ for gate in self.gates.values() if gate.again is not None} & set(defined)
        while more := {name for one in makers for name in _names(defined[one][0]) & set(defined)} - makers:
            makers |= more
        self._of_makers = makers
        return [(n, text, isinstance(node, ast.FunctionDef)) for n, (text, node) in defined.items() if n in wanted]

    def _imports(self, code: str) -> str:
        """The imports that the code needs: those of the contract, and those of the rule's own file."""
        own = {"dataclass": "dataclasses", "ClassVar": "typing", "Literal": "typing", "Tensor": "torch"}
        own |= {"gates": "deltalab", "Gate": "deltalab.gates", "ResidualState": "deltalab.structure"}
        own |= dict.fromkeys(("Fit", "Operands", "UpdateRule", "knob"), "deltalab.rule")
        own |= {name: "deltalab.structure" for name, one in vars(structure).items() if _is_transition(one)}
        whole = {"math": "import math", "torch": "import torch", "F": "import torch.nn.functional as F"}
        for node in ast.parse(inspect.getsource(self.module)).body:
            if isinstance(node, ast.ImportFrom):
                own.update({alias.asname or alias.name: node.module or "" for alias in node.names})
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    said = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                    whole[alias.asname or alias.name] = said
        used = _names(code)
        lines = {said for name, said in whole.items() if name in used}
        modules: dict[str, set[str]] = {}
        for name, module in own.items():
            if name in used and name not in whole:
                modules.setdefault(module, set()).add(name)
        lines |= {f"from {module} import {', '.join(_sorted(names))}" for module, names in modules.items()}
        groups: dict[int, list[str]] = {}
        for line in sorted(lines, key=lambda line: (line.startswith("from"), line.split()[1])):
            top = line.split()[1].split(".")[0]
            groups.setdefault(0 if top in sys.stdlib_module_names else 2 if top == "deltalab" else 1, []).append(line)
        return "\n\n".join("\n".join(groups[group]) for group in sorted(groups)) + "\n"

    # --- the equation ---------------------------------------------------------------------------------------

    def _equation(self) -> list[str]:
        t = "t" if self.transition.steps == 1 else "{t,i}"
        of = {"q": "q_t", "k": f"k_{t}", "v": f"v_{t}"}
        for symbol, gate in self.gates.items():
            own = t if symbol in self.rule.per_step else "t"
            of[symbol] = f"{symbol}_{own}" if gate.projected else symbol
        return _equation(self.transition, self.fields, self.fit, Equation(of, self.writer.written, t))


def _equation(transition: Transition, x: dict[str, Any], fit: dict[str, Any], say: Equation) -> list[str]:
    """The recurrence in the notation of the papers: a line for each state, the output, and what has a name."""
    t = say.t
    alpha, k, u = f"alpha_{t}", say(x["k"]), say(x["u"])
    if x["k"].form != "name":
        say.where[f"k'_{t} = {k}"] = None
        k = f"k'_{t}"
    u = f"({u})" if " " in u else u
    if "sign" in x:
        say.where[f"|{alpha}| and its sign by {say(x['sign'])}"] = None
    elif "g" in x:
        say.where[f"{alpha} = exp({say(x['g'])})"] = None

    def times(value: Any) -> str:
        one = value is None or (value.form == "number" and value.parts[0] == 1)
        return "" if one else f"{say(value, TIMES)} "

    def kept(before: str, e: Any) -> str:
        """A state after its decay and its low rank."""
        decay = {"none": "", "scalar": f"{alpha} ", "diagonal": f"diag({alpha}) "}[transition.decay]
        if transition.low_rank == "none":
            return f"{decay}{before}"
        if transition.low_rank == "tied":
            erased = f"{times(e)}{k} {k}^T"
        else:
            erased = f"{_vector(say(-x['a']))} {_vector(say(x['b']))}^T"
        if transition.decay == "none":
            return f"(I - {erased}) {before}"
        if transition.reads == "state":
            return f"({decay if transition.decay == 'diagonal' else f'{alpha} I '}- {erased}) {before}"
        return f"{alpha} (I - {erased}) {before}" if transition.decay == "scalar" else f"(I - {erased}) {decay}{before}"

    n = transition.steps
    before, state = ("S_{t-1}", "S_t") if n == 1 else ("S_{t,i-1}", "S_{t,i}")
    lines = [f"{state} = {kept(before, x.get('e'))} + {times(x.get('beta'))}{k} {u}^T"]
    if n > 1:
        lines.append(f"i = 1 .. {n},   S_{{t,0}} = S_{{t-1}},   S_t = S_{{t,{n}}}")
    r, read = say(x["r"], TIMES), times(x.get("read"))
    if "d" in x:
        r, read = f"({read}{r} - {times(x['d'])}{k})", ""
    if fit:
        error, loss = f"{say(fit['v'])} - S_{{t-1}}^T {k}", fit["residual"]
        bent = {"l2": error, "huber": f"clip({error}, {-loss.clip:g}, {loss.clip:g})", "log_cosh": f"tanh({error})"}
        lines.append(f"r_t = {bent[loss.loss]}")
        lines.append(f"R_t = {kept('R_{t-1}', fit.get('e', x.get('e')))} + {times(fit['strength'])}{k} r_t^T")
        lines.append(f"o_t = scale ({read}S_{{t-1}}^T {r} + {times(fit.get('read'))}R_t^T {say(fit['r'], TIMES)})")
    elif "bonus" in x:
        lines.append(f"o_t = scale ({read}S_{{t-1}}^T {r} + {times(x['bonus'])}{u})")
    else:
        lines.append(f"o_t = scale {read}{'S_t' if transition.output == 'after' else 'S_{t-1}'}^T {r}")
    return [*lines, *say.where]


# --- text ---------------------------------------------------------------------------------------------------


def _vector(said: str) -> str:
    return f"({said})" if " " in said else said


def _fields(x: Operands | Fit) -> dict[str, Any]:
    """The operands that are given, in the order of their declaration."""
    plain = ("output", "carry", "fit")
    return {name: value for name, value in vars(x).items() if value is not None and name not in plain}


def _read(results: Iterable[Symbol]) -> set[str]:
    """The names of the inputs and gates that some expressions read."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = list(results)
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, tuple | list):
            waiting += one
        elif isinstance(one, Symbol) and id(one) not in seen:
            seen.add(id(one))
            found |= {one.parts[0]} if one.form == "name" else set()
            waiting += one.parts
    return found


def _names(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def _is_transition(one: object) -> bool:
    return one is Transition or isinstance(one, Transition)


def _without_name(transition: Transition) -> dict[str, Any]:
    """The fields of a transition that make it another one: nothing reads what the low rank sees where there is none."""
    found = {field: value for field, value in vars(transition).items() if field != "name"}
    if transition.decay == "none" or transition.low_rank == "none":
        found["reads"] = "state"
    return found


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _number(end: float) -> str:
    return repr(float(end)) if math.isfinite(end) else "math.inf" if end > 0 else "-math.inf"


def _call(before: str, arguments: list[str]) -> list[str]:
    """A call on one line where it fits, else with one argument a line."""
    line = f"{before}({', '.join(arguments)})"
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(before) - len(before.lstrip()))
    return [f"{before}(", *(f"{indent}    {argument}," for argument in arguments), f"{indent})"]


def _filled(text: str, hanging: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH - 1,
        initial_indent="    ",
        subsequent_indent=f"    {hanging}",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _sorted(names: Iterable[str]) -> list[str]:
    """As ruff sorts imported names: constants, classes, functions."""
    return sorted(
        names, key=lambda name: (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)
    )
