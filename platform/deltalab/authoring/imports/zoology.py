"""Writes a study from a configuration of zoology (github.com/HazyResearch/zoology)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltalab.authoring.imports.config_text import ConfigText
from deltalab.authoring.imports.config_values import Made, Unread
from deltalab.authoring.imports.written import Imported, nearest_batch
from deltalab.errors import InputError
from deltalab.registry import get_task

RULES: Mapping[str, str] = {
    "attention.MHA": "attention", "based.Based": "based", "delta_net.DeltaNet": "deltanet", "h3.H3": "h3",
    "gated_delta_net.GatedDeltaNet": "gated_deltanet", "gla.GatedLinearAttention": "gla", "hyena.Hyena": "hyena",
    "mamba.Mamba": "mamba", "mamba2.Mamba2": "mamba2", "rwkv7.RWKV7Attention": "rwkv7",
    "slide_attn.SlidingAttn": "attention",
}  # fmt: skip
"""The rule of each mixer that has one. The others are taken as modules, from an installed zoology."""
PACKAGE = "zoology.mixers."
TASKS = {
    "ARConfig": "mqar",
    "DataSegmentConfig": "mqar",
    "MQARConfig": "mqar",
    "ForgettingMQARConfig": "forgetting_mqar",
    "CompositionalMQARConfig": "compositional_mqar",
}
DEFAULTS = {
    "ARConfig": {"num_kv_pairs": 8, "random_non_queries": False, "power_a": 0.01},
    "DataSegmentConfig": {"num_kv_pairs": 8, "random_non_queries": True, "power_a": 0.01},
    "MQARConfig": {"num_kv_pairs": 8, "random_non_queries": True, "power_a": 0.01},
    "ForgettingMQARConfig": {"num_kv_pairs": 8, "num_updates": 4, "random_non_queries": True, "power_a": 0.01},
    "CompositionalMQARConfig": {"num_kv_pairs": 4, "random_non_queries": True, "power_a": 0.01},
}  # fmt: skip
OF_ALL = {"vocab_size": 8192, "num_examples": 1000, "input_seq_len": 64}
MOST_ARMS = 24


def from_zoology(file: Path) -> Imported:
    """Reads a configuration, of which nothing is run.

    The study has a task for each data set, and an arm for each model of the commonest width. All learning rates are
    tuned.

    Raises:
        InputError: The file makes no list `configs` of `TrainConfig`, or nothing in it has a counterpart.
    """
    text = ConfigText(file)
    configs = text.values.get("configs")
    if not isinstance(configs, list) or not configs:
        raise InputError(f"{file}: makes no list `configs` that can be read{_because(text)}")
    trainings = [config for config in configs if isinstance(config, Made) and config.name == "TrainConfig"]
    if not trainings:
        raise InputError(f"{file}: `configs` holds no TrainConfig that can be read{_because(text)}")
    left_out = [note for note in text.notes if "uuid" not in note]
    if len(trainings) < len(configs):
        left_out.append(f"{len(configs) - len(trainings)} of {len(configs)} configs, which cannot be read")
    tasks = _tasks(trainings, left_out)
    if not tasks:
        raise InputError(f"{file}: no data of it has a counterpart: {'; '.join(left_out[:3])}")
    arms = _arms(trainings, left_out)
    base_name, base = next(iter(arms.items()))
    first = trainings[0].given
    data = _given(first, "data")
    batch = nearest_batch(data.get("batch_size", 32))
    examples = sum(_number(_fields(part), "num_examples", 1000) for part in _parts(trainings[0])[0])
    epochs = _number(first, "max_epochs", 100)
    rates = sorted(
        {float(rate) for t in trainings if isinstance(rate := t.given.get("learning_rate", 1e-3), int | float)}
    )
    left_out += [
        f"{epochs} epochs of {examples:,} examples are {max(1, epochs * examples // batch):,} steps of {batch}",
        "zoology's own embedding of positions, dropout, and the stop at an accuracy of 0.99",
    ]
    return Imported(
        name=file.stem if file.stem not in ("config", "configs") else file.resolve().parent.name,
        source=f"zoology: {file.name}",
        tasks=tasks,
        base={
            **({"rule": base["rule"]} if "rule" in base else {}),
            "model": {"d_model": _common_width(trainings), **base.get("model", {})},
            "train": {
                "steps": max(1, epochs * examples // batch),
                "batch_size": batch,
                "lr": rates[len(rates) // 2],
                "weight_decay": float(first.get("weight_decay", 0.1)),
            },
        },
        arms={name: _beyond(base, arm) for name, arm in arms.items() if name != base_name},
        rates=rates,
        left_out=left_out,
    )


def _parts(training: Made) -> tuple[list[Any], list[Any]]:
    """Returns the parts of the training data and of the tests, of which older versions have another form."""
    data = _given(training.given, "data")
    builder = _fields(data.get("builder"))
    if not builder:
        return _list(data, "train_configs"), _list(data, "test_configs")
    given = _fields(builder.get("kwargs"))
    if "train_configs" in given:
        return _list(given, "train_configs"), _list(given, "test_configs")
    kind = {"multiquery_ar": "MQARConfig"}.get(str(builder.get("name")).rpartition(".")[2])
    if kind is None:
        return [], []
    part: dict[str, Any] = {key: data[key] for key in ("vocab_size", "input_seq_len") if key in data}
    part |= {key: given[key] for key in ("num_kv_pairs", "random_non_queries") if key in given}
    return (
        [
            Made(
                kind,
                {**part, "power_a": given.get("train_power_a", 0.01), "num_examples": data.get("num_train_examples")},
            )
        ],
        [
            Made(
                kind,
                {**part, "power_a": given.get("test_power_a", 0.01), "num_examples": data.get("num_test_examples")},
            )
        ],
    )


def _because(text: ConfigText) -> str:
    return f": {text.notes[0]}" if text.notes else ""


def _given(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = given.get(key)
    return dict(value.given) if isinstance(value, Made) else dict(value) if isinstance(value, Mapping) else {}


def _fields(part: object) -> dict[str, Any]:
    return dict(part.given) if isinstance(part, Made) else dict(part) if isinstance(part, Mapping) else {}


def _list(given: Mapping[str, Any], key: str) -> list[Any]:
    value = given.get(key)
    return value if isinstance(value, list) else []


def _number(given: Mapping[str, Any], key: str, default: int) -> int:
    value = given.get(key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _width(training: Made) -> int:
    return _number(_given(training.given, "model"), "d_model", 128)


def _common_width(trainings: Sequence[Made]) -> int:
    """Returns the width of most models, and the first of several such widths."""
    models = {(_width(training), repr(_given(training.given, "model").get("sequence_mixer"))) for training in trainings}
    counts = Counter(width for width, _ in models)
    return max(dict.fromkeys(map(_width, trainings)), key=lambda width: counts[width])


def _tasks(trainings: Sequence[Made], left_out: list[str]) -> dict[str, dict[str, Any]]:
    """Returns a task for each data set: of several parts, a mixture with tests; of one, that part."""
    tasks: dict[str, dict[str, Any]] = {}
    for training in trainings:
        parts, tests = _parts(training)
        kinds = {part.name for part in (*parts, *tests) if isinstance(part, Made)}
        if not parts or len(kinds) != 1 or not kinds <= TASKS.keys():
            note = f"data of {', '.join(sorted(kinds)) or 'a form that is not read'}: no task of deltalab"
            left_out.extend([note] if note not in left_out else [])
            continue
        kind = kinds.pop()
        sized = [{**OF_ALL, **DEFAULTS[kind], **_fields(part)} for part in parts]
        judged = [{**OF_ALL, **DEFAULTS[kind], **_fields(part)} for part in tests]
        if any(isinstance(value, Unread) for part in (*sized, *judged) for value in part.values()):
            left_out.append(f"data of {kind} with numbers that are not read")
            continue
        if (
            kind == "ARConfig"
            and (note := "ARConfig may ask a key several times; here each is asked once") not in left_out
        ):
            left_out.append(note)
        task = _task(kind, sized, judged, left_out)
        try:
            get_task(TASKS[kind], **task)
        except InputError as error:
            left_out.append(f"data of {kind}: {error}")
            continue
        label = f"{TASKS[kind]}_{task['length']}x{task.get('pairs') or task['side'] ** 2}"
        tasks.setdefault(label, {"task": TASKS[kind], **task})
    batches = {nearest_batch(_given(training.given, "data").get("batch_size", 32)) for training in trainings}
    if len(batches) > 1:
        left_out.append(f"batches of {', '.join(map(str, sorted(batches)))}: that of the first config is taken")
    return tasks


def _task(
    kind: str, parts: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]], left_out: list[str]
) -> dict[str, Any]:
    largest = max(parts, key=lambda part: (part["input_seq_len"], part["num_kv_pairs"]))
    task: dict[str, Any] = {"length": largest["input_seq_len"], "vocab_size": largest["vocab_size"]}
    if kind == "CompositionalMQARConfig":
        task["side"] = round(largest["num_kv_pairs"] ** 0.5)
    else:
        task["pairs"] = largest["num_kv_pairs"]
    if kind == "ForgettingMQARConfig":
        task["updates"] = largest["num_updates"]
    if largest["power_a"] != 0.01:
        task["power"] = float(largest["power_a"])
    if largest["random_non_queries"]:
        task["random_non_queries"] = True
    if TASKS[kind] == "mqar":
        task["train_examples"] = sum(part["num_examples"] for part in parts)
        if len(parts) > 1:
            task["mixture"] = [[part["input_seq_len"], part["num_kv_pairs"], part["num_examples"]] for part in parts]
        pairs = [[part["input_seq_len"], part["num_kv_pairs"]] for part in tests]
        if len(tests) > 1 or pairs != [[task["length"], task["pairs"]]]:
            task["tests"] = [list(pair) for pair in dict.fromkeys(map(tuple, pairs))]
    else:
        for what, is_so in (
            (
                f"{len(parts) - 1} of {len(parts)} parts of the training data of {kind}: the largest is taken",
                len(parts) > 1,
            ),
            (f"tests of {kind} at other sizes than training", len(tests) > 1),
        ):
            left_out.extend([what] if is_so and what not in left_out else [])
    return task


def _arms(trainings: Sequence[Made], left_out: list[str]) -> dict[str, dict[str, Any]]:
    """Returns an arm for each model of the width that most models have, the first of them the base."""
    width = _common_width(trainings)
    widths = sorted({_width(training) for training in trainings})
    if len(widths) > 1:
        left_out.append(
            f"models of d_model {', '.join(map(str, widths))}: those of {width} are taken; `scales` adds others"
        )
    arms: dict[str, dict[str, Any]] = {}
    for training in trainings:
        model = _given(training.given, "model")
        if _width(training) != width:
            continue
        arm = _model(model, left_out)
        if arm in arms.values():
            continue
        if len(arms) >= MOST_ARMS:
            left_out.append(f"models after the first {MOST_ARMS}")
            break
        label = _label(model.get("name"), arm)
        number = sum(name == label or name.startswith(f"{label}_") for name in arms)
        arms[label if not number else f"{label}_{number + 1}"] = arm
    return arms


def _beyond(base: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an arm without the settings of its model that the base has, too."""
    shared = base.get("model", {})
    model = {key: value for key, value in arm["model"].items() if key not in shared or shared[key] != value}
    rest = {key: value for key, value in arm.items() if key != "model"}
    return {**rest, "model": model} if model else rest


def _label(name: object, arm: Mapping[str, Any]) -> str:
    if isinstance(name, str) and name not in ("", "default"):
        return name.replace("-", "_").replace(" ", "_")
    mixer = arm.get("model", {}).get("mixer")
    return str(mixer["module"].rpartition(".")[2].lower()) if mixer else str(_rule_name(arm["rule"]))


def _rule_name(rule: object) -> object:
    return rule["name"] if isinstance(rule, Mapping) else rule


def _model(model: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Returns a model as an arm: its rule or its mixer, and what goes with it."""
    mixer = _fields(model.get("sequence_mixer"))
    depth = _number(model, "n_layers", 2)
    settings: dict[str, Any] = {"layers": depth}
    block = model.get("block_type", "TransformerBlock")
    state = str(_fields(model.get("state_mixer")).get("name", "zoology.mixers.mlp.MLP"))
    if state.endswith("Identity") or block != "TransformerBlock":
        settings["mlp"] = False
    elif "MLP, with GELU in zoology, is SwiGLU here" not in left_out:
        left_out.append("MLP, with GELU in zoology, is SwiGLU here")
    mixers = [mixer]
    if str(mixer.get("name", "")).endswith("hybrid.Hybrid"):
        mixers = [_fields(part) for part in _list(_fields(mixer.get("kwargs")), "configs")] or [mixer]
    entries = [_entry(part, left_out) for part in mixers]
    if len(entries) == 1:
        (entry,) = entries
        heads = entry.pop("heads", None)
        settings |= {"heads": heads} if heads else {}
        if "module" in entry:
            return {"model": {**settings, "mixer": entry}}
        return {"rule": entry["name"] if len(entry) == 1 else entry, "model": settings}
    named = next((entry for entry in entries if "name" in entry), None)
    if named is None:
        # A list of layers needs its own rule: the first module stands for it.
        first = {"name": entries[0]["module"], **entries[0].get("kwargs", {})}
        entries[0] = named = first
    rule = {key: value for key, value in named.items() if key != "heads"}
    layers: list[Any] = []
    for i in range(depth):
        entry = dict(entries[i % len(entries)])
        heads = entry.pop("heads", None)
        layers.append("rule" if entry == rule else entry)
        settings |= {"heads": heads} if heads and layers[-1] == "rule" else {}
    if "rule" not in layers:
        layers[0] = "rule"
    return {"rule": rule["name"] if len(rule) == 1 else rule, "model": {**settings, "layers": layers}}


def _entry(mixer: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Returns a mixer as a rule with `heads`, or as a module with its arguments."""
    name, kwargs = str(mixer.get("name", "")), _fields(mixer.get("kwargs"))
    short = name.removeprefix(PACKAGE)
    if short not in RULES:
        plain = {key: value for key, value in kwargs.items() if not isinstance(value, Made | Unread)}
        return {"module": name, **({"kwargs": plain} if plain else {})}
    entry: dict[str, Any] = {"name": RULES[short]}
    if short == "slide_attn.SlidingAttn" and isinstance(kwargs.get("block_size"), int):
        entry["window"] = kwargs.pop("block_size")
    if isinstance(heads := kwargs.pop("num_heads", None), int):
        entry["heads"] = heads
    dropped = [key for key in kwargs if key not in ("l_max", "layer_idx")]
    if dropped and (note := f"{name}: {', '.join(dropped)}") not in left_out:
        left_out.append(note)
    return entry
