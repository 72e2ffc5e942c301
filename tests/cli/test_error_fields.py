"""What a program is told of the mistakes that users make most: every field of the error that can be known."""

import json
from pathlib import Path

import pytest
from tests.support.command import STUDY, Platform

FILE = "study.yaml"

OF_A_FILE = [
    # what the file says in place of what, kind, where after the file, key, one that is allowed, nearest
    ("seeds: 2", "seedz: 2", "unknown", "", "seedz", "seeds", "seeds"),
    ("seeds: 2", "seeds: {at_lest: 3, at_most: 5}", "unknown", "seeds", "at_lest", "at_most", "at_least"),
    ("seeds: 2", "seeds: one", "input", "", "seeds", None, None),
    ("seeds: 2", "", "input", "", "seeds", None, None),
    ("name: tiny", "name: tiny\nname: b", "input", "line 3", "name", None, None),
    ("mqar:", "mqr:", "unknown", "", "mqr", "mqar", "mqar"),
    ("pairs: 2", "pair: 2", "unknown", "task 'mqar'", "pair", "length", "pairs"),
    ("pairs: 2", "pairs: two", "input", "task 'mqar'", "pairs", None, None),
    ("pairs: 2", "pairs: 0", "input", "task 'mqar'", "pairs", None, None),
    ("rule: comba", "rule: comb", "unknown", "", "comb", "gla", "comba"),
    ("rule: comba", "rule: {name: comba, transitin: iplr}", "unknown", "rule 'comba'", "transitin", "d", "transition"),
    ("rule: comba", "rule: {name: comba, transition: ipl}", "unknown", "comba.transition", "ipl", "dplr", "iplr"),
    ("rule: comba", "rule: {name: comba, d: {hed: {}}}", "unknown", "comba.d", "hed", "head", "head"),
    ("rule: comba", "rule: {name: comba, d: {head: {init: x}}}", "input", "comba.d", "head.init", None, None),
    ("d_model: 16", "d_modl: 16", "unknown", "base", "d_modl", "heads", "d_model"),
    ("d_model: 16", "d_model: big", "input", "base", "model.d_model", None, None),
    ("heads: 1", "heads: 3", "input", "base", "model.d_model", None, None),
    ("mlp: false", "mlp: maybe", "unknown", "base: model.mlp", "maybe", "swiglu", None),
    ("mlp: false", "mlp: false, skip: maybe", "input", "base", "model.skip", "true", None),
    ("mlp: false", "mlp: false, attention: [7]", "input", "base", "model.attention", "0", None),
    ("mlp: false", "mlp: false, output_gate: sil", "unknown", "base: model.output_gate", "sil", "none", "silu"),
    ("steps: 4", "stepss: 4", "unknown", "base", "stepss", "lr", "steps"),
    ("steps: 4, ", "", "input", "base: train", "steps", None, None),
    ("steps: 4", "steps: 0", "input", "base", "train.steps", None, None),
    ("steps: 4", "steps: 1", "input", "base", "train.evaluations", None, None),
    ("lr: 1e-2", "lr: -1", "input", "base", "train.lr", None, None),
    ("lr: 1e-2", "lr: 1, schedule: cosin", "unknown", "base: train.schedule", "cosin", "wsd", "cosine"),
    ("train.lr:", "train.lrr:", "unknown", "tune", "train.lrr", "train.clip", "train.lr"),
    ("log_uniform:", "log_unifrm:", "unknown", "tune.train.lr", "log_unifrm", "choice", "log_uniform"),
    ("[1e-3, 1e-1]", "[1e-1, 1e-3]", "input", "", "tune.train.lr", None, None),
    ("ablate: [d]", "ablate: [e]", "unknown", "ablate", "e", "g", None),
    ("ablate: [d]", "ablate: [d, d]", "input", "ablate", "d", None, None),
    ("ablate: [d]", "arms: {x: {modl: {layers: 2}}}", "unknown", "arms.x", "modl", "rule", "model"),
    ("ablate: [d]", "arms: {x: {rule: gatd_deltanet}}", "unknown", "arms.x", "gatd_deltanet", "gla", "gated_deltanet"),
    ("ablate: [d]", "arms: {base: {rule: gla}}", "input", "arms.base", "base", None, None),
    ("ablate: [d]", "arms: {x: {}}", "input", "", "x", None, None),
    ("ablate: [d]", "for_task: {mqr: {rule: gla}}", "unknown", "for_task", "mqr", "mqar", "mqar"),
    ("ablate: [d]", "resources: {gpus: 1}", "unknown", "resources", "gpus", "cpu", "gpu"),
    ("ablate: [d]", "search: {model.layers: {choice: [1, 2]}, trials: 9}", "input", "", "tune", None, None),
]  # fmt: skip
OF_WORDS = [
    # the command, kind, where, key, one that is allowed, nearest, mend
    ("study plan stdy.yaml", "input", "stdy.yaml", "stdy.yaml", FILE, FILE, None),
    ("study plan quickstrt", "unknown", None, "quickstrt", "mad", "quickstart", None),
    (f"study plan {FILE} --profile lnger", "unknown", FILE, "lnger", "longer", "longer", None),
    (f"study run {FILE} --executor inlin", "unknown", "--executor", "inlin", "ray", "inline", None),
    (f"study run {FILE} --log-to wandbb", "unknown", "--log-to", "wandbb", "mlflow", "wandb", None),
    (f"study run {FILE} --backup-every 10x", "input", "--backup-every", "10x", None, None, None),
    (f"study run {FILE} --wrkers 1", "usage", None, "--wrkers", "--db", "--workers", None),
    (f"study rn {FILE}", "usage", None, "rn", "plan", "run", None),
    (f"stdy run {FILE}", "usage", None, "stdy", "rule", "study", None),
    (f"study plan {FILE} steps", "input", f"{FILE}: command line", "steps", None, None, None),
    (f"study plan {FILE} seeds=3 seeds=4", "input", f"{FILE}: command line", "seeds", None, None, None),
    (f"study plan {FILE} trian.lr=1", "unknown", f"{FILE}: command line: trian.lr=1", "trian", "base", "train", None),
    (f"study plan {FILE} train.stps=3", "unknown", f"{FILE}: command line: train.stps=3: base", "stps", "lr", "steps",
     None),
    (f"study plan {FILE} ablate.3=d", "input", f"{FILE}: command line: ablate.3", "3", "0", None, None),
    (f"study plan {FILE} name.x=3", "input", f"{FILE}: command line: name.x", "x", None, None, None),
    (f"study plan {FILE} family=", "unknown", f"{FILE}: command line: family=", "family", "name", None, None),
    ("study report tny", "unknown", "sqlite:///deltalab.db", "tny", "tiny", "tiny", None),
    ("study report tiny --against bse", "unknown", "tiny", "bse", "without_d", "base", None),
    ("study report tiny --db none.db", "input", "sqlite:///none.db", None, None, None,
     "deltalab study run makes one"),
    ("study trace tiny nokey", "input", None, "nokey", None, None, None),
    ("export tiny out --arm bse", "unknown", "study 'tiny'", "bse", "without_d", "base", None),
    ("rule show comb", "unknown", None, "comb", "gla", "comba", None),
    ("rule new comba", "input", None, "comba", None, None, "take another name"),
    ("rule new 3x", "input", None, "3x", None, None, None),
    ("task show mqar lngth=3", "unknown", "task 'mqar'", "lngth", "pairs", "length", None),
    ("model show qwen3_nxt", "unknown", "model.preset", "qwen3_nxt", "jamba", "qwen3_next", None),
    ("place hybird_ratio", "unknown", None, "hybird_ratio", "hybrid_ratio", "hybrid_ratio", None),
    (f"place {FILE}", "input", FILE, "model.layers", None, None, None),
    (f"place {FILE} --best 0", "usage", None, "--best", None, None, None),
    (f"place {FILE} --executor slurm", "unknown", "--executor", "slurm", "ray", None, None),
    (f"score ruel.py --against {FILE}", "input", "ruel.py", "ruel.py", "rule.py", "rule.py", None),
]  # fmt: skip


def held(platform: Platform, words: str) -> dict[str, object]:
    said = platform(*words.split(), "--json")
    assert (said.code, said.out) == (2, "")
    error = json.loads(said.err.splitlines()[-1])["error"]
    if error["nearest"] is not None:
        assert error["nearest"] in error["allowed"]
    return error


@pytest.mark.parametrize(("old", "new", "kind", "where", "key", "allowed", "nearest"), OF_A_FILE)
def test_a_wrong_key_or_value_of_a_file_is_told_in_full(
    old, new, kind, where, key, allowed, nearest, platform: Platform, here: Path
) -> None:
    assert STUDY.count(old) == 1
    (here / FILE).write_text(STUDY.replace(old, new))
    error = held(platform, f"study plan {FILE}")
    assert (error["kind"], error["key"], error["nearest"]) == (kind, key, nearest)
    assert error["where"].removeprefix(FILE).endswith(where)
    assert error["where"].startswith(FILE)
    assert bool(where) == (error["where"] != FILE)
    assert (allowed in error["allowed"]) if allowed else error["allowed"] is None


@pytest.mark.parametrize(("words", "kind", "where", "key", "allowed", "nearest", "mend"), OF_WORDS)
def test_a_wrong_word_of_a_command_is_told_in_full(
    words, kind, where, key, allowed, nearest, mend, platform: Platform, done: Path
) -> None:
    (done / "rule.py").write_text("")
    error = held(platform, words)
    assert [error[name] for name in ("kind", "where", "key", "nearest", "mend")] == [kind, where, key, nearest, mend]
    assert (allowed in error["allowed"]) if allowed else error["allowed"] is None
