"""Writes a trained model as a folder that `transformers` loads on a machine without deltalab.

The folder holds copies of the modules that compute the model and of its rules' plugin files, with imports from
deltalab made relative, and a registry of these rules alone. No module imports `ops.triton_kernels`, so that the
folder has no kernels and `ops.backends` finds none.
"""

import ast
import inspect
import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from uuid import uuid4

from torch import Tensor

from deltalab.errors import InputError
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec
from deltalab.registry import Plugin, rule_plugin

PACKAGE = Path(__file__).parents[1]
MODELING = "modeling_deltalab"
OF_A_RULE = (
    "errors",
    "fast_weights",
    "gates",
    "ops.recurrence",
    "passes",
    "ridge",
    "rule",
    "softmax",
    "structure",
)
"""The modules of deltalab that a plugin file may import and still be exported."""


def export_hf(
    spec: ModelSpec, weights: Mapping[str, Tensor], directory: Path, *, provenance: Mapping[str, object]
) -> None:
    """Writes a model for `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`.

    weights: `Model(spec).state_dict()`, on any device. provenance: their origin, for the model card.
    The folder is written whole or not at all.

    Raises `InputError` for a directory that is not empty or cannot be written, for weights that do not fit the model,
    for a rule whose file imports more than torch, the standard library and `OF_A_RULE`, for a model that is not causal,
    and without the package safetensors.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise InputError("export to hf needs safetensors: pip install 'deltalab[hf]'") from None
    if spec.readout != "position":
        raise InputError(f"export to hf takes causal models: one with readout '{spec.readout}' predicts no next token")
    model = _filled(spec, weights)
    texts = {f"{name}.py": text for name, text in _modules(spec).items()}
    texts["config.json"] = json.dumps(_config(spec, model, provenance), indent=2, default=str) + "\n"
    texts["README.md"] = _readme(spec, model, directory.name, provenance)
    tensors = {f"model.{name}": value.cpu().contiguous() for name, value in model.state_dict().items()}

    target = directory.resolve()
    partial = target.parent / f".{target.name}.{uuid4().hex[:8]}"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"{directory}: exists and is not an empty directory")
        partial.mkdir(parents=True)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        # On a full disk `save_file` raises another error than OSError.
        (partial / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        partial.replace(target)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _filled(spec: ModelSpec, weights: Mapping[str, Tensor]) -> Model:
    model = Model(spec)
    expected = model.state_dict()
    wrong = [f"no {name}" for name in expected if name not in weights]
    wrong += [f"unknown {name}" for name in weights if name not in expected]
    wrong += [
        f"{name} is {list(weights[name].shape)}, not {list(value.shape)}"
        for name, value in expected.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if wrong:
        raise InputError(f"the weights do not fit the model: {'; '.join(wrong[:4])}")
    model.to(weights["embed.weight"].dtype).load_state_dict(dict(weights))
    return model


def _config(spec: ModelSpec, model: Model, provenance: Mapping[str, object]) -> dict[str, object]:
    # Every knob is written out, so that a default that changes later does not change this model.
    model_fields = {f.name: getattr(spec, f.name) for f in fields(spec)} | {"rule": spec.make_rule().spec()}
    return {
        "architectures": ["DeltaLabForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING}.DeltaLabConfig",
            "AutoModelForCausalLM": f"{MODELING}.DeltaLabForCausalLM",
        },
        "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
        "model_type": "deltalab",
        **model_fields,
        "provenance": dict(provenance),
    }


def _modules(spec: ModelSpec) -> dict[str, str]:
    """The folder's Python files by name: the model's code, its rules, and a registry of these."""
    rules = [rule_plugin(name) for name in dict.fromkeys(rule.name for rule in spec.rules())]
    modules: dict[str, str] = {}
    wanted = [f"export.{MODELING}"]
    for plugin in rules:
        _refuse_other_imports(plugin)
        modules[_rule_module(plugin)], needs = _relative(plugin.source)
        wanted += needs
    while wanted:
        name = wanted.pop()
        flat = _flat(name)
        if flat not in modules and name != "registry":
            modules[flat], needs = _relative((PACKAGE / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
            wanted += needs
    modules["registry"] = _registry(rules)
    # transformers copies the files that such lines of the modeling code name. It overlooks `from . import x`, and
    # older versions do not follow the imports of an imported file.
    never = "".join(f"    from .{name} import *\n" for name in sorted(modules) if name != MODELING)
    modules[MODELING] += f"\n\nif False:  # names every file of this folder, for transformers to find\n{never}"
    return modules


def _rule_module(plugin: Plugin) -> str:
    return "rule_" + re.sub(r"\W", "_", plugin.kind.name)


def _flat(module: str) -> str:
    return module.removeprefix("export.").replace(".", "_")


def _relative(source: str) -> tuple[str, list[str]]:
    """The source with `from .x import` for `from deltalab.x import`, and the modules x that it names."""
    lines = source.splitlines(keepends=True)
    needs = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "deltalab":
            continue
        assert node.module is not None
        module = node.module.removeprefix("deltalab").removeprefix(".")
        line = lines[node.lineno - 1].encode()
        before, after = line[: node.col_offset].decode(), line[node.col_offset :].decode()
        if (PACKAGE / module.replace(".", "/")).is_dir():
            # These names are modules, which stand in one flat folder.
            full = [f"{module}.{alias.name}".removeprefix(".") for alias in node.names]
            names = ", ".join(
                f"{_flat(name)} as {alias.asname or alias.name}" for name, alias in zip(full, node.names, strict=True)
            )
            lines[node.lineno - 1] = f"{before}from . import {names}\n"
            needs += full
            continue
        lines[node.lineno - 1] = before + re.sub(r"^from\s+[\w.]+", f"from .{_flat(module)}", after)
        needs.append(module)
    return "".join(lines), needs


def _refuse_other_imports(plugin: Plugin) -> None:
    def refuse(line: int, name: str) -> InputError:
        return InputError(
            f"{plugin.file}:{line}: imports '{name}'; the rule of an exported model may import torch, the standard "
            f"library and names from deltalab.{', deltalab.'.join(OF_A_RULE)}"
        )

    for node in ast.walk(ast.parse(plugin.source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not _everywhere(alias.name):
                    raise refuse(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            full = [f"deltalab.{alias.name}" for alias in node.names] if module == "deltalab" else [module]
            for name in full:
                if not _everywhere(name) and name not in [f"deltalab.{mine}" for mine in OF_A_RULE]:
                    raise refuse(node.lineno, name)


def _everywhere(module: str) -> bool:
    top = module.split(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def _registry(rules: list[Plugin]) -> str:
    lines = [
        '"""The rules of this model, in place of the registry that searches for them; written by deltalab."""',
        "",
        "from .errors import unknown",
        "from .rule import UpdateRule",
        *(f"from .{_rule_module(plugin)} import {plugin.kind.__name__}" for plugin in rules),
        "",
        "RULES: dict[str, type[UpdateRule]] = {",
        *(f"    {plugin.kind.name!r}: {plugin.kind.__name__}," for plugin in rules),
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


def _readme(spec: ModelSpec, model: Model, title: str, provenance: Mapping[str, object]) -> str:
    rule = spec.make_rule()
    length = max(getattr(rule, "window", 0) for rule in spec.rules()) + 32
    short, long = model.state_size(length), model.state_size(2 * length)
    state = (
        f"The state of one sequence is {short:,} numbers, however long the sequence."
        if short == long
        else f"The state of one sequence grows with it, as attention remembers every token: {short:,} numbers after "
        f"{length} tokens, {long:,} after {2 * length}."
    )
    rows = [f"| {name} | {_cell(value)} |" for name, value in provenance.items()]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [deltalab, {rule.name}]
---
# {title}

A language model of {sum(p.numel() for p in model.parameters()):,} parameters with the update rule `{rule.name}`\
{f" ({rule.paper})" if rule.paper else ""}, trained and exported by deltalab. \
The code in this folder is deltalab's, under Apache-2.0.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)
model.generate(input_ids, max_new_tokens=32)
```

There is no tokenizer: the model takes the token ids of the task that it was trained on.
{state}

## The rule

```text
{inspect.getdoc(type(rule))}
```

As trained: `{json.dumps(rule.spec())}`
{_layers(spec)}
## Where it comes from

| | |
| --- | --- |
{chr(10).join(rows)}
"""


def _layers(spec: ModelSpec) -> str:
    """A sentence that names the rule of each layer, where they differ."""
    names = [spec.at(layer).make_rule().name for layer in range(spec.depth)]
    return f"\nThe layers, from first to last: {', '.join(names)}.\n" if len(set(names)) > 1 else ""


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return " ".join(text.split()).replace("|", "\\|")
