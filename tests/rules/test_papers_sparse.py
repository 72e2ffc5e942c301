"""Attention that chooses blocks or forgets segments, written again from its papers, one head and query at a time."""

import inspect
import math
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.paper_loops import K, Loop, V, inputs, rule_equals, step_equals_scan
from torch import Tensor

import deltalab
from deltalab.authoring.rule_checks import rule_runs
from deltalab.errors import InputError
from deltalab.rule import UpdateRule
from deltalab_rules import reformer as reformer_file

LENGTH = 37
Token = SimpleNamespace


def attended(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    weights = torch.stack([q @ k for k in keys]).softmax(0)
    return sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros_like(values[0]))


def cached(tokens: list[Token]) -> tuple[Tensor, Tensor]:
    return torch.stack([t.k for t in tokens]), torch.stack([t.v for t in tokens])


def moba(block: int, top: int) -> Loop:
    """arXiv:2502.13189 and moba_naive.py: the gate is q^T mean(K_j), -inf for later blocks and +inf for the own one."""

    def loop(tokens: list[Token], _: tuple[Tensor, ...]) -> Any:
        outputs = []
        for n, t in enumerate(tokens):
            gate = {}
            for start in range(0, len(tokens), block):
                keys = [i.k for i in tokens[start : start + block]]
                future, current = start > n, start <= n < start + block
                gate[start] = -torch.inf if future else torch.inf if current else float(t.q @ torch.stack(keys).mean(0))
            best = sorted(gate, key=lambda start: gate[start], reverse=True)[:top]
            seen = [i for start in best for i in tokens[start : min(start + block, n + 1)]]
            outputs.append(attended(t.q, [i.k for i in seen], [i.v for i in seen]))
        return outputs, cached(tokens)

    return loop


def nsa(length: int, d: int, selected: int, n: int, window: int) -> Loop:
    """arXiv:2502.11089, Eq. 5 and 7 to 12, with the mean as phi; l is `length` and l' is `selected`."""

    def loop(tokens: list[Token], _: tuple[Tensor, ...]) -> Any:
        outputs = []
        for now, t in enumerate(tokens):
            past = tokens[: now + 1]
            blocks = [past[i : i + length] for i in range(0, len(past), d) if i + length <= len(past)]
            k_cmp, v_cmp = ([torch.stack([vars(x)[name] for x in b]).mean(0) for b in blocks] for name in "kv")
            o = t.c * attended(t.q, k_cmp, v_cmp) if blocks else torch.zeros_like(t.v)
            p_cmp = torch.stack([t.q @ k for k in k_cmp]).softmax(0).tolist() if blocks else []
            p_slc = []
            for j in range(1, now // selected + 2):  # Eq. 9 counts from 1
                places = [selected // d * j - m - i for m in range(selected // d) for i in range(length // d)]
                p_slc.append(sum(p_cmp[place - 1] for place in places if 1 <= place <= len(p_cmp)))
            own = now // selected
            kept = {0, max(own - 1, 0), own}
            kept |= set(sorted(set(range(own)) - kept, key=lambda j: p_slc[j], reverse=True)[: n - len(kept)])
            slc = [i for j in sorted(kept) for i in past[j * selected : (j + 1) * selected]]
            o = o + t.s * attended(t.q, [i.k for i in slc], [i.v for i in slc])
            o = o + t.w * attended(t.q, [i.k for i in past[-window:]], [i.v for i in past[-window:]])
            outputs.append(o)
        return outputs, cached(tokens)

    return loop


def landmark(block: int, top: int = 0) -> Loop:
    """arXiv:2305.16300, Eq. 1 to 4: a softmax for each group of keys, then a token's times that of its landmark."""

    def loop(tokens: list[Token], _: tuple[Tensor, ...]) -> Any:
        outputs = []
        for now, t in enumerate(tokens):
            e = [torch.exp(t.q @ i.k) for i in tokens[: now + 1]]
            section = [i // block for i in range(now + 1)]
            is_mem = [i % block == block - 1 for i in range(now + 1)]
            seen_mem = [i for i in range(now) if is_mem[i] and section[i] < section[now]]
            seen_mem = sorted(seen_mem, key=lambda i: float(e[i]), reverse=True)[: top or None]
            gate = [i for i in range(now + 1) if section[i] == section[now] and not is_mem[i]] + seen_mem
            o = torch.zeros_like(t.v)
            for i in range(now + 1):
                if is_mem[i]:
                    continue
                own, mem = section[i] == section[now], section[i] * block + block - 1
                if own or mem in seen_mem:
                    group = gate if own else [j for j in range(now + 1) if section[j] == section[i] and not is_mem[j]]
                    share = 1.0 if own else e[mem] / sum(e[j] for j in gate)
                    o = o + share * e[i] / sum(e[j] for j in group) * tokens[i].v
            outputs.append(o)
        return outputs, cached(tokens)

    return loop


def reformer(rounds: int, buckets: int) -> Loop:
    """arXiv:2001.04451, Eq. 8 to 11 of Appendix A, one round after the other, with k_j = q_j / |q_j|."""
    rotated = reformer_file.rotations(K, rounds, buckets, torch.float64, torch.device("cpu"))

    def h(x: Tensor, r: int) -> int:
        sides = [sign * float(x @ column) for sign in (1, -1) for column in rotated[r].T]
        return sides.index(max(sides))

    def loop(tokens: list[Token], _: tuple[Tensor, ...]) -> Any:
        keys, outputs = [t.q / math.sqrt(float(t.q @ t.q)) for t in tokens], []
        hashes = [[h(t.q, r) for r in range(rounds)] for t in tokens]
        for i, t in enumerate(tokens):
            P = [[j for j in range(i + 1) if hashes[i][r] == hashes[j][r]] for r in range(rounds)]
            z, o = [], []
            for r in range(rounds):
                N = {j: sum(j in P[other] for other in range(rounds)) for j in P[r]}
                dots = {j: t.q @ keys[j] - (1e5 if j == i else math.log(N[j])) for j in P[r]}
                z.append(torch.stack([*dots.values()]).logsumexp(0))
                o.append(sum((torch.exp(dot - z[r]) * tokens[j].v for j, dot in dots.items()), torch.zeros_like(t.v)))
            z_all = torch.stack(z).logsumexp(0)
            outputs.append(sum((torch.exp(z[r] - z_all) * o[r] for r in range(rounds)), torch.zeros_like(t.v)))
        return outputs, (torch.stack(keys), torch.stack([t.v for t in tokens]))

    return loop


def infini(segment: int, delta: bool, rope: bool = False) -> Loop:
    """arXiv:2404.07143, Eq. 3 to 10, segment by segment; sigma is elu + 1."""

    def sigma(x: Tensor) -> Tensor:
        return torch.tensor([float(y) + 1 if y > 0 else math.exp(float(y)) for y in x], dtype=x.dtype)

    def turned(x: Tensor, place: int) -> Tensor:
        if not rope:
            return x
        pairs = torch.complex(x[: K // 2], x[K // 2 :])
        pairs = pairs * torch.exp(1j * place * 10000.0 ** (-2 / K * torch.arange(K // 2, dtype=torch.float64)))
        return torch.cat([pairs.real, pairs.imag])

    def loop(tokens: list[Token], state: tuple[Tensor, ...]) -> Any:
        (M, z, *_), outputs, here = state, [], []
        for n, t in enumerate(tokens):
            here.append(t)
            asked = turned(t.q, n % segment)
            A_dot = attended(asked, [turned(i.k, place) for place, i in enumerate(here)], [i.v for i in here])
            A_mem = sigma(t.q) @ M / (sigma(t.q) @ z) if n >= segment else torch.zeros_like(t.v)
            outputs.append(t.b * A_mem + (1 - t.b) * A_dot)
            if len(here) == segment:
                keys, new = [sigma(i.k) for i in here], [i.v for i in here]
                if delta and n >= segment:
                    new = [v - key @ M / (key @ z) for key, v in zip(keys, new, strict=True)]
                M = M + sum(torch.outer(key, v) for key, v in zip(keys, new, strict=True))
                z, here = z + sum(keys), []
        filled = torch.zeros(segment - 1, K, dtype=torch.float64), torch.zeros(segment - 1, V, dtype=torch.float64)
        for part, kept in zip(filled, cached(here) if here else (), strict=False):
            part[: len(here)] = kept
        return outputs, (M, z, *filled, torch.zeros(len(here), 0, dtype=torch.float64))

    return loop


PAPERS: list[tuple[str, dict[str, Any], Loop]] = [
    *(("moba", {"block": block, "top": top}, moba(block, top)) for block, top in ((4, 1), (4, 3), (7, 2), (16, 3))),
    ("nsa", {}, nsa(8, 4, 16, 4, 16)),
    ("nsa", {"pooled": 4, "stride": 4, "block": 4, "window": 4}, nsa(4, 4, 4, 4, 4)),
    ("nsa", {"pooled": 8, "stride": 2, "block": 4, "top": 5, "window": 6}, nsa(8, 2, 4, 5, 6)),
    ("nsa", {"pooled": 6, "stride": 3, "block": 9, "top": 3}, nsa(6, 3, 9, 3, 16)),
    *(
        ("landmark_attention", {"block": block, "top": top}, landmark(block, top))
        for block, top in ((4, 0), (7, 0), (4, 2))
    ),
    *(
        ("reformer", {"rounds": rounds, "buckets": buckets}, reformer(rounds, buckets))
        for rounds, buckets in ((4, 8), (1, 8), (2, 2), (3, 32))
    ),
    ("infini_attention", {}, infini(16, True, rope=True)),
    ("infini_attention", {"segment": 5, "rope": False}, infini(5, True)),
    ("infini_attention", {"segment": 4, "delta": False}, infini(4, False, rope=True)),
]


@pytest.mark.parametrize("split", [None, 1, 19], ids=lambda split: f"split-{split}")
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "knobs", "loop"), PAPERS, ids=lambda part: "" if callable(part) else str(part))
def test_rule_equals_its_paper(name: str, knobs: dict[str, Any], loop: Loop, backend: Any, split: int | None) -> None:
    rule_equals(name, knobs, loop, backend, split, length=LENGTH)


SETTINGS = [rule for name in sorted({name for name, *_ in PAPERS}) for rule in deltalab.get_rule(name).variants()]


@pytest.mark.parametrize("rule", SETTINGS, ids=lambda rule: f"{rule.name} [{type(rule)().turned(rule)}]")
def test_step_says_the_same_as_scan(rule: UpdateRule) -> None:
    step_equals_scan(rule, length=LENGTH)


SMALL = {
    "infini_attention": {"segment": 4},
    "landmark_attention": {"block": 4},
    "moba": {"block": 4, "top": 2},
    "nsa": {"pooled": 4, "stride": 2, "block": 4, "window": 4},
}
"""Settings that put several blocks or segments into few tokens."""


@pytest.mark.parametrize("name", SMALL)
def test_a_token_reaches_no_output_before_it_at_any_place_in_a_block(name: str) -> None:
    rule = deltalab.get_rule(name, **SMALL[name])
    x = inputs(rule, LENGTH)
    o, _ = deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    for t in range(LENGTH):
        k, v = x.k.clone(), x.v.clone()
        k[:, t], v[:, t] = -3 * k[:, t], 5 + v[:, t]
        changed, _ = deltalab.scan(rule, x.q, k, v, x.gates)
        torch.testing.assert_close(changed[:, :t], o[:, :t], rtol=0, atol=1e-12)
        last = t + 1 if name == "landmark_attention" and t % 4 == 3 else t  # a landmark does not see itself
        if last < LENGTH:
            assert not torch.allclose(changed[:, last], o[:, last])


def test_choosing_every_block_is_attention() -> None:
    rule = deltalab.get_rule("moba", block=4, top=LENGTH)
    x = inputs(rule, LENGTH)
    o, _ = deltalab.scan(rule, x.q, x.k, x.v, {})
    torch.testing.assert_close(o, deltalab.scan(deltalab.get_rule("attention"), x.q, x.k, x.v, {})[0])


def test_of_equal_blocks_the_first_is_chosen() -> None:
    """Keys of 0 make all blocks equal: the output is the mean of the first block and of the own one."""
    rule = deltalab.get_rule("moba", block=4, top=2)
    x = inputs(rule, 16)
    o, _ = deltalab.scan(rule, x.q, torch.zeros_like(x.k), x.v, {})
    torch.testing.assert_close(o[:, 15], torch.cat([x.v[:, :4], x.v[:, 12:]], dim=1).mean(1))


def test_nsa_refuses_pieces_that_do_not_divide_and_branches_that_are_all_0() -> None:
    with pytest.raises(InputError, match=r"^nsa.pooled must be a multiple of stride 4, not 6$"):
        deltalab.get_rule("nsa", pooled=6)
    with pytest.raises(InputError, match=r"^nsa.block must be a multiple of stride 4, not 18$"):
        deltalab.get_rule("nsa", block=18)
    with pytest.raises(InputError, match=r"^nsa: c, s and w are all 0, and leave no branch"):
        deltalab.get_rule("nsa", c=0, s=0, w=0)


FAULTS = {
    "another hash": ("[turned, -turned]", "[turned.abs()]"),
    "one sign alone": ("[turned, -turned]", "[turned]"),
    "one hash for all rounds": ("@ r\n", "@ r[:1].expand_as(r)\n"),
    "the last round alone": ("seen = seen | (bucket", "seen = (bucket"),
    "always itself": ("~seen.any(-1, keepdim=True) & (places == now)", "(places == now)"),
    "itself for the first token alone": ("~seen.any(-1, keepdim=True) & (places == now)", "(places + now == 0)"),
    "a later token": ("seen = seen & (places < now)", "seen = seen & (places != now)"),
    "keys of any length": ("F.normalize(q, dim=-1), v)\n", "q, v)\n"),
    "k as the key": ("F.normalize(q, dim=-1), v)\n", "F.normalize(k, dim=-1), v)\n"),
    "queries of unit norm": ("scale * q.transpose", "scale * F.normalize(q, dim=-1).transpose"),
    "a scale of its own": ("logits = scale", "logits = q.shape[-1] ** -0.5"),
}
"""What is easy to get wrong in `mix`: the code, and what stands there instead."""

FAULTS_OF_STEP = {
    "no count of rounds": (".to(q).log()", ".to(q) * 0"),
    "the count itself": (".to(q).log()", ".to(q)"),
    "itself in each round": ("m[..., -1] = ITSELF", "m[..., -1] = 0"),
    "a mean of rounds": ("z.softmax(-1),", "torch.ones_like(z) / self.rounds,"),
}
"""What is easy to get wrong in `step`."""


def faulty(right: str, wrong: str) -> Any:
    """Returns the class of Reformer with a fault."""
    code = inspect.getsource(reformer_file)
    assert code.count(right) == 1
    module = types.ModuleType(reformer_file.__name__)
    exec(compile(code.replace(right, wrong), "faulty", "exec"), vars(module))
    return module.Reformer


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_reformer_is_no_longer_its_paper(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = faulty(*FAULTS[fault])
    monkeypatch.setattr(deltalab, "get_rule", lambda name: kind())
    with pytest.raises(AssertionError):
        rule_equals("reformer", {}, reformer(4, 8), "chunked", None, length=LENGTH)


@pytest.mark.parametrize("fault", FAULTS_OF_STEP)
def test_a_fault_in_the_step_of_reformer_is_no_longer_its_scan(fault: str) -> None:
    with pytest.raises(AssertionError):
        step_equals_scan(faulty(*FAULTS_OF_STEP[fault])(), length=LENGTH)


def test_the_rotations_of_reformer_are_normal_and_the_same_everywhere() -> None:
    """So trials of any machine and seed have the same buckets: the first numbers stand here."""
    drawn = reformer_file.rotations(64, 4, 32, torch.float64, torch.device("cpu"))
    assert drawn[0, 0, :2].tolist() == pytest.approx([0.9417154046806644, -1.3965781047011498], abs=1e-12)
    assert abs(drawn.mean()) < 0.05
    assert abs(drawn.std() - 1) < 0.05


def test_reformer_with_equal_tokens_is_a_mean_of_those_before() -> None:
    rule = deltalab.get_rule("reformer")
    assert rule.scale(K) == 1
    x = inputs(rule, 9)
    o, _ = deltalab.scan(rule, torch.ones_like(x.q), x.k, x.v, {})
    torch.testing.assert_close(o[:, 8], x.v[:, :8].mean(1))
    torch.testing.assert_close(o[:, 0], x.v[:, 0])


def test_no_token_of_the_checks_lies_on_the_border_of_two_buckets() -> None:
    """There gradients, dtypes and forms would differ. The nearest token is 100 roundings of fp32 away."""
    rule = deltalab.get_rule("reformer")
    for length in (rule_runs.PREFIX + rule_runs.LENGTH, rule_runs.PREFIX + rule_runs.LONG):
        keys = F.normalize(rule_runs.inputs(rule, length).q, dim=-1).transpose(1, 2)
        r = reformer_file.rotations(rule_runs.KEY, rule.rounds, rule.buckets, keys.dtype, keys.device)
        turned = keys[:, :, None] @ r
        best, second = torch.cat([turned, -turned], dim=-1).topk(2).values.unbind(-1)
        assert (best - second).min() > 100 * 2**-24


def test_reformer_refuses_an_odd_number_of_buckets_and_too_many() -> None:
    with pytest.raises(InputError, match=r"^reformer.buckets must be at most 4,096, not 4,098$"):
        deltalab.get_rule("reformer", buckets=4098)
    with pytest.raises(InputError, match=r"^reformer.buckets must be even, a half for each sign, not 7$"):
        deltalab.get_rule("reformer", buckets=7)


def test_infini_attention_sees_nothing_of_a_segment_before_but_by_its_memory() -> None:
    """With b = 0 a segment is by itself, and with b = 1 the first segment has nothing to read."""
    rule = deltalab.get_rule("infini_attention", segment=4)
    x = inputs(rule, 12)
    alone = x.span(4, 8)
    gates = {"b": torch.zeros_like(x.gates["b"])}
    o, _ = deltalab.scan(rule, x.q, x.k, x.v, gates)
    torch.testing.assert_close(o[:, 4:8], deltalab.scan(rule, alone.q, alone.k, alone.v, gates)[0])
    o, _ = deltalab.scan(rule, x.q, x.k, x.v, {"b": torch.ones_like(x.gates["b"])})
    assert not o[:, :4].any()
    assert o[:, 4:].abs().min() > 1e-6


def test_infini_attention_refuses_an_odd_number_of_channels_to_turn() -> None:
    x = torch.zeros(1, 2, 1, 5)
    with pytest.raises(InputError, match=r"^rule 'infini_attention' with rope takes an even number .* key, not 5$"):
        deltalab.get_rule("infini_attention").start(x, x)
    deltalab.get_rule("infini_attention", rope=False).start(x, x)
