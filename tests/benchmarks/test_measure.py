"""Timing a rule: the figures that are measured, the ceilings they are compared with, and the inputs of peers."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.folders import ROOT
from tests.support.published_ops import OPS, pretend
from torch.utils.flop_counter import FlopCounterMode

import deltalab
from deltalab import registry
from deltalab.authoring.inputs import Inputs, draw
from deltalab.bench import measure as bench
from deltalab.bench import peers
from deltalab.bench.flops import CHUNK, attention_flops, flops
from deltalab.bench.measure import Bench
from deltalab.bench.recurrence_alone import alone
from deltalab.bench.results import Figures, Results, Shape
from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.ops.reference import recurrent
from deltalab.rule import UpdateRule

TINY = Shape(1, 32, 2, 8, 4)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench, "CPU_SECONDS", 0.01)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run() -> Bench:
    return Bench("fp32")


def test_every_figure_of_ours_and_of_attention(run: Bench) -> None:
    ours, slow, attention = run.add(
        deltalab.get_rule("comba"), TINY, backends=("chunked", "recurrent"), against=["sdpa"], label="mine"
    )
    assert [one.by for one in (ours, slow, attention)] == ["chunked", "recurrent", "sdpa"]
    for one in (ours, slow, attention):
        assert (one.rule, one.shape, one.why) == ("mine", "1,32,2,8,4", "")
        assert one.first_call is not None
        assert one.forward is not None
        assert one.both is not None
        assert one.both > one.forward > 0
        shares = (one.forward_copy, one.forward_matmul, one.both_copy, one.both_matmul)
        assert all(share is not None and share > 0 for share in shares)
        assert (ours.decode or 0) > 0
    assert attention.decode is None
    assert (ours.error, attention.error) == (None, None)
    assert slow.error is not None
    assert slow.error < 1e-5


@pytest.mark.parametrize("name", ["rdn", "delta_product", "rwkv7", "gka", "ttt_linear", "attention"])
def test_rules_of_every_kind_are_timed(run: Bench, name: str) -> None:
    """Two states, several steps, gates per channel and per head, and rules outside the algebra."""
    (found,) = run.add(deltalab.get_rule(name), TINY, backends=("chunked",))
    assert found.why == ""
    assert found.decode is not None
    assert found.both is not None


def test_what_cannot_run_leaves_its_reason_and_the_rest_goes_on(run: Bench) -> None:
    failed, found = run.add(deltalab.get_rule("attention"), TINY, backends=("triton", "chunked"))
    assert failed.why.startswith("first_call: InputError: ")
    assert (failed.first_call, failed.forward, failed.both, failed.decode) == (None,) * 4
    assert found.forward is not None
    assert "attention by triton at 1,32,2,8,4: first_call: InputError" in run.results.to_text()


def test_figures_are_handed_on_one_by_one() -> None:
    seen: list[int] = []
    run = Bench("fp32", after=lambda results: seen.append(len(results.figures)))
    run.add(deltalab.get_rule("linear_attention"), TINY, backends=("chunked", "recurrent"))
    assert seen == [1, 2]


def test_long_sequences_repeat_what_is_drawn_and_keep_the_gates_ranges(run: Bench) -> None:
    rule = deltalab.get_rule("delta_product")
    x, now = run._inputs(rule, Shape(3, 600, 2, 8, 4))
    assert x.q.shape == (3, 600, 2, 8)
    assert x.k.shape == (3, 1200, 2, 8)
    assert x.gates["beta"].shape == (3, 1200, 2)
    assert torch.equal(x.k[0, 512:1024], x.k[2, :512])
    assert (now.q.shape[1], now.k.shape[1]) == (1, 2)
    assert now.state is not None
    assert now.state[0].abs().sum() > 0


@pytest.mark.parametrize("name", ["linear_attention", "mamba2", "deltanet", "comba", "delta_product", "rla", "rdn"])
def test_products_are_those_of_the_chunked_form(name: str) -> None:
    """Apart from the inverse and its product, which are a solve there that PyTorch does not count."""
    rule, shape = deltalab.get_rule(name), Shape(1, 2 * CHUNK, 3, 16, 8)
    x = draw(rule, batch=1, length=shape.length, heads=3, key_dim=16, value_dim=8).map(lambda part: part.float())
    with FlopCounterMode(display=False) as counter:
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="chunked", chunk_size=CHUNK)
    assert rule.transition is not None
    solves = (0 if rule.transition.low_rank == "none" else 1) * (2 if rule.second_state else 1) * rule.steps
    solved = shape.length * shape.heads * solves * (2 / 3 * CHUNK**2 + 2 * CHUNK * shape.value_dim)
    found = flops(rule, shape)
    assert found is not None
    assert found - solved == pytest.approx(counter.get_total_flops())


def test_products_outside_the_algebra_grow_with_the_tokens_or_their_square() -> None:
    gka = deltalab.get_rule("gka", iterations=10)
    one, four = flops(gka, TINY), flops(gka, replace(TINY, batch=2, length=64))
    assert one is not None
    assert four == 4 * one
    assert one > (flops(deltalab.get_rule("mamba2"), TINY) or 0)
    long = Shape(2, 1000, 3, 8, 4)
    assert attention_flops(long) == 6 * 1000**2 * (8 + 4), "half of 2 T T (K + V)"
    assert flops(deltalab.get_rule("attention"), long) == pytest.approx(2 * attention_flops(long)), "all of it"
    near = [flops(deltalab.get_rule("attention", window=500), replace(long, length=n)) or 0 for n in (1000, 1500, 2000)]
    assert near[2] - near[1] == pytest.approx(near[1] - near[0]), "a window's cost grows with the tokens"
    each = 2 * (8 + 4) * 999
    assert near[1] - near[0] == pytest.approx(6 * 500 * each), "each of 500 more tokens is multiplied with 999 keys"


def test_a_report_comes_back_from_its_json_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Results("a GPU", "bf16", {"copy": 3e12, "matmul": 7e14}, {"torch": "2"}, "2026-01-01")
    made.figures.append(Figures("comba", "triton", "8,4096,16,128,128", forward=0.5, both_memory=2**20))
    made.figures.append(Figures("comba", "triton", "4,8192,16,128,128", forward=0.5, why="both: out of memory"))
    assert Results.from_dict(json.loads(made.to_json())) == made
    assert "0.500" in made.to_text()
    assert "comba by triton at 4,8192,16,128,128: both: out of memory" in made.to_text()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    made.plot(tmp_path / "x.png")
    assert "x.png: not drawn, matplotlib is not installed" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    made.plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# Peers.


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("linear_attention", "linear_attn"),
        ("mamba2", "simple_gla"),
        ("retnet", "simple_gla"),
        ("gla", "gla"),
        ("deltanet", "delta_rule"),
        ("gated_deltanet", "gated_delta_rule"),
        ("comba", "comba"),
        ("kda", "kda"),
        ("rwkv7", "dplr_delta_rule"),
    ],
)
def test_a_peer_is_given_the_function_of_the_rule(name: str, op: str) -> None:
    rule = deltalab.get_rule(name)
    x = draw(rule, batch=2, length=5, heads=2, key_dim=4, value_dim=3)
    found, given = peers.op_for(rule, x)
    assert found.name == op
    assert all(tensor.is_contiguous() for tensor in given.values())
    transition, operands = OPS[op]
    got, _ = recurrent(transition, operands(**given), scale=rule.scale(4), state=None)
    want, _ = deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="recurrent")
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["rla", "rdn", "delta_product", "attention", "gka"])
def test_what_no_peer_has_is_refused(name: str) -> None:
    x = draw(deltalab.get_rule(name), batch=1, length=2, heads=1, key_dim=4, value_dim=4)
    with pytest.raises(InputError, match=f"no peer has an op for rule '{name}'"):
        peers.op_for(deltalab.get_rule(name), x)
    comba = deltalab.get_rule("comba", transition="iplr")
    with pytest.raises(InputError, match="gated_delta_rule erases and writes with one strength"):
        peers.op_for(comba, draw(comba, batch=1, length=2, heads=1, key_dim=4, value_dim=4))


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(peers, "lacks", lambda name, *, where: None)


@pytest.mark.parametrize("name", ["comba", "gla"])
def test_a_peer_is_timed_and_compared(run: Bench, fla: None, name: str) -> None:
    _, found = run.add(deltalab.get_rule(name), TINY, backends=("chunked",), against=["fla"])
    assert (found.by, found.why) == ("fla", "")
    assert found.error is not None
    assert found.error < 1e-5
    assert found.both is not None
    assert found.decode is not None


def test_flash_qla_has_the_gated_delta_rule_alone(run: Bench, fla: None) -> None:
    _, found = run.add(deltalab.get_rule("gated_deltanet"), TINY, backends=("chunked",), against=["flash_qla"])
    assert (found.why, found.decode) == ("", None)
    with pytest.raises(InputError, match="flash_qla: has no op for rule 'comba'"):
        run.add(deltalab.get_rule("comba"), TINY, backends=("chunked",), against=["flash_qla"])


def test_a_peer_that_fails_leaves_its_reason(run: Bench, fla: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("Triton >= 3.4.0\nproduces incorrect results")

    monkeypatch.setattr(sys.modules["fla.ops.comba"], "chunk_comba", refuse)
    ours, found = run.add(deltalab.get_rule("comba"), TINY, backends=("chunked",), against=["fla"])
    assert found.why == "first_call: RuntimeError: Triton >= 3.4.0 produces incorrect results"
    assert ours.both is not None


def test_a_peer_may_be_any_function_of_the_rule_and_its_inputs(run: Bench) -> None:
    def twice(rule: UpdateRule, x: Inputs, now: Inputs) -> peers.Contestant:
        call = peers.Call(lambda v: 2 * v, {"v": x.v})
        return peers.Contestant("twice", call, same=False, flops=0.0)

    _, found = run.add(deltalab.get_rule("gka"), TINY, backends=("chunked",), against=[twice])
    assert (found.by, found.why, found.error, found.forward_matmul) == ("twice", "", None, 0.0)


@pytest.mark.parametrize("name", ["comba", "rdn", "kda", "rwkv6", "mlstm"])
def test_a_rule_is_told_in_its_recurrence_alone(run: Bench, name: str) -> None:
    rule = deltalab.get_rule(name)
    x = draw(rule, batch=1, length=5, heads=2, key_dim=4, value_dim=4)
    call = alone(rule, x, "chunked").sequence
    assert all(
        grad.shape == tensor.shape for grad, tensor in zip(call.backward()(), call.tensors.values(), strict=True)
    )
    if name in ("comba", "rdn", "kda"):  # the others finish their output beside the recurrence
        want, _ = deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="recurrent")
        torch.testing.assert_close(call.forward(), want)
    figures = run.add(rule, TINY, backends=("chunked",), parts=True)
    assert [one.by for one in figures] == ["chunked", "recurrence"]
    assert f"{name} by chunked at {TINY}: " in run.results.to_text()
    assert "times its recurrence alone" in run.results.to_text()


def test_a_tensor_in_two_places_is_one() -> None:
    rule = deltalab.get_rule("gated_deltanet")
    tensors = alone(rule, draw(rule, batch=1, length=5, heads=2, key_dim=4, value_dim=4), "chunked").sequence.tensors
    assert set(tensors) == {"r", "k", "u", "g", "e"}, "beta is e"


def test_a_rule_outside_of_the_algebra_has_no_recurrence_alone(run: Bench) -> None:
    assert [one.by for one in run.add(deltalab.get_rule("gka"), TINY, backends=("chunked",), parts=True)] == ["chunked"]


# The command.

Platform = Callable[..., tuple[int, str, str]]


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Platform:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["platform", "rule", "bench", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_bench_of_a_rule(platform: Platform, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = platform(
        "gla", "--shape", "2,16,1,4,4", "--lengths", "16,32", "--against", "sdpa", "--dtype", "fp32", "--out", "a/b"
    )
    assert code == 0
    assert [line.split()[:3] for line in out.splitlines()[1:9]] == [
        ["gla", by, shape] for shape in ("2,16,1,4,4", "1,32,1,4,4") for by in _backends_and("sdpa")
    ]
    saved = json.loads((tmp_path / "a/b/gla.json").read_text())
    assert {"device", "dtype", "ceilings", "versions", "date", "figures"} <= set(saved)
    assert len(saved["figures"]) == 8
    assert (tmp_path / "a/b/gla.png").is_file()


def _backends_and(peer: str) -> tuple[str, ...]:
    ours = ("triton", "chunked") if torch.cuda.is_available() else ("chunked", "recurrent")
    return (*ours, "recurrence", peer)


def test_bench_of_a_file_as_json(platform: Platform, tmp_path: Path) -> None:
    source = registry.rule_plugin("linear_attention").source
    (tmp_path / "mine.py").write_text(source.replace('"linear_attention"', '"benched"'))
    with registry.isolated():
        code, out, err = platform("mine.py", "--shape", "1,16,1,4,4", "--json")
    assert (code, err.count("\n")) == (0, 0 if torch.cuda.is_available() else 2)
    assert {figure["rule"] for figure in json.loads(out)["figures"]} == {"benched"}


WRONG: list[tuple[str, tuple[str, ...]]] = [
    ("combo", ("unknown rule 'combo'; did you mean 'comba'?",)),
    ("nope.py", ("nope.py: no such plugin file",)),
    ("comba --shape 8,4096,16,128", ("--shape 8,4096,16,128: give B,T,H,K,V, like 8,4096,16,128,128",)),
    ("comba --shape 8,0,16,128,128", ("--shape", "whole numbers of at least 1")),
    ("comba --shape 8x4096", ("--shape 8x4096", "whole numbers")),
    ("comba --lengths 1k", ("--lengths 1k", "whole numbers")),
    ("comba --lengths ²", ("--lengths", "whole numbers")),
    ("comba --dtype fp8", ("--dtype: unknown dtype 'fp8'", "allowed: bf16, fp16, fp32")),
    (
        "comba --against flash_ql",
        ("unknown peer 'flash_ql'; did you mean 'flash_qla'?", "allowed: fla, flash_qla, sdpa"),
    ),
    ("comba --against fla", ("--against fla: not installed: pip install flash-linear-attention",)),
    ("comba --out file", ("file", "exists")),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_input_is_one_line(
    platform: Platform, tmp_path: Path, words: str, says: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "fla" else find(name, *rest))
    code, out, err = platform(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1), err
    for part in says:
        assert part in err


# The script.


@pytest.fixture(scope="module")
def kernels() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_kernels", ROOT / "benchmarks" / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planted(*figures: Figures) -> Results:
    results = Results("a GPU", "bf16", {"copy": 3e12, "matmul": 7e14}, {"torch": "2"}, "2026-01-01")
    results.figures.extend(figures)
    return results


def test_targets_are_held_or_missed_in_one_run(kernels: Any) -> None:
    shape = str(bench.GPU_SHAPE)
    fast = Figures("comba", "triton", shape, forward=0.4, both=2.0, both_memory=100, first_call=30.0)
    parts = {
        "ours": planted(Figures("comba", "triton", shape, forward=9.0)),
        "fla_comba": planted(fast, Figures("comba", "fla", shape, forward=1.2, both=3.9, both_memory=300)),
        "elsewhere": planted(
            Figures("gla", "triton", "1,1,1,1,1", forward=1.0), Figures("gla", "fla", shape, forward=2)
        ),
    }
    assert kernels.targets(parts) == [
        "held    comba against comba by fla, forward: 3.00  at least 2.80  [fla_comba]",
        "MISSED  comba against comba by fla, both: 1.95  at least 2.00  [fla_comba]",
        "held    comba against comba by fla, both_memory: 0.33  at most 0.50  [fla_comba]",
        "MISSED  comba: first call 30.0 s  at most 10  [fla_comba]",
    ]


def test_a_cache_that_stays_leaves_first_calls_out(tmp_path: Path) -> None:
    (found,) = Bench("fp32", cache=tmp_path).add(deltalab.get_rule("deltanet"), TINY, backends=["chunked"])
    assert found.first_call is None
    assert found.both is not None


def test_the_environment_is_as_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while a rule is timed do Triton and TileLang find the run's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    before, during = dict(os.environ), {}
    run = Bench("fp32", after=lambda _: during.update(os.environ), cache=tmp_path)
    assert dict(os.environ) == before
    run.add(deltalab.get_rule("linear_attention"), TINY, backends=["chunked"])
    assert dict(os.environ) == before
    assert during == before | {
        "TRITON_CACHE_DIR": str(tmp_path), "TILELANG_CACHE_DIR": str(tmp_path), "TRITON_CACHE_AUTOTUNING": "1",
    }  # fmt: skip
    with pytest.raises(InputError, match="unknown peer"):
        run.add(deltalab.get_rule("linear_attention"), TINY, against=["none"])
    assert dict(os.environ) == before


def test_parts_join_those_of_earlier_runs(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Planted:
        def __init__(self, after: Callable[[Results], None], cache: Path | None) -> None:
            self.results, self.after = planted(), after

        def add(self, rule: Any, shape: Shape, *, backends: Any, against: Any, label: str, parts: bool) -> None:
            self.results.figures.append(Figures(label, *backends, str(shape), forward=1.0))
            self.after(self.results)

    monkeypatch.setattr(kernels, "Bench", Planted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "RULES", dict.fromkeys("abc"))
    parts = {name: lambda run, name=name: run.add(name, TINY) for name in "abc"}
    monkeypatch.setattr(kernels, "PARTS", parts)

    def measure(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--out", str(tmp_path / "out"), *words])
        kernels.main()
        found: dict[str, Any] = json.loads((tmp_path / "out" / "kernels.json").read_text())
        return found

    assert list(measure("--part", "a")) == ["a"]
    both = measure("--part", "b")
    assert {part: one["figures"][0]["rule"] for part, one in both.items()} == {"a": "a", "b": "b"}
    (tmp_path / "out" / "kernels.json").rename(tmp_path / "earlier.json")
    assert sorted(measure("--part", "c", "--merge", str(tmp_path / "earlier.json"))) == ["a", "b", "c"]
    assert "--- c" in capsys.readouterr().out
    assert measure("--part", "a", "--seconds", "-1")["a"]["figures"] == []
    assert "left out: a at 1,32,2,8,4" in capsys.readouterr().out
    assert measure("--part", "a", "--rule", "b")["a"]["figures"] == []
