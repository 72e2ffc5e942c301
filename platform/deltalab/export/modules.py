"""The Python files of an exported folder: copies of the modules that compute the model, its kernels and its rules.

The files lie in one folder under flat names, such as `ops_scan.py`, and import one another relatively. A registry of
the model's rules takes the place of the registry that searches for plugins.
"""

import ast
import re
import sys
from pathlib import Path

from deltalab.errors import InputError
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule
from deltalab.registry import Plugin, rule_plugin

PACKAGE = Path(__file__).parents[1]
"""The folder of the package `deltalab`, whose modules are copied."""
MODELING = "modeling_deltalab"
"""The file that `transformers` loads first."""
KERNELS = "ops.triton_kernels"
"""The module that imports all kernels. `ops.backends` loads it by name, so no import statement names it."""

OF_A_RULE = (
    "coupled",
    "elementwise",
    "errors",
    "fast_weights",
    "gate",
    "gates",
    "long_convolution",
    "nonlinear",
    "ops.recurrence",
    "ops.rotary",
    "ops.vmap",
    "passes",
    "ridge",
    "rule",
    "softmax",
    "structure",
)
"""The modules of deltalab that a plugin file may import and still be exported."""


def plugins(spec: ModelSpec) -> list[Plugin]:
    """Returns the plugins of the rules of a model's layers, each rule once."""
    return [rule_plugin(name) for name in dict.fromkeys(rule.name for rule in spec.rules())]


def modules(spec: ModelSpec) -> dict[str, str]:
    """Returns the texts of an exported folder's Python files, by their names without `.py`.

    Raises:
        InputError: If the file of a rule imports more than torch, triton, the standard library and `OF_A_RULE`.
    """
    rules = plugins(spec)
    texts: dict[str, str] = {}
    wanted = [f"export.{MODELING}", KERNELS]
    for plugin in rules:
        if _of_a_package(plugin):
            continue
        _refuse_other_imports(plugin)
        texts[_rule_module(plugin)], needs = _relative(plugin.source)
        wanted += needs
    while wanted:
        name = wanted.pop()
        flat = _flat(name)
        if flat not in texts and name != "registry":
            text, needs = _relative((PACKAGE / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
            texts[flat] = _own_operators(_triton_if_needed(text))
            wanted += needs
    texts["registry"] = _registry(rules)
    # transformers copies the files that lines `from .x import` of the modeling code name. It overlooks
    # `from . import x`, and older versions do not follow the imports of an imported file.
    never = "".join(f"    from .{name} import *\n" for name in sorted(texts) if name != MODELING)
    texts[MODELING] += f"\n\nif False:  # names every file of this folder, for transformers to find\n{never}"
    return texts


def _of_a_package(plugin: Plugin) -> bool:
    """Whether a plugin is a module of an installed package, which an exported folder imports from there."""
    return issubclass(plugin.kind, OwnModule) and ":" not in plugin.kind.name


def _rule_module(plugin: Plugin) -> str:
    """The name of a rule's module in an exported folder."""
    return "rule_" + re.sub(r"\W", "_", plugin.kind.name)


def _flat(module: str) -> str:
    """The name that a module of deltalab has in an exported folder, such as `ops_scan` for `ops.scan`."""
    return module.removeprefix("export.").replace(".", "_")


def _relative(source: str) -> tuple[str, list[str]]:
    """The source with `from .x import` in place of `from deltalab.x import`, and the names of all such modules x."""
    lines = source.splitlines(keepends=True)
    needs = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "deltalab":
            continue
        assert node.module is not None
        assert node.end_lineno is not None
        module = node.module.removeprefix("deltalab").removeprefix(".")
        line = lines[node.lineno - 1].encode()
        before, after = line[: node.col_offset].decode(), line[node.col_offset :].decode()
        if (PACKAGE / module.replace(".", "/")).is_dir():
            # A package holds modules, which stand in one flat folder.
            full = [f"{module}.{alias.name}".removeprefix(".") for alias in node.names]
            names = ", ".join(
                f"{_flat(name)} as {alias.asname or alias.name}" for name, alias in zip(full, node.names, strict=True)
            )
            lines[node.lineno - 1] = f"{before}from . import {names}\n"
            for index in range(node.lineno, node.end_lineno):
                lines[index] = ""
            needs += full
            continue
        lines[node.lineno - 1] = before + re.sub(r"^from\s+[\w.]+", f"from .{_flat(module)}", after)
        needs.append(module)
    return "".join(lines), needs


def _triton_if_needed(source: str) -> str:
    """The source with each import of Triton in a `try`.

    A file with kernels is imported only on machines that run them. But transformers refuses to load a folder if any of
    its files imports a package that the machine lacks, unless the import stands in a `try`.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == "triton" for name in names):
            assert node.end_lineno is not None
            inside = "".join(f"    {line}" for line in lines[node.lineno - 1 : node.end_lineno])
            lines[node.lineno - 1 : node.end_lineno] = [
                f"try:\n{inside}finally:\n    pass\n",
                *[""] * (node.end_lineno - node.lineno),
            ]
    return "".join(lines)


def _own_operators(source: str) -> str:
    """Puts the name of the module that defines a PyTorch operator in place of `deltalab::` in the operator's name.

    A process can hold only one PyTorch operator of each name, and the last definition wins. If exported folders used
    the names of deltalab, loading a folder would replace the operators of deltalab and of other folders.
    """
    return re.sub(r'"deltalab::(\w+)"', r'__name__.replace(".", "_") + "::\1"', source)


def _refuse_other_imports(plugin: Plugin) -> None:
    """Raises `InputError` if a rule's file imports a module that an exported folder lacks.

    The file of a module of another author may import other packages, which the folder then needs.
    """
    own = issubclass(plugin.kind, OwnModule)

    def refuse(line: int, name: str) -> InputError:
        return InputError(
            f"{plugin.file}:{line}: imports '{name}'; the rule of an exported model may import torch, triton, the "
            f"standard library and names from deltalab.{', deltalab.'.join(OF_A_RULE)}"
        )

    for node in ast.walk(ast.parse(plugin.source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not _everywhere(alias.name) and not (own and not alias.name.startswith("deltalab")):
                    raise refuse(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"deltalab.{alias.name}" for alias in node.names] if module == "deltalab" else [module]
            for name in names:
                if own and not name.startswith((".", "deltalab")):
                    continue
                if not _everywhere(name) and name not in [f"deltalab.{allowed}" for allowed in OF_A_RULE]:
                    raise refuse(node.lineno, name)


def _everywhere(module: str) -> bool:
    """Whether a module is available on every machine that loads an exported folder."""
    top = module.split(".")[0]
    return top in ("torch", "triton") or top in sys.stdlib_module_names


def _registry(rules: list[Plugin]) -> str:
    """The text of the module `registry`, which knows only the model's rules."""
    own = [plugin for plugin in rules if issubclass(plugin.kind, OwnModule)]
    names = {plugin.kind.name: plugin.kind.__name__ for plugin in rules}
    names |= {plugin.kind.name: f"of_module({plugin.kind.name!r}, module_{i})" for i, plugin in enumerate(own)}
    lines = [
        '"""The rules of this model, in place of the registry that searches for them; written by deltalab."""',
        "",
        *(
            f"from {plugin.kind.name.rpartition('.')[0]} import {plugin.kind.name.rpartition('.')[2]} as module_{i}"
            if _of_a_package(plugin)
            else f"from .{_rule_module(plugin)} import {plugin.kind.name.rpartition(':')[2]} as module_{i}"
            for i, plugin in enumerate(own)
        ),
        "from .errors import unknown",
        *(["from .own_module import of_module"] if own else []),
        "from .rule import UpdateRule",
        *(f"from .{_rule_module(plugin)} import {plugin.kind.__name__}" for plugin in rules if plugin not in own),
        "",
        "RULES: dict[str, type[UpdateRule]] = {",
        *(f"    {name!r}: {kind}," for name, kind in names.items()),
        "}",
        "",
        "",
        "def get_rule(name: str, /, **knobs: object) -> UpdateRule:",
        "    if name not in RULES:",
        '        raise unknown("rule", name, RULES)',
        "    return RULES[name].configured(knobs)",
        "",
    ]
    return "\n".join(lines)
