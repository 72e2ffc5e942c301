"""Study files that nobody should write: a grammar of them."""

# ruff: noqa: E501, RUF005

import contextlib
import inspect
import json
import random
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import yaml

from deltalab.gates import Gate
from deltalab.models.settings import limits as model
from deltalab.registry import list_rules, rule_plugin
from deltalab.rule import MOST_KNOB
from deltalab.tasks import BUILTIN
from deltalab.tasks.task import MOST_LENGTH
from deltalab.training import spec as training

RULES = (
    "comba",
    "gla",
    "deltanet",
    "mamba2",
    "gated_deltanet",
    "rwkv7",
    "attention",
    "delta_product",
    "mesa_net",
    "gsa",
)

TASKS: dict[str, dict[str, Any]] = {
    "mqar": {"length": 16, "pairs": 2, "vocab_size": 32},
    "text": {"length": 16},
    "parity": {"length_range": [3, 16], "test_range": [16, 32]},
    "mad_memorization": {"length": 16},
    "mad_selective_copy": {"length": 32, "copies": 4},
    "mad_fuzzy_recall": {"length": 48},
    "word_problem": {"group": "S3", "length": 16, "test_lengths": [16, 32]},
    "niah": {"variant": 1, "length": 64, "times": [1, 2], "keys": 8},
    "mod_arithmetic": {"length_range": [3, 16], "test_range": [16, 32]},
    "digits": {},
    "digit_patches": {},
    "shapes": {},
}

RANGES: tuple[tuple[str, Any], ...] = (
    ("train.lr", {"log_uniform": [1e-3, 1e-1]}),
    ("train.weight_decay", {"uniform": [0.0, 0.5]}),
    ("model.heads", {"choice": [1, 2]}),
    ("train.steps", {"integers": [4, 8]}),
)


def study(r: random.Random) -> dict[str, Any]:
    """A study that can be planned, or nearly so."""
    names = r.sample(sorted(TASKS), r.randint(1, 2))
    base, *others = r.sample(RULES, 3)
    found: dict[str, Any] = {
        "name": r.choice(["s", "a-b.c", "study_1"]),
        "task": {name: dict(TASKS[name]) for name in names},
        "base": {
            "rule": base,
            "model": {"d_model": r.choice([8, 16]), "layers": r.randint(1, 2), "heads": 1},
            "train": {"steps": 6, "batch_size": 4, "lr": 0.01, "evaluations": 2},
        },
        "seeds": r.choice([2, 6, 7, {"at_least": 6, "at_most": 9}]),
    }
    kind = r.choice(["plain", "tune", "search", "scales"])
    if kind == "search":
        space = {
            "rule": {"choice": ["comba", {"name": "comba", "transition": "iplr"}, "gla"]},
            "model.layers": {"pattern": ["rule", "attention"], "lengths": [2, 3]},
            "model.mlp": {"choice": [True, False]},
            "model.mlp_width": {"integers": [16, 32], "when": {"model.mlp": True}},
            "train.lr": {"log_uniform": [1e-3, 1e-1]},
            "constrain": {"state": {"at_most": 40960}},
            "fidelity": {"train.steps": [2, 6], "keep": 0.5},
        }
        kept = r.sample(sorted(space), r.randint(3, len(space)))
        found["search"] = {"trials": 6, "finalists": 2, "train.lr": space["train.lr"], **{k: space[k] for k in kept}}
    else:
        arms: dict[str, Any] = {
            "other": {"rule": others[0]},
            "another": {"rule": others[1], "match": {r.choice(["state", "flops", "parameters"]): True}},
            "wide": {"model": {"expand_v": 2}},
            "layered": {"model": {"layers": ["rule", {"name": "attention", "window": 8}]}},
            "repeated": {"model": {"layers": {"repeat": 2, "pattern": ["rule", "rwkv6"]}}},
            "fast": {"train": {"lr": 0.2, "betas": [0.9, 0.99]}},
        }
        found["arms"] = {name: arms[name] for name in r.sample(sorted(arms), r.randint(0, 3))}
    if kind == "tune":
        found["tune"] = {"trials": 2, **dict(r.sample(RANGES, r.randint(1, 2)))}
    if kind == "scales":
        found["scales"] = {"model.d_model": [8, 16], "transfer": r.choice(["mup", "none"])}
        found["seeds"] = 3
    if r.random() < 0.5:
        found["resources"] = r.choice([{"cpu": 1}, {"cpu": 2, "gpu": 0.5}, {"gpu": 1, "stack": 4}])
    if r.random() < 0.5:
        found["for_task"] = {names[0]: {"train": {"steps": 8}}}
    if r.random() < 0.5:
        found["profiles"] = {"gpu": {"base": {"model": {"d_model": 32}}, "seeds": 9}}
    if r.random() < 0.5:
        found |= {"deadline": 60, "family": "study", "description": "what it asks"}
    return found


# YAML that stands where a value is expected, as it is written.
RAW = (
    *("1" * n for n in (19, 20, 400, 5000, 20_000)),
    *(f"{sign}{power}" for sign in ("", "-") for power in ("1e3", "1e9", "1e18", "1e308", "1e999")),
    *("0", "-1", "-0.0", "1e-320", "0.5", "1000000007", "10000000", "2147483648", "9223372036854775808", "65537", "4097"),
    *(".inf", "-.inf", ".nan", ".NaN", "0x" + "f" * 5000, "0b" + "1" * 9000, "1" + ":59" * 2000, "1_0" * 900, "0o17", "010"),
    *("2020-01-01", "2020-13-45", "2020-01-01 99:99:99", "0000-00-00", "2001-12-14t21:59:43.10-05:00"),
    *("!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!binary aGk=", "!!binary '%'", "!!int x", "!!float x", "!!bool x"),
    *("!!null x", "!!str [1]", "!!map [1]", "!!seq {a: 1}", "!!timestamp x", "!mine x", "!!python/name:os.system x", "! x"),
    *('!!python/object/apply:os.system ["true"]', "!<tag:yaml.org,2002:int> 7", "!!int '0x'", "!!float '1:x'", "!!merge x"),
    *(r'"\0"', r'"\uD800"', r'"\uDFFF\uD800"', r'"\x1b[31m"', r'"\u202e"', r'"\x85"', r'"\uFEFF"', r'"\U0001F600"', r'"\q"'),
    *("null", "~", "true", "yes", "off", '""', "' '", "[]", "{}", "[[]]", "[null]", "{a: null}", "{1: 2}", "{null: 1}", "-"),
    *("[" * n + "]" * n for n in (40, 400, 3000)),
    *("{a: " * n + "1" + "}" * n for n in (40, 400, 3000)),
    *("[" + "1, " * n + "2]" for n in (50, 2000, 60_000)),
    *("{" + ", ".join(f"k{i}: {i}" for i in range(n)) + "}" for n in (50, 2000)),
    *("&a [*a]", "&a {b: *a}", "*nowhere", "&a 1", "&a [1, &a [*a]]", "{<<: {a: 1}}", "{<<: 1}", "{<<: [1]}", "{<<: &a {<<: *a}}"),
    *("? [1]\n: 2", "{[1]: 2}", "{? {a: b} : c}", "a: b: c", "@", "`", "%", "|\n text", ">\n text", "'", '"', "[", "{", "]", "\t1"),
    *("x" * n for n in (300, 20_000, 400_000)),
    *("../../etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/", ".", "~", "''", "base", "rule", "comba", "attention"),
    *("[1, 2]", "[2, 1]", "[1, 1]", "[0, 0]", "[.nan, 1]", "[1, .inf]", "[a, b]", "[1.5, 2.5]", "[-1e308, 1e308]", "[0, 1000000000]"),
    *("{repeat: 1000000000, pattern: [rule]}", "{repeat: 30, pattern: [{repeat: 30, pattern: [{repeat: 30, pattern: [rule]}]}]}"),
    *("{log_uniform: [1e-320, 1e308]}", "{integers: [0, 1000000000000]}", "{choice: [a, a]}", "{choice: [{}, []]}"),
    *("{pattern: [rule, gla], lengths: [1000000000]}", "{pattern: [rule, gla], lengths: [9], repeat: 1000000000}"),
    *("{at_least: 2, at_most: 1000}", "{at_least: 999, at_most: 1000}", "{state: true}", "{parameters: true, scale: rule.x}"),
)  # fmt: skip

# Numbers that are too large, or nearly so, for a setting that counts.
LARGE = ("10", "100", "1000", "4096", "50000", "1000000", "10000000", "1000000000", "1000000000000")

# What a study may have at most, by the path where it stands.
LIMITS: tuple[tuple[str, Any], ...] = (
    ("base.rule", {"name": "gka", "iterations": 1_048_576}),
    ("base.rule", {"name": "gka", "iterations": 400}),
    ("base.model.layers", 1000),
    ("base.model.layers", ["rule", "attention"] * 500),
    ("base.model.heads", 4096),
    ("base.model.d_model", 65_536),
    ("base.model.d_model", 1024),
    ("base.model.conv", 1024),
    ("base.model.mlp_width", 1_048_576),
    ("base.model.expand_v", 256),
    ("base.model.chunk_size", 65_536),
    ("base.train.steps", 10**9),
    ("base.train.batch_size", 1_048_576),
    ("base.train.evaluations", 100_000),
    ("base.train.eval_batches", 10**6),
    ("seeds", 1000),
    ("seeds", {"at_least": 2, "at_most": 1000}),
    ("arms", {f"a{i}": {"train": {"lr": i + 1.0}} for i in range(499)}),
    ("arms", {f"a{i}": {"model": {"d_model": 8 * i + 8}} for i in range(200)}),
    ("scales", {"model.d_model": [8 * i + 8 for i in range(20)]}),
    ("scales", {"model.layers": [50 * i + 50 for i in range(20)]}),
    ("tune", {"trials": 10_000, "train.lr": {"log_uniform": [1e-4, 1.0]}}),
    ("search", {"trials": 10_000, "train.lr": {"log_uniform": [1e-4, 1.0]}, "model.mlp": {"choice": [True, False]}}),
    ("search", {"trials": 99, "finalists": 99, "model.layers": {"pattern": ["rule", "gla"], "lengths": [50, 100]}}),
    ("task", {"mqar": {"length": 1_048_576, "pairs": 2, "vocab_size": 32}}),
    ("task", {"mqar": {"length": 16, "pairs": 2, "vocab_size": 16_777_216}}),
    ("task", {"text": {"length": 1_048_576}}),
    ("task", {"text": {"length": 16, "corpus": "/usr/lib"}}),
    ("resources", {"cpu": 4096, "memory": 1_048_576, "stack": 10_000}),
)

COUNTS = ("slots", "rank", "levels", "width")
"""What a gate counts."""

_HELD = re.compile(r"'?@(\d+)@'?")


def _paths(node: Any, under: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if under:
        yield under
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield from _paths(value, (*under, key))


def _parent(study: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        study = study[key]
    return study


def mutated(r: random.Random) -> bytes:
    """A study with up to three of its parts replaced, taken away, renamed or moved."""
    found = json.loads(json.dumps(study(r)))
    raw: list[str] = []

    def held(text: str) -> str:
        raw.append(text)
        return f"@{len(raw) - 1}@"

    for _ in range(r.choice([0, 1, 1, 1, 1, 2, 3])):
        path = r.choice(sorted(_paths(found), key=str))
        parent, key = _parent(found, path), path[-1]
        what = r.choice(
            ["raw", "raw", "large", "large", "near", "near", "gone", "renamed", "moved", "inside", "word", "limit"]
        )
        if what == "limit":
            where, value = r.choice(LIMITS)
            with contextlib.suppress(KeyError, TypeError):  # another mutation took the place away
                _parent(found, tuple(where.split(".")))[where.rpartition(".")[2]] = value
        elif what == "raw":
            parent[key] = held(r.choice(RAW))
        elif what == "large":
            parent[key] = held(r.choice(LARGE))
        elif what == "near" and isinstance(parent[key], int | float):
            parent[key] = type(parent[key])(parent[key] * r.choice([0.5, 2, 3, 8, 50]))
        elif what == "word":
            parent[key] = "".join(
                chr(r.choice([r.randrange(128), r.randrange(0xD800)])) for _ in range(r.randrange(20))
            )
        elif what == "gone":
            del parent[key]
        elif what == "renamed" and isinstance(parent, dict):
            parent[held(r.choice(RAW + tuple("abcdef")))] = parent.pop(key)
        elif what == "moved":
            other = r.choice(sorted(_paths(found), key=str))
            parent[key] = json.loads(json.dumps(_parent(found, other)))
        else:
            parent[key] = [parent[key]] if r.random() < 0.5 else {"a": parent[key]}
    text = yaml.safe_dump(found, sort_keys=False, width=10**6, allow_unicode=r.random() < 0.5)
    text = _HELD.sub(lambda place: raw[int(place[1])] if int(place[1]) < len(raw) else place[0], text)
    return text.encode("utf-8", "surrogatepass")


def _upto(r: random.Random, most: float) -> int:
    """A whole number up to a limit: the limit itself, or a power of two."""
    return int(most) if r.random() < 0.4 else 2 ** r.randint(0, int(most).bit_length() - 1)


def _rule(r: random.Random) -> dict[str, Any]:
    """Any rule, with some of its knobs as far as they go."""
    name = r.choice(list_rules())
    found: dict[str, Any] = {"name": name}
    for field in fields(rule_plugin(name).kind):
        option = r.choice(field.metadata.get("options", (None,)))
        if r.random() < 0.5:
            continue
        if isinstance(option, bool | str):
            found[field.name] = option
        elif isinstance(option, int | float):
            found[field.name] = _upto(r, MOST_KNOB)
        elif isinstance(option, Gate) and (counts := [key for key, _ in option.options if key in COUNTS]):
            found[field.name] = {option.kind: {r.choice(counts): _upto(r, 65_536)}}
    return found


def _task(r: random.Random) -> dict[str, Any]:
    """Any task, with some of its whole numbers as far as they go."""
    name = r.choice(sorted(set(BUILTIN) - {"image_folder"}))  # which reads a folder of the user's
    found = dict(BUILTIN[name].example) | TASKS.get(name, {})
    for parameter in inspect.signature(BUILTIN[name]).parameters.values():
        if type(found.get(parameter.name, parameter.default)) is int and r.random() < 0.4:
            found[parameter.name] = _upto(r, MOST_LENGTH)
    return {name: found}


def limited(r: random.Random) -> bytes:
    """A study that is right but for one to four of its settings, which lie at a limit or anywhere below it."""
    found = json.loads(json.dumps(study(r)))
    parts = {"rule": found["base"], "model": found["base"]["model"], "train": found["base"]["train"]}
    for _ in range(r.choice([1, 1, 2, 3, 4])):
        what = r.choice(["rule", "rule", "arm", "task", "model", "model", "train", "limit"])
        if what == "rule":
            parts["rule"]["rule"] = _rule(r)
        elif what == "arm" and "search" not in found:
            found.setdefault("arms", {})[f"limited{r.randrange(9)}"] = {"rule": _rule(r)}
        elif what == "task":
            found["task"] = _task(r)
            found.pop("for_task", None)
        elif what in ("model", "train"):
            most = (model if what == "model" else training).MOST
            key = r.choice(sorted(key for key in most if "." not in key and key not in ("vocab_size", "window")))
            parts[what][key] = _upto(r, most[key])
        else:
            where, value = r.choice(LIMITS)
            with contextlib.suppress(KeyError, TypeError):  # the study has no such part
                _parent(found, tuple(where.split(".")))[where.rpartition(".")[2]] = value
    return yaml.safe_dump(found, sort_keys=False, width=10**6).encode()


def torn(r: random.Random) -> bytes:
    """A study's text with bytes cut off, put in, doubled or exchanged."""
    text = yaml.safe_dump(study(r), sort_keys=False).encode()
    for _ in range(r.randint(1, 4)):
        at = r.randint(0, len(text))
        what = r.choice(["cut", "put", "byte", "line", "swap"])
        lines = text.split(b"\n")
        if what == "cut":
            text = text[:at]
        elif what == "put":
            text = text[:at] + r.choice(RAW).encode("utf-8", "surrogatepass") + text[at:]
        elif what == "byte":
            text = text[:at] + r.randbytes(r.randint(1, 3)) + text[at + 1 :]
        elif what == "line":
            lines.insert(r.randint(0, len(lines)), r.choice(lines))
            text = b"\n".join(lines)
        else:
            one, other = r.randrange(len(lines)), r.randrange(len(lines))
            lines[one], lines[other] = lines[other], lines[one]
            text = b"\n".join(lines)
    return text


def _bomb(levels: int, wide: int, merged: bool = False) -> str:
    lines = ["a0: &a0 {k: v}" if merged else "a0: &a0 [x]"]
    for i in range(1, levels):
        inside = ", ".join([f"*a{i - 1}"] * wide)
        lines.append(f"a{i}: &a{i} {{<<: [{inside}], k{i}: v}}" if merged else f"a{i}: &a{i} [{inside}]")
    return "\n".join(lines)


VALID = yaml.safe_dump({
    "name": "s", "task": {"mqar": TASKS["mqar"]}, "seeds": 2,
    "base": {"rule": "gla", "model": {"d_model": 8, "heads": 1}, "train": {"steps": 4, "batch_size": 2, "lr": 0.1, "evaluations": 1}},
})  # fmt: skip

WHOLE: tuple[bytes, ...] = tuple(
    text.encode("utf-8", "surrogatepass")
    for text in (
        "", " ", "\n", "\t", "---", "---\n---\n", "...", "- a\n- b", "3", "text", "null", "\ufeff" + VALID, "\ufeff",
        VALID.replace("\n", "\r\n"), VALID.replace("\n", "\r"), VALID.replace("  ", "\t"), VALID + "---\n" + VALID,
        VALID + "...\n", "%YAML 9.9\n---\n" + VALID, "%TAG ! tag:x,1:\n---\n" + VALID, VALID + VALID, VALID + "\0", "\0" * 999,
        *(VALID + _bomb(levels, wide, merged) for levels in (5, 9, 40) for wide in (2, 9) for merged in (False, True)),
        *(VALID + "deadline: " + "[" * n for n in (50, 1000, 100_000)), *("[" * n for n in (50, 1000, 100_000)),
        *("{" * n for n in (50, 1000)), *("- " * n for n in (50, 1000, 30_000)), *("? " * n for n in (50, 1000, 30_000)),
        *("\n".join(" " * i + "a:" for i in range(n)) for n in (50, 1000)),
        VALID + "\n".join(f"k{i}: {i}" for i in range(40_000)), VALID + "# " + "x" * 3_000_000, VALID + "\n" * 2_000_000,
        VALID + "description: " + "x" * 3_000_000, VALID + "description: |\n" + " x\n" * 200_000,
        VALID + "arms: {" + ", ".join(f"a{i}: {{train: {{lr: {i + 1}}}}}" for i in range(3000)) + "}",
        VALID + "ablate: [" + "conv, " * 5000 + "mlp]", VALID + "&a\n" * 500, VALID + "description: &a *a",
        VALID + "tune: {trials: 10000, train.lr: {log_uniform: [1e-4, 1]}, train.weight_decay: {uniform: [0, 1]}}",
        VALID + "tune: {trials: 9, " + ", ".join(f"train.k{i}: {{uniform: [0, 1]}}" for i in range(500)) + "}",
        VALID + "search: {trials: 10000, finalists: 100, train.lr: {log_uniform: [1e-4, 1]}, model.mlp: {choice: [true, false]}}",
        VALID + "profiles: {" + ", ".join(f"p{i}: {{seeds: {i + 1}}}" for i in range(900)) + "}",
        "name: s\nname: s\n" + VALID, VALID.replace("seeds: 2", "seeds: 1000"), VALID.replace("mqar", "mqar" * 9000),
    )
) + (
    VALID.encode("utf-16"), VALID.encode("utf-32"), VALID.encode("utf-16-le"), b"\xff\xfe", b"\x80" * 50, b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    b"\x7fELF" + b"\0" * 5000, b"PK\x03\x04" + bytes(range(256)) * 9, b"SQLite format 3\0" + b"\0" * 80, VALID.encode() + b"\xed\xa0\x80",
)  # fmt: skip


def hostile(r: random.Random) -> bytes:
    """A file. Four of five are studies: half with a mutation or a few, half with settings at their limits."""
    share = r.random()
    if share < 0.8:
        return mutated(r) if share < 0.4 else limited(r)
    return torn(r) if share < 0.94 else r.choice(WHOLE) if share < 0.99 else r.randbytes(r.randrange(200))
