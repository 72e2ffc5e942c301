"""Writes a study from a task of mad-lab (github.com/athms/mad-lab)."""

from collections.abc import Mapping
from pathlib import Path

from deltalab.authoring.imports.written import Imported
from deltalab.errors import InputError, unknown
from deltalab.reading import read_text, read_yaml

TASKS: Mapping[str, tuple[str, dict[str, str]]] = {
    "in-context-recall": ("mad_in_context_recall", {}),
    "noisy-in-context-recall": (
        "mad_noisy_recall", {"noise_vocab_size": "noise_vocab", "frac_noise": "noise"},
    ),
    "fuzzy-in-context-recall": ("mad_fuzzy_recall", {}),
    "memorization": ("mad_memorization", {}),
    "compression": ("mad_compression", {}),
    "selective-copying": ("mad_selective_copy", {"num_tokens_to_copy": "copies"}),
}  # fmt: skip
"""The task of each of mad-lab's, and the names of parameters that differ."""
OF_ALL = {"vocab_size": "vocab_size", "seq_len": "length", "num_train_examples": "train_examples"}
TRAINING = {"batch_size": 128, "epochs": 200, "lr": 5e-4, "weight_decay": 0.0, "num_train_examples": 12_800}
"""The defaults of mad-lab's MADConfig."""
LAYERS = {
    "attention": "attention", "mh-attention": "attention", "sliding-attention": "attention", "mamba": "mamba",
    "mh-sliding-attention": "attention", "gated-linear-attention": "gla", "mh-gated-linear-attention": "gla",
    "hyena": "hyena", "mh-hyena": "hyena", "linear-attention": "linear_attention",
    "mh-linear-attention": "linear_attention", "rwkv5-time-mixer": "rwkv5", "rwkv6-time-mixer": "rwkv6",
}  # fmt: skip
WIDTH = 128


def from_mad(file: Path) -> Imported:
    """Reads a task file of mad-lab (`baseline`, `changes`), or the fields of its MADConfig.

    The study has a task for the baseline and one for each change, and the layers of mad-lab's own comparison as arms.

    Raises:
        InputError: The file is no YAML, or names a task or a key that mad-lab does not have.
    """
    given = read_yaml(read_text(file), where=str(file))
    if not isinstance(given, Mapping):
        raise InputError(f"{file}: must be a mapping with `baseline`, or with the fields of MADConfig")
    fields = dict(given.get("baseline") or {}) if "baseline" in given else dict(given)
    task = str(given.get("task", fields.pop("task", file.stem)))
    if task not in TASKS:
        raise unknown("task of mad-lab", task, TASKS, where=str(file))
    name, others = TASKS[task]
    names = {**OF_ALL, **others}
    left_out: list[str] = []
    base = {names[key]: value for key, value in fields.items() if key in names}
    for key, value in fields.items():
        if key not in names and key not in TRAINING:
            left_out.append(f"{key}: {value!r}")
    tasks = {name: {"task": name, **base}}
    for key, values in dict(given.get("changes") or {}).items():
        if key not in names or not isinstance(values, list):
            left_out.append(f"changes.{key}")
            continue
        for value in values:
            tasks[f"{name}_{names[key]}_{value}".replace(".", "_")] = {"task": name, **base, names[key]: value}
    training = {**TRAINING, **{key: fields[key] for key in TRAINING if key in fields}}
    steps = int(training["epochs"] * training["num_train_examples"] // training["batch_size"])
    left_out += [
        f"{training['epochs']} epochs of {training['num_train_examples']:,} examples are {steps:,} steps",
        "layers: mad-lab takes them on its command line; these arms are the rules of its layers, each with an MLP",
    ]
    rules = [rule for rule in dict.fromkeys(LAYERS.values()) if rule != "attention"]
    return Imported(
        name=f"mad_{file.stem}",
        source=f"mad-lab: {file.name}",
        tasks=tasks,
        base={
            "rule": "attention",
            "model": {"d_model": WIDTH, "heads": 16, "layers": 2},
            "train": {
                "steps": steps,
                "batch_size": training["batch_size"],
                "lr": training["lr"],
                "weight_decay": training["weight_decay"],
            },
        },
        arms={rule: {"rule": rule} for rule in rules},
        rates=[1e-4, 5e-4, 1e-3],
        left_out=left_out,
    )
