"""Writes a model with its code and kernels as a folder that `transformers` loads on a machine without deltalab."""

import inspect
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from uuid import uuid4

import torch
import yaml
from safetensors.torch import save
from torch import Tensor

from deltalab.errors import InputError
from deltalab.export.modules import MODELING, modules, plugins
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule
from deltalab.plugin_files import source_hash

RULES = "rules"
OWN = "modules"
"""The folder of an export with the files of modules that stand in place of rules."""
"""The subfolder with the plugin files of the rules, by which deltalab recognizes the rules of a folder."""


def export_hf(
    spec: ModelSpec,
    weights: Mapping[str, Tensor] | None,
    directory: Path,
    *,
    provenance: Mapping[str, object],
    recipe: Mapping[str, object] | None = None,
    files: Mapping[str, str] | None = None,
    special: Mapping[str, int] | None = None,
) -> None:
    """Writes a model for `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`.

    The folder is written whole or not at all.

    Args:
        spec: The model.
        weights: `Model(spec).state_dict()`, on any device; None for a model that is still to be trained, whose folder
            has no weights.
        directory: The folder to write.
        provenance: Where the model comes from, by name, for the model card.
        recipe: The contents of `recipe.yaml`; None writes no such file.
        files: The texts of further files by relative path.
        special: The ids of special tokens, such as `eos_token_id`.

    Raises:
        InputError: If the directory is not empty or cannot be written; if the weights do not fit the model; if the file
            of a rule imports a module that an exported folder lacks; or if the model is not causal.
    """
    if spec.readout != "position":
        raise InputError(f"export to hf takes causal models: one with readout '{spec.readout}' predicts no next token")
    texts: dict[str, object] = {f"{name}.py": text for name, text in modules(spec).items()}
    for plugin in plugins(spec):
        own = issubclass(plugin.kind, OwnModule)
        if not own or ":" in plugin.kind.name:
            texts[f"{OWN}/{plugin.file.name}" if own else f"{RULES}/{plugin.kind.name}.py"] = plugin.source
    model = None if weights is None else _filled(spec, weights)
    dtype = torch.float32 if model is None else model.embed.weight.dtype
    texts["config.json"] = {**_config(spec, dtype, provenance), **(special or {})}
    texts["README.md"] = _readme(spec, directory.name, provenance, model, "tokenizer.json" in (files or {}))
    if recipe is not None:
        texts["recipe.yaml"] = recipe
    tensors = None if model is None else {f"model.{name}": value for name, value in model.state_dict().items()}
    write_folder(directory, {**texts, **(files or {})}, tensors)


def write_folder(directory: Path, files: Mapping[str, object], tensors: Mapping[str, Tensor] | None) -> None:
    """Writes files, and tensors as `model.safetensors`, into a folder: all of them or none.

    Args:
        directory: The folder to write.
        files: The text of each file by relative path, or the contents of a file that ends in .json or .yaml.
        tensors: The tensors by name; None writes no `model.safetensors`.

    Raises:
        InputError: If the directory is not empty or cannot be written.
    """
    contents = {name: _bytes(name, file) for name, file in files.items()}
    if tensors is not None:
        # `save_file` raises another error than OSError on a full disk.
        on_cpu = {name: value.cpu().contiguous() for name, value in tensors.items()}
        contents["model.safetensors"] = save(on_cpu, metadata={"format": "pt"})
    target = directory.resolve()
    partial = target.parent / f".{target.name}.{uuid4().hex[:8]}"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"{directory}: exists and is not an empty directory")
        partial.mkdir(parents=True)
        for name, content in contents.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(content)
        partial.replace(target)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _bytes(name: str, file: object) -> bytes:
    """The bytes of a file, given as text or as the contents of JSON or YAML."""
    if not isinstance(file, str):
        if name.endswith(".yaml"):
            file = yaml.safe_dump(json.loads(json.dumps(file, default=str)), sort_keys=False, width=120)
        else:
            file = json.dumps(file, indent=2, default=str) + "\n"
    return file.encode("utf-8")


def _filled(spec: ModelSpec, weights: Mapping[str, Tensor]) -> Model:
    """The model with these weights. Raises `InputError` if they do not fit."""
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


def _config(spec: ModelSpec, dtype: torch.dtype, provenance: Mapping[str, object]) -> dict[str, object]:
    """The contents of `config.json`."""
    # Every knob is written out, so that a default that changes later does not change this model.
    model_fields = {f.name: getattr(spec, f.name) for f in fields(spec)} | {"rule": spec.make_rule().spec()}
    return {
        "architectures": ["DeltaLabForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING}.DeltaLabConfig",
            "AutoModel": f"{MODELING}.DeltaLabModel",
            "AutoModelForCausalLM": f"{MODELING}.DeltaLabForCausalLM",
            "AutoModelForSequenceClassification": f"{MODELING}.DeltaLabForSequenceClassification",
        },
        "dtype": str(dtype).removeprefix("torch."),
        "model_type": "deltalab",
        **model_fields,
        "provenance": dict(provenance),
    }


def rule_hashes(folder: Path) -> dict[str, str]:
    """Returns the `Plugin.hash` of each rule's file in an exported folder, by the name of the rule."""
    return {file.stem: source_hash(file.read_bytes()) for file in sorted((folder / RULES).glob("*.py"))}


def _readme(spec: ModelSpec, title: str, provenance: Mapping[str, object], model: Model | None, tokenizer: bool) -> str:
    """The model card. `model` is None for an untrained one."""
    rule = spec.make_rule()
    rows = [f"| {name} | {_cell(value)} |" for name, value in provenance.items()]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [deltalab, {rule.name}]
---
# {title}

{_summary(spec, model)} \
The code in this folder is deltalab's, under Apache-2.0{_of_others(spec)}.

{_how_to_load(model, tokenizer)}

## The rule

```text
{inspect.getdoc(type(rule))}
```

{"As trained" if model is not None else "With the knobs"}: `{json.dumps(rule.spec())}`
{_layers(spec)}
## Where it comes from

| | |
| --- | --- |
{chr(10).join(rows)}
"""


def _of_others(spec: ModelSpec) -> str:
    """Names the modules of other authors, for the sentence on the code."""
    names = [plugin.kind.name for plugin in plugins(spec) if issubclass(plugin.kind, OwnModule)]
    return f", but for the code of {', '.join(names)}" if names else ""


def _summary(spec: ModelSpec, model: Model | None) -> str:
    """The first sentence of the model card."""
    rule = spec.make_rule()
    label = f"`{rule.name}`{f' ({rule.paper})' if rule.paper else ''}"
    if model is None:
        return (
            f"A language model with the update rule {label}, exported by deltalab to be trained. **It is untrained**: "
            "the folder has no weights, and no score of the study that it comes from is its own."
        )
    count = sum(p.numel() for p in model.parameters())
    return f"A language model of {count:,} parameters with the update rule {label}, trained and exported by deltalab."


def _how_to_load(model: Model | None, tokenizer: bool) -> str:
    """The part of the model card that shows how to load the folder."""
    tokens = (
        "The tokenizer goes along: `AutoTokenizer.from_pretrained(folder, trust_remote_code=True)`."
        if tokenizer
        else "There is no tokenizer: the model takes the token ids of the task or the data that it is trained on."
    )
    if model is None:
        return f"""```python
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("path/to/this/folder", trust_remote_code=True)
model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
```

`recipe.yaml` says how to train it, and where each number comes from. {tokens}"""
    length = max(getattr(rule, "window", 0) for rule in model.spec.rules()) + 32
    short, long = sum(model.cache_size(length)), sum(model.cache_size(2 * length))
    state = (
        "How much the module of another author has to hold is not known; here it reads all tokens again for each token."
        if math.isnan(short)
        else f"The state of one sequence is {short:,.0f} numbers, however long the sequence."
        if short == long
        else f"The state of one sequence grows with it, as attention remembers every token: {short:,.0f} numbers after "
        f"{length} tokens, {long:,.0f} after {2 * length}."
    )
    return f"""```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)
model.generate(input_ids, max_new_tokens=32)
```

{tokens}
{state}"""


def _layers(spec: ModelSpec) -> str:
    """A sentence that names the rule of each layer, empty if all layers have one rule."""
    names = [spec.at(layer).make_rule().name for layer in range(spec.depth)]
    return f"\nThe layers, from first to last: {', '.join(names)}.\n" if len(set(names)) > 1 else ""


def _cell(value: object) -> str:
    """A value as the cell of a Markdown table."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return " ".join(text.split()).replace("|", "\\|")
