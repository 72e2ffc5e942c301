"""A trial's model at a paper's size: its parameters, its recipe, and what each number comes from."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from deltalab.data.pack import pack
from deltalab.data.sources import Reading
from deltalab.errors import InputError
from deltalab.export.papers import find_recipe, recipe_names
from deltalab.export.recipe import by_a_paper, make_recipe, paper_recipe
from deltalab.export.scales import SCALES, at_scale, deepened, parameter_count
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.spec import TrainSpec

TRAIN = TrainSpec(steps=200, batch_size=8, lr=4e-3, weight_decay=0.05, warmup=0.1, evaluations=1)
ATTENTION = {"name": "attention", "layer": {"heads": 4, "kv_heads": 2, "rope": True, "conv": 0}}


def spec(**given: object) -> ModelSpec:
    return ModelSpec.of({"rule": "comba", "vocab_size": 32, "d_model": 64, "layers": 2, "heads": 2, **given})


def source(model: ModelSpec | None = None, *, trained: bool = True) -> Source:
    model = model or spec()
    weights = build_model(model, seed=1).state_dict
    recipe = {**make_recipe(TRAIN, length=24, seed=3, origin="trial abc"), "trial": {"seed": 3}}
    return Source(
        model, weights if trained else None, recipe, {"study": "s", "arm": "base"}, {"validation accuracy": 0.994}, None
    )


def recipe_of(folder: Path) -> dict:
    return yaml.safe_load((folder / "recipe.yaml").read_text())


@pytest.mark.parametrize(
    ("scale", "model"),
    [
        ("340M", {}),
        ("1.3B", {}),
        pytest.param("2.7B", {}, marks=pytest.mark.slow),
        ("340M", {"tie_embeddings": False}),
        ("340M", {"rule": "mamba2", "block": "mamba"}),
        ("340M", {"rule": "gated_deltanet", "attention": "second_to_last_of_every_eight", "layers": 8}),
        ("340M", {"rule": "gated_deltanet", "layers": ["rule", "kda", ATTENTION], "d_model": 32, "heads": 4}),
        ("340M", {"attention": [1], "key_dim": 16, "expand_v": 2.0, "gate_rank": 8}),
        ("340M", {"heads": 4, "qk_heads": 2}),
    ],
)
def test_a_scale_has_the_parameters_of_its_name(scale, model):
    found, _ = at_scale(spec(**model), scale, None, {})
    assert abs(parameter_count(found) / SCALES[scale].parameters - 1) <= 0.03
    assert (found.d_model, found.vocab_size) == (SCALES[scale].d_model, 32_000)
    assert found.d_model // found.heads == 128


def test_ratios_of_the_trial_stay(monkeypatch):
    hybrid = spec(layers=["rule", ATTENTION, "kda"], d_model=32, heads=4, key_dim=4, gate_rank=8)
    found, said = at_scale(hybrid, "340M", None, {})
    assert found.key_dim == 64  # half of the width over the heads, as 4 is of 32 / 4
    assert found.gate_rank == 256
    assert found.layers[1]["layer"] == {"heads": 8, "kv_heads": 4, "rope": True, "conv": 0}
    assert [found.at(i).make_rule().name for i in range(5)] == ["comba", "attention", "kda", "comba", "attention"]
    assert f"the list of 3 layers is repeated to {found.depth}" in said[-1]
    places, said = at_scale(spec(attention=[1], layers=2), "340M", None, {})
    assert places.attention == tuple(range(1, places.depth, 2))
    assert said[-1] == f"attention in {len(places.attention)} of {places.depth} layers, as in every 2"
    with pytest.raises(InputError, match="qk_heads 1 of 3 heads are groups of 3, which do not divide 8 heads"):
        at_scale(spec(heads=3, qk_heads=1, d_model=24), "340M", None, {})


def test_a_list_that_does_not_fit_is_cut_and_said():
    model = spec(layers=["rule", "kda", "rule", "gla", "rule"])
    assert [deepened(model, 7).at(i).make_rule().name for i in (5, 6)] == ["comba", "kda"]
    found, said = at_scale(model, "340M", None, {})
    whole, rest = divmod(found.depth, 5)
    assert rest
    cut = f"{whole} times, and the last time cut after {rest} of its layers"
    assert said == [f"the list of 5 layers is repeated to {found.depth}: {cut}"]


def test_the_vocabulary_follows_the_tokenizer_padded_to_64():
    found, _ = at_scale(spec(), "340M", 50_257, {})
    assert found.vocab_size == 50_304
    found, _ = at_scale(spec(), "340M", 256, {})
    assert found.vocab_size == 256


def test_what_the_user_sets_stays_and_a_size_that_misses_the_name_is_refused():
    found, _ = at_scale(spec(), "340M", None, {"d_model": 768, "heads": 6})
    assert (found.d_model, found.heads) == (768, 6)
    assert abs(parameter_count(found) / 3.4e8 - 1) <= 0.03
    with pytest.raises(
        InputError, match=r"--scale 340M: the nearest model has [\d,]+ parameters, -[\d.]+%, and a scale"
    ):
        at_scale(spec(), "340M", None, {"layers": 3})


def test_a_trial_by_muon_is_exported_to_train_by_muon(tmp_path):
    train = TrainSpec(steps=10, batch_size=2, lr=3e-3, evaluations=1, optimizer="muon")
    recipe = make_recipe(train, 16, seed=0, origin="trial k")
    assert export(replace(source(), recipe=recipe), tmp_path / "out").notes == []
    written = recipe_of(tmp_path / "out")
    assert (written["optimizer"]["name"], written["origin"]["optimizer"]) == ("muon", {"from": "trial k"})


def test_a_scaled_folder_is_untrained_and_says_so(tmp_path):
    written = export(source(), tmp_path / "out", given=["model.d_model=128", "recipe.optimizer.betas=[0.9, 0.99]"])
    assert not written.trained
    assert not (tmp_path / "out/model.safetensors").exists()
    recipe = recipe_of(tmp_path / "out")
    assert recipe["provenance"] == {"study": "s", "arm": "base", "weights": "initial"}
    text = (tmp_path / "out/README.md").read_text() + (tmp_path / "out/config.json").read_text()
    assert "It is untrained" in text
    assert "0.994" not in text
    assert "validation" not in text
    assert recipe["model"]["d_model"] == 128
    assert recipe["origin"]["model.d_model"] == {"from": "--set", "was": 64}
    assert recipe["optimizer"]["betas"] == [0.9, 0.99]


def test_the_recipe_says_what_each_number_comes_from(tmp_path):
    export(source(), tmp_path / "own")
    own = recipe_of(tmp_path / "own")
    assert own["optimizer"] == {"name": "adamw", "lr": 4e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.05}
    assert own["schedule"] == {"kind": "cosine", "warmup_steps": 20, "final": 0.0}
    assert (own["batch"], own["steps"], own["clip"]) == ({"sequences": 8, "length": 24}, 200, 1.0)
    assert (own["seed"], own["precision"], own["tokenizer"]) == (3, "bf16", None)
    assert own["provenance"]["validation accuracy"] == 0.994
    assert own["provenance"]["weights"] == "trained"
    assert set(map(json.dumps, own["origin"].values())) == {'{"from": "trial abc"}'}

    export(source(), tmp_path / "scaled", scale="340M", given=["recipe.steps=1000"])
    scaled, origin = recipe_of(tmp_path / "scaled"), recipe_of(tmp_path / "scaled")["origin"]
    assert scaled["optimizer"]["lr"] == 4e-3 * 64 / 1024
    assert origin["lr"]["was"] == 4e-3
    assert origin["lr"]["scaled"].startswith("lr x (64 / 1024), by width; a rule of thumb")
    assert scaled["batch"] == {"sequences": 256, "length": 2048}
    assert origin["batch"]["from"].startswith("scale 340M: Comba")
    assert (scaled["steps"], origin["steps"]) == (1000, {"from": "--set"})
    assert scaled["schedule"]["warmup_steps"] == 100
    assert origin["warmup_steps"] == {"from": "trial abc", "was": 20, "scaled": "0.1 of the steps"}
    assert scaled["trial"] == {"seed": 3}


@pytest.mark.slow
def test_a_batch_that_is_set_does_not_come_from_the_trial(tmp_path):
    export(source(), tmp_path / "both", given=["recipe.batch.sequences=4", "recipe.batch.length=12"])
    origin = recipe_of(tmp_path / "both")["origin"]
    assert origin["batch"] == {"from": "--set"}
    assert not {"batch.sequences", "batch.length"} & {*origin}
    export(source(), tmp_path / "one", given=["recipe.batch.length=12"])
    origin = recipe_of(tmp_path / "one")["origin"]
    assert (origin["batch"], origin["batch.length"]) == ({"from": "trial abc"}, {"from": "--set"})


@pytest.mark.slow
def test_the_rate_of_a_model_with_a_base_width_is_meant_for_that_width(tmp_path):
    """It stays at every width, and `origin` says what the matrices get; without one it falls with the width."""
    transferred = source(spec(base_width=16))

    def exported(name: str, given: list[str]) -> tuple[float, dict[str, object]]:
        export(transferred, tmp_path / name, given=given)
        recipe = recipe_of(tmp_path / name)
        return recipe["optimizer"]["lr"], recipe["origin"]["lr"]

    assert exported("own", []) == (4e-3, {"from": "trial abc", "matrices": "lr x 0.25: base_width 16 / d_model 64"})
    lr, origin = exported("wide", ["model.d_model=128"])
    assert (lr, origin["matrices"]) == (4e-3, "lr x 0.125: base_width 16 / d_model 128")
    lr, origin = exported("one rate", ["model.base_width=null"])
    assert (lr, "matrices" in origin, origin["was"]) == (1e-3, False, 4e-3)


def test_fla_cannot_train_by_a_base_width(tmp_path):
    transferred = source(spec(base_width=16))
    with pytest.raises(InputError, match="--to fla: FLA trains all parameters at one rate, and base_width 16 gives"):
        export(transferred, tmp_path / "fla", to="fla", weights=False)
    assert not (tmp_path / "fla").exists()


@pytest.mark.slow
def test_a_folder_exports_again_from_its_own_size(tmp_path):
    from deltalab.export.folders import from_folder

    export(source(), tmp_path / "one", given=["model.d_model=128"])
    found = from_folder(tmp_path / "one")
    assert found.model.d_model == 128
    assert found.weights is None
    export(found, tmp_path / "two", given=["model.d_model=256", "model.vocab_size=256"], tokenizer="bytes")
    two = recipe_of(tmp_path / "two")
    assert two["optimizer"]["lr"] == 4e-3 * 64 / 256
    assert two["tokenizer"]["kind"] == "bytes"
    assert (tmp_path / "two/tokenizer_config.json").exists()
    config = json.loads((tmp_path / "two/config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["vocab_size"]) == (0, 0, 256)


@pytest.mark.slow
def test_weights_go_through_a_second_export_unchanged(tmp_path):
    import torch

    from deltalab.export.folders import from_folder

    given = source()
    export(given, tmp_path / "one")
    again = from_folder(tmp_path / "one")
    assert again.scores == {"validation accuracy": 0.994}
    shutil.copytree(tmp_path / "one", tmp_path / "saved", ignore=shutil.ignore_patterns("recipe.yaml", "rules"))
    assert from_folder(tmp_path / "saved").scores == {}, "Trainer writes such a folder, with other weights"
    assert given.weights is not None
    assert again.weights is not None
    assert all(torch.equal(again.weights()[name], value) for name, value in given.weights().items())
    written = export(again, tmp_path / "two", weights=False)
    assert not written.trained
    assert "validation accuracy" not in recipe_of(tmp_path / "two")["provenance"]


def test_a_model_goes_to_fla_and_comes_back(tmp_path):
    import torch

    from deltalab.export.folders import from_folder

    export(source(spec(rule="gated_deltanet", vocab_size=64)), tmp_path / "fla", to="fla")
    assert json.loads((tmp_path / "fla/config.json").read_text())["model_type"] == "gated_deltanet"
    assert not list((tmp_path / "fla").glob("*.py"))
    back = from_folder(tmp_path / "fla")
    assert back.weights is not None
    ours, theirs = (build_model(model) for model in (spec(rule="gated_deltanet", vocab_size=64), back.model))
    ours.load_state_dict(build_model(ours.spec, seed=1).state_dict())
    theirs.load_state_dict(dict(back.weights()))
    tokens = torch.arange(11)[None]
    torch.testing.assert_close(theirs(tokens), ours(tokens), rtol=1e-4, atol=1e-5)
    assert back.recipe["optimizer"]["lr"] == 3e-4
    export(source(spec(rule="gated_deltanet"), trained=False), tmp_path / "untrained", to="fla")
    assert sorted(file.name for file in (tmp_path / "untrained").iterdir()) == ["config.json", "recipe.yaml"]


def test_a_model_of_fla_knows_the_special_tokens_of_its_tokenizer(tmp_path):
    export(source(spec(rule="gated_deltanet", vocab_size=256)), tmp_path / "fla", to="fla", tokenizer="bytes")
    config = json.loads((tmp_path / "fla/config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (0, 0, None)


def test_a_run_gives_its_newest_complete_checkpoint(tmp_path):
    pytest.importorskip("deltalab.engines")
    import torch
    from safetensors.torch import save_file

    from deltalab.export.folders import from_folder

    export(source(), tmp_path / "out")
    run = tmp_path / "out/runs/first"
    for step in (2, 10, 12):
        (run / f"checkpoints/step-{step}").mkdir(parents=True)
        weights = {f"model.{name}": torch.full_like(w, step) for name, w in build_model(spec()).state_dict().items()}
        save_file(weights, run / f"checkpoints/step-{step}/model.safetensors")
        if step != 12:  # killed while it was written
            (run / f"checkpoints/step-{step}/trainer_state.json").write_text("{}")
    about = {"id": "r1", "export": str(tmp_path / "out"), "data": {"sha256": "s"}, "recipe": {}}
    (run / "run.json").write_text(json.dumps(about))
    found = from_folder(run)
    assert found.weights is not None
    assert found.weights()["norm.weight"].unique().tolist() == [10]
    assert found.provenance["checkpoint"] == "step-10"
    assert found.scores == {}, "the study's scores are those of other weights"
    assert from_folder(run / "checkpoints/step-2").weights()["norm.weight"].unique().tolist() == [2]
    with pytest.raises(InputError, match="is no complete checkpoint"):
        from_folder(run / "checkpoints/step-12").weights()


def test_a_run_gives_the_recipe_that_it_trained_by(tmp_path):
    from deltalab.engines.preparation import prepare
    from deltalab.export.folders import from_folder

    given = ["recipe.batch.documents=reset", "recipe.log.every=3"]
    export(source(spec(vocab_size=256)), tmp_path / "out", tokenizer="bytes", given=given)
    assert recipe_of(tmp_path / "out")["batch"] == {"sequences": 8, "length": 24, "documents": "reset"}
    (tmp_path / "text.txt").write_text("\n".join(f"document {n} is of some length" for n in range(200)))
    pack([str(tmp_path / "text.txt")], tmp_path / "packed", reading=Reading(separator="\n"), shares={"train": 1.0})
    ready = prepare(
        tmp_path / "out", tmp_path / "packed", run=tmp_path / "run", engine="accelerate", gpus=0, steps=100,
        given=["batch.length=16", "optimizer.lr=1e-3", "validation.sequences=0"],
    )  # fmt: skip
    assert (ready.recipe["log"]["every"], ready.recipe["schedule"]["warmup_steps"]) == (3, 10)
    (tmp_path / "run/checkpoints/step-2").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-2/trainer_state.json").write_text("{}")
    (tmp_path / "run/run.json").write_text(json.dumps(ready.about))
    found = from_folder(tmp_path / "run").recipe
    assert found["batch"] == {"sequences": 8, "length": 16, "documents": "reset"}
    assert (found["steps"], found["optimizer"]["lr"], found["schedule"]["warmup_steps"]) == (100, 1e-3, 10)
    assert "checkpoint" not in found, "its defaults follow the number of steps"
    run = {"from": "deltalab train, run run"}
    assert found["origin"]["lr"] == {**run, "was": 4e-3}
    assert found["origin"]["batch.length"] == {**run, "was": 24}
    assert found["origin"]["steps"] == {**run, "was": 200}
    assert found["origin"]["clip"] == {"from": "trial abc"}


def test_a_model_without_a_trial_gets_the_papers_recipe():
    recipe = paper_recipe(spec(d_model=512, vocab_size=32_000, heads=4, layers=8))
    assert recipe["optimizer"]["lr"] == 3e-4
    assert recipe["origin"]["lr"]["from"].startswith("Comba")
    assert recipe["steps"] == round(15e9 / 2**19)


def test_a_recipe_is_the_papers_own_and_says_what_is_ours(tmp_path):
    """The numbers were read from the papers by hand; LLaMA's from two transcriptions of its table 2 and section 2.3."""
    source_with_z = replace(source(), recipe={**source().recipe, "z_loss": 1e-4})
    written = export(source_with_z, tmp_path / "rla", scale="1.5B", recipe="rla")
    assert written.notes[-1].startswith("scale 1.5B: Enhancing Linear Attention with Residual Learning")
    rla = recipe_of(tmp_path / "rla")
    assert rla["optimizer"] == {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert rla["schedule"] == {"kind": "cosine", "warmup_steps": 119, "final": 0.1}  # 0.5B tokens of 2^22 a step
    assert (rla["batch"]["sequences"] * rla["batch"]["length"], rla["steps"]) == (2**22, 23842)
    assert (rla["clip"], rla["z_loss"], rla["model"]["init_std"], rla["model"]["vocab_size"]) == (1.0, 0, 0.006, 32_000)
    origin = rla["origin"]
    assert origin["lr"] == {"from": f"{RLA}, table 7", "was": 4e-3}, "not scaled by width"
    assert origin["warmup_steps"] == {"from": f"{RLA}, table 7: 5e+08 tokens", "was": 20}
    assert origin["betas"] == {"from": f"ours; {RLA} does not say"}
    assert origin["model.init_std"]["from"] == f"{RLA}, table 7"
    assert origin["model.vocab_size"] == {"from": f"ours; {RLA} does not say", "was": 32}
    assert not [name for name in origin if origin[name]["from"] == "trial abc"]

    export(source(), tmp_path / "gka", scale="340M", recipe="gka", given=["recipe.steps=1000"])
    gka = recipe_of(tmp_path / "gka")
    assert (gka["optimizer"]["lr"], gka["clip"], gka["schedule"]["kind"]) == (1e-3, 1.0, "cosine")
    assert (gka["model"]["vocab_size"], gka["batch"]) == (50_304, {"sequences": 512, "length": 4096})
    assert gka["origin"]["batch"]["from"].startswith("scale 2.7B: Gated KalmaNet"), "the recipe's nearest scale"
    assert (gka["steps"], gka["schedule"]["warmup_steps"]) == (1000, 50), "--set wins, and the warm-up keeps its share"
    assert gka["origin"]["warmup_steps"]["from"].endswith("section 5.3.1: 5e+09 tokens")


RLA = "Enhancing Linear Attention with Residual Learning (RLA and RDN, 2025)"


def test_a_recipe_without_a_scale_takes_its_nearest_and_keeps_model_and_weights(tmp_path):
    written = export(source(), tmp_path / "out", recipe="rla")
    recipe = recipe_of(tmp_path / "out")
    assert written.trained, "init_std would say how another model starts"
    assert (recipe["model"]["init_std"], recipe["model"]["vocab_size"]) == (None, 32)
    assert (recipe["optimizer"]["lr"], recipe["trial"]) == (3e-4, {"seed": 3})
    export(source(trained=False), tmp_path / "start", recipe="rla", given=["recipe.optimizer.lr=1e-3"])
    recipe = recipe_of(tmp_path / "start")
    assert (recipe["model"]["init_std"], recipe["optimizer"]["lr"]) == (0.006, 1e-3)
    assert recipe["origin"]["lr"] == {"from": "--set"}
    export(source(trained=False), tmp_path / "mine", recipe="rla", given=["model.init_std=0.02"])
    assert recipe_of(tmp_path / "mine")["origin"]["model.init_std"] == {"from": "--set", "was": None}


def test_every_recipe_is_whole_and_llamas_rate_falls_with_the_scale():
    keys = {"optimizer.name", "optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay"}
    keys |= {"schedule.kind", "schedule.warmup_steps", "schedule.final", "clip", "z_loss"}
    assert recipe_names() == ["comba", "gka", "llama", "rla"]
    for found in map(find_recipe, recipe_names()):
        for scale in found.scales:
            assert found.at(scale).keys() >= keys
            assert by_a_paper(source().recipe, found, SCALES[scale].parameters)["batch"]["length"]
    llama = find_recipe("llama")
    rates = [(llama.nearest(size), llama.at(llama.nearest(size))["optimizer.lr"].value) for size in (1e8, 13e9, 5e10)]
    assert rates == [("7B", 3e-4), ("13B", 3e-4), ("65B", 1.5e-4)]
    assert llama.at("7B")["schedule.warmup_steps"].value == 2000
    model = spec(rule="attention", conv=0, tie_embeddings=False, output_gate=False, output_norm=False)
    assert at_scale(model, "7B", None, {})[0].layers == 32, "the depth of table 2 has the parameters of table 2"


def test_a_rate_of_all_parameters_does_not_go_with_a_base_width(tmp_path):
    with pytest.raises(InputError, match="--recipe comba: its rate is that of all parameters, and base_width 16 gives"):
        export(source(spec(base_width=16)), tmp_path / "out", recipe="comba")


WRONG = [
    ({"recipe": "lama"}, "--recipe: unknown recipe 'lama'; did you mean 'llama'?"),
    ({"to": "onnx"}, "--to: unknown format 'onnx'; allowed: hf, torchtitan, fla"),
    ({"scale": "1.3b"}, "--scale: unknown scale '1.3b'; did you mean '1.3B'?"),
    ({"given": ["model.rule=gla"]}, "--set: unknown setting 'model.rule'"),
    ({"given": ["recipe.optimizer.betas=0.9"]}, "must be two numbers in [0, 1)"),
    (
        {"given": ["recipe.optimizer.name=adam"]},
        "--set recipe.optimizer.name: unknown value 'adam'; did you mean 'adamw'?",
    ),
    ({"given": ["recipe.optimizer.lr=-1"]}, "must be a number of at least 0, not -1"),
    ({"given": ["recipe.schedule.warmup_steps=201"]}, "warmup_steps 201 exceed recipe.steps 200"),
    ({"given": ["recipe.clip=no number"]}, "must be a number of at least 0, not 'no number'"),
    ({"given": ["model.d_model=65"]}, "model.d_model 65 must be a multiple of heads 2"),
    ({"tokenizer": "bytes"}, "--tokenizer bytes has 256 tokens, the model 32: give --scale, or --set model.vocab_size"),
    (
        {"weights": True, "given": ["rule.transition=iplr"]},
        "--weights: the study's weights do not fit a model changed by --set; leave that out",
    ),
    (
        {"weights": True, "scale": "340M", "given": ["rule.transition=iplr"]},
        "--weights: the study's weights do not fit a model changed by --scale and --set; leave those out",
    ),
    ({"given": ["recipe.checkpoint.keep=1"]}, "--set recipe.checkpoint.keep: must be a whole number of at least 2"),
    ({"given": ["recipe.compil=true"]}, "--set: unknown setting 'recipe.compil'; did you mean 'recipe.compile'?"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(given, said, tmp_path):
    with pytest.raises(InputError) as error:
        export(source(), tmp_path / "out", **given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_weights_that_do_not_exist_cannot_be_asked_for(tmp_path):
    with pytest.raises(InputError, match="--weights: the source has none"):
        export(source(trained=False), tmp_path / "out", weights=True)


def test_a_folder_that_is_no_export_is_named(tmp_path):
    from deltalab.export import rebuild
    from deltalab.export.folders import from_folder

    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(InputError, match=r"config\.json: not JSON"):
        from_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="neither an exported folder, a run of deltalab train"):
        from_folder(tmp_path / "empty")
    with pytest.raises(InputError, match=r"not an exported folder: it has no recipe\.yaml"):
        rebuild(tmp_path / "empty")
    export(source(), tmp_path / "out")
    (tmp_path / "out/rules/comba.py").write_text("# another\n")
    with pytest.raises(InputError, match=r"rules/comba.py: not rule 'comba' of .*comba.py: use the release"):
        from_folder(tmp_path / "out")
