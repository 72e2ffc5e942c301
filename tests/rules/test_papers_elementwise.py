"""Papers of element-wise and nonlinear recurrences, written again from their equations, a channel and token at a time.

Numbers are Python's, and complex where the paper's are.
"""

import cmath
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, draw
from deltalab.rule import UpdateRule

B, T, H, V = 2, 11, 2, 5
SLOTS = 3
Tokens = list[dict[str, list[float]]]
Loop = Callable[[Tokens], list[list[float]]]


def drawn(rule: UpdateRule) -> Inputs:
    return draw(rule, batch=B, length=T, heads=H, key_dim=V, value_dim=V, seed=3)


def by_paper(loop: Loop, rule: UpdateRule, x: Inputs) -> Tensor:
    """Each head of each sequence by itself. A gate without channels is a list of one number."""
    heads = torch.zeros(H, dtype=torch.float64)
    gates = {name: gate.value(heads, {}) for name, gate in rule.gates.items() if gate.constant} | dict(x.gates)
    inputs = {"q": x.q, "k": x.k, "v": x.v, **gates}

    def of(value: Tensor, b: int, t: int, h: int) -> list[float]:
        numbers = value[b, t, h] if value.dim() > 2 else value[h]
        return numbers.reshape(-1).tolist()

    rows = [
        loop([{name: of(value, b, t, h) for name, value in inputs.items()} for t in range(T)])
        for b in range(B)
        for h in range(H)
    ]
    return torch.tensor(rows, dtype=torch.float64).unflatten(0, (B, H)).transpose(1, 2)


def at(numbers: list[float], j: int) -> float:
    return numbers[j] if len(numbers) > 1 else numbers[0]


def complex_inputs(v: list[float]) -> list[complex]:
    half = (len(v) + 1) // 2
    return [complex(v[j], v[half + j] if half + j < len(v) else 0.0) for j in range(half)]


def rg_lru(normalize: bool) -> Loop:
    """arXiv:2402.19427 Eq. 3, 4: a_t = a^(c r_t), h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)."""

    def loop(tokens: Tokens) -> list[list[float]]:
        h, o = [0.0] * V, []
        for t in tokens:
            for j in range(V):
                a = math.exp(t["g"][j]) ** at(t["r"], j)
                h[j] = a * h[j] + (math.sqrt(1 - a * a) if normalize else 1) * at(t["i"], j) * t["v"][j]
            o.append(list(h))
        return o

    return loop


def read_out(h: list[complex]) -> list[float]:
    return [*(z.real for z in h), *(z.imag for z in h)][:V]


def hgrn(tokens: Tokens) -> list[list[float]]:
    """arXiv:2311.04823 Eq. 5, 8: h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) c_t, lambda_t above gamma."""
    h, o = [0j] * 3, []
    for t in tokens:
        for j, c in enumerate(complex_inputs(t["v"])):
            gamma = t["low"][0]
            forget = gamma + (1 - gamma) * t["f"][j]
            h[j] = forget * cmath.exp(1j * at(t["theta"], j)) * h[j] + (1 - forget) * c
        o.append(read_out(h))
    return o


def lru(normalize: bool) -> Loop:
    """arXiv:2303.06349 Eq. 7: x_k = lambda x_{k-1} + gamma B u_k."""

    def loop(tokens: Tokens) -> list[list[float]]:
        h, o = [0j] * 3, []
        for t in tokens:
            for j, b in enumerate(complex_inputs(t["v"])):
                factor = cmath.rect(math.exp(t["g"][j]), at(t["theta"], j))
                gamma = at(t["gamma"], j) * (math.sqrt(1 - abs(factor) ** 2) if normalize else 1)
                h[j] = factor * h[j] + gamma * b
            o.append(read_out(h))
        return o

    return loop


def s5(tokens: Tokens) -> list[list[float]]:
    """arXiv:2208.04933 Eq. 6: x_k = exp(Lambda dt) x_{k-1} + Lambda^-1 (exp(Lambda dt) - I) B u_k."""
    h, o = [0j] * 3, []
    for t in tokens:
        for j, b in enumerate(complex_inputs(t["v"])):
            A = complex(-t["rate"][j], t["omega"][j])
            step = cmath.exp(A * at(t["dt"], j))
            h[j] = step * h[j] + (step - 1) / A * b
        o.append(read_out(h))
    return o


def s4d(multiplied: bool) -> Loop:
    """arXiv:2206.11893 Listing 1: the kernel 2 Re sum_n C_n (exp(dt A) - 1) / A exp(dt A)^l, and its convolution.

    H3 (arXiv:2212.14052) convolves k * v and multiplies by q.
    """

    def loop(tokens: Tokens) -> list[list[float]]:
        o = []
        for now, t in enumerate(tokens):
            row = []
            for j in range(V):
                y = 0.0
                for before in range(now + 1):
                    u = tokens[before]["v"][j] * (tokens[before]["k"][j] if multiplied else 1)
                    for n in range(j * SLOTS, (j + 1) * SLOTS):
                        A, C = complex(-t["rate"][n], t["omega"][n]), complex(t["c"][n], t["d"][n])
                        step = cmath.exp(A * at(t["dt"], j))
                        y += 2 * (C * (step - 1) / A * step ** (now - before)).real * u
                row.append(y * t["q"][j] if multiplied else y)
            o.append(row)
        return o

    return loop


def rwkv4(tokens: Tokens) -> list[list[float]]:
    """arXiv:2305.13048 Eq. 14: the weighted mean as a sum over all tokens before, and sigmoid(r) from Eq. 15."""
    o = []
    for now, t in enumerate(tokens):
        row = []
        for j in range(V):
            own = math.exp(at(t["u"], j) + t["k"][j])
            top, bottom = own * t["v"][j], own
            for before, i in enumerate(tokens[:now]):
                weight = math.exp((now - 1 - before) * at(t["g"], j) + i["k"][j])
                top, bottom = top + weight * i["v"][j], bottom + weight
            row.append(top / bottom / (1 + math.exp(-t["q"][j])))
        o.append(row)
    return o


def min_gru(tokens: Tokens) -> list[list[float]]:
    """arXiv:2410.01201 Section 3.1: h_t = (1 - z_t) h_{t-1} + z_t h~_t."""
    h, o = [0.0] * V, []
    for t in tokens:
        h = [(1 - at(t["z"], j)) * h[j] + at(t["z"], j) * t["v"][j] for j in range(V)]
        o.append(h)
    return o


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slstm(forget: Callable[[float], float]) -> Loop:
    """arXiv:2405.04517 Eq. 8-14, without the stabilizer, whose effect on h is none."""

    def loop(tokens: Tokens) -> list[list[float]]:
        h, c, n, o = [0.0] * V, [0.0] * V, [0.0] * V, []
        for t in tokens:
            R = t["r"] if len(t["r"]) > 1 else [0.0] * (4 * V * V)

            def read(gate: int, j: int, x: float, R: list[float] = R, h: list[float] = h) -> float:
                return x + sum(h[i] * R[gate * V * V + i * V + j] for i in range(V)) / math.sqrt(V)

            now = []
            for j in range(V):
                z = math.tanh(read(0, j, t["v"][j]))
                write = math.exp(read(1, j, at(t["i"], j)))
                keep = forget(read(2, j, at(t["f"], j)))
                c[j], n[j] = keep * c[j] + write * z, keep * n[j] + write
                now.append(sigmoid(read(3, j, at(t["o"], j))) * c[j] / n[j])
            h = now
            o.append(h)
        return o

    return loop


def softmax(x: list[float]) -> list[float]:
    weights = [math.exp(number) for number in x]
    return [weight / sum(weights) for weight in weights]


def recurrent_fast_weights(tokens: Tokens) -> list[list[float]]:
    """arXiv:2106.06295, as the loop in the authors' test of their kernel: W holds a row for each channel of the value.

    github.com/IDSIA/recurrent-fwp, algorithmic/rec_update_fwm_tanh.
    """
    W, out, o = [[0.0] * V for _ in range(V)], [0.0] * V, []
    for t in tokens:
        R = t["r"] if len(t["r"]) > 1 else [0.0] * (3 * V * V)
        h = [math.tanh(y) / math.sqrt(V) for y in out]

        def read(n: int, x: list[float], R: list[float] = R, h: list[float] = h) -> list[float]:
            return [x[j] + sum(h[i] * R[n * V * V + i * V + j] for i in range(V)) for j in range(V)]

        q, k, v = softmax(read(0, t["q"])), softmax(read(1, t["k"])), read(2, t["v"])
        beta = sigmoid(t["b"][0] + sum(h[i] * at(t["w"], i) for i in range(V)))
        old = [sum(W[j][i] * k[i] for i in range(V)) for j in range(V)]
        W = [[W[j][i] + beta * (v[j] - old[j]) * k[i] for i in range(V)] for j in range(V)]
        out = [sum(W[j][i] * q[i] for i in range(V)) for j in range(V)]
        o.append(out)
    return o


def hyena(width: int, frequency: float, outer: bool) -> Loop:
    """arXiv:2302.10866 Section 3 and App. D.3: y = q (h * (k v)), h = window FFN(positions).

    Multi-head Hyena (arXiv:2310.18780 Section 4) convolves the outer products k v^T, and reads them by q.
    """

    def tap(t: dict[str, list[float]], lag: float, j: int) -> float:
        numbers = iter(t["hidden"])
        first = [[next(numbers) for _ in range(width)] for _ in range(3)]
        first_bias = [next(numbers) for _ in range(width)]
        second = [[next(numbers) for _ in range(width)] for _ in range(width)]
        second_bias = [next(numbers) for _ in range(width)]
        turn = cmath.exp(-2j * math.pi * 1e-4 * lag)
        x = [lag, turn.real, turn.imag]
        for matrix, bias in ((first, first_bias), (second, second_bias)):
            sums = [bias[j] + sum(x[i] * matrix[i][j] for i in range(len(x))) for j in range(width)]
            x = [math.sin(frequency * y / math.sqrt(len(x))) for y in sums]
        row = j if len(t["last"]) > width else 0
        y = sum(x[i] * t["last"][row * width + i] for i in range(width)) / math.sqrt(width)
        slowest, fastest = -math.log(0.01) / 1.5, -math.log(0.01) / 0.3
        return math.exp(-lag * (slowest + j / (V - 1) * (fastest - slowest))) * y

    def loop(tokens: Tokens) -> list[list[float]]:
        o = []
        for now, t in enumerate(tokens):
            row = [0.0] * V
            for before, i in enumerate(tokens[: now + 1]):
                read = sum(q * k for q, k in zip(t["q"], i["k"], strict=True))
                for j in range(V):
                    h = tap(t, (now - before) / 64, j) + (at(t["d"], j) if before == now else 0)
                    row[j] += h * i["v"][j] * (read if outer else t["q"][j] * i["k"][j])
            o.append(row)
        return o

    return loop


OF_SLOTS = {
    "rate": {"slot_rate": {"slots": SLOTS}},
    "omega": {"slot_frequency": {"slots": SLOTS}},
    "c": {"slot_weight": {"slots": SLOTS}},
    "d": {"slot_weight": {"slots": SLOTS}},
}
SMALL = {"hidden": {"filter_network": {"width": 3}}, "length": 64}
EACH, SHARED = ({"last": {kind: {"width": 3}}} for kind in ("filter_output", "shared_filter_output"))
PAPERS: list[tuple[str, dict[str, Any], Loop]] = [
    *(("rg_lru", knobs, rg_lru(True)) for knobs in ({}, {"r": 1}, {"i": 1})),
    ("rg_lru", {"normalize": False}, rg_lru(False)),
    *(("hgrn", knobs, hgrn) for knobs in ({}, {"theta": 0}, {"low": 0.5})),
    *(("lru", knobs, lru(True)) for knobs in ({}, {"theta": 0}, {"gamma": 1})),
    ("lru", {"normalize": False}, lru(False)),
    *(("s5", knobs, s5) for knobs in ({}, {"dt": 0.125})),
    *(("s4d", OF_SLOTS | knobs, s4d(False)) for knobs in ({}, {"dt": 0.125})),
    ("h3", OF_SLOTS, s4d(True)),
    *(("rwkv4", knobs, rwkv4) for knobs in ({}, {"g": 0}, {"u": 0})),
    *(("slstm", knobs, slstm(sigmoid)) for knobs in ({}, {"r": 0}, {"i": 0})),
    ("slstm", {"forget": "exp"}, slstm(math.exp)),
    *(("recurrent_fast_weights", knobs, recurrent_fast_weights) for knobs in ({}, {"r": 0}, {"w": 0})),
    ("hyena", SMALL | EACH, hyena(3, 10.0, False)),
    ("hyena", SMALL | SHARED | {"d": 0, "frequency": 1.0}, hyena(3, 1.0, False)),
    ("hyena", SMALL | EACH | {"outer": True, "d": 0}, hyena(3, 10.0, True)),
    ("hyena", SMALL | SHARED | {"outer": True}, hyena(3, 10.0, True)),
    *(("min_gru", knobs, min_gru) for knobs in ({}, {"z": 0.5})),
]


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "knobs", "loop"), PAPERS, ids=lambda part: "" if callable(part) else str(part))
def test_rule_equals_its_paper(name: str, knobs: dict[str, Any], loop: Loop, backend: Any) -> None:
    rule = deltalab.get_rule(name, **knobs)
    x = drawn(rule)
    outputs, state = [], None
    for tokens in ((0, 4), (4, T)):
        part = x.span(*tokens)
        o, state = deltalab.scan(rule, part.q, part.k, part.v, part.gates, scale=1.0, state=state, backend=backend)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, dim=1), by_paper(loop, rule, x), rtol=0, atol=1e-11)


def test_rwkv4_does_not_overflow() -> None:
    rule = deltalab.get_rule("rwkv4")
    x = drawn(rule)
    want, _ = deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    o, _ = deltalab.scan(rule, x.q, x.k + 2000.0, x.v, x.gates)
    torch.testing.assert_close(o, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["h3", "rwkv4", "hyena", "recurrent_fast_weights"])
def test_rules_whose_keys_and_values_mix_by_channel_take_equal_widths(name: str) -> None:
    rule = deltalab.get_rule(name)
    x = draw(rule, batch=1, length=3, heads=1, key_dim=4, value_dim=3)
    with pytest.raises(deltalab.InputError, match="as many channels of the key as of the value, not 4 and 3"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates)


def test_s4d_takes_one_number_of_slots() -> None:
    with pytest.raises(deltalab.InputError, match="the same number of slots"):
        deltalab.get_rule("s4d", c={"slot_weight": {"slots": 4}})


def test_hyena_takes_one_width() -> None:
    with pytest.raises(deltalab.InputError, match="hidden and last must have the same width"):
        deltalab.get_rule("hyena", last={"filter_output": {"width": 4}})


def test_starts_are_those_of_the_papers() -> None:
    """|lambda| of LRU is on its ring, a^c of RG-LRU in its interval, and S5's frequencies are HiPPO-N's."""
    shape, generator = (2, 500), torch.Generator().manual_seed(0)

    def start(name: str, gate: str, parameter: str, of: tuple[int, ...] = shape) -> Tensor:
        return deltalab.get_rule(name).gates[gate].parameters[parameter](of, generator)

    radius = deltalab.get_rule("lru").gates["g"].value(torch.zeros(shape), {"nu": start("lru", "g", "nu")}).exp()
    assert float(radius.square().mean()) == pytest.approx(0.5, abs=0.05)  # uniform on the disk
    power = (
        deltalab.get_rule("rg_lru").gates["g"].value(torch.zeros(shape), {"bias": start("rg_lru", "g", "bias")}).exp()
    )
    assert 0.9 <= float(power.min()) < 0.91
    assert 0.99 < float(power.max()) <= 0.999
    legs = torch.zeros(6, 6, dtype=torch.float64)
    for n in range(6):
        legs[n, n] = -(n + 1)
        for k in range(n):
            legs[n, k] = -math.sqrt((2 * n + 1) * (2 * k + 1))
    rank_one = (torch.arange(6, dtype=torch.float64) + 0.5).sqrt()
    eigenvalues = torch.linalg.eigvals(legs + torch.outer(rank_one, rank_one))
    want = sorted(float(z.imag) for z in eigenvalues if z.imag > 0)
    torch.testing.assert_close(start("s5", "omega", "value", (1, 3))[0], torch.tensor(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pairs", [1, 2, 7, 8, 9, 40, 150])
def test_frequencies_of_s5_are_the_eigenvalues_of_hippo(pairs: int) -> None:
    """In fp32, as a layer starts with them, to the last bit."""
    root = (2 * torch.arange(2 * pairs, dtype=torch.float64) + 1).sqrt()
    skew = torch.outer(root, root).triu(1) / 2
    want = torch.linalg.eigvalsh(1j * (skew - skew.T))[pairs:]
    omega = deltalab.get_rule("s5").gates["omega"].parameters["value"]((3, pairs), None)
    assert torch.equal(omega, want.float().expand(3, pairs))


def test_frequencies_of_many_channels_of_s5_need_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each solves the equation of a sum over all states, which is taken term by term here."""
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda x: pytest.fail(f"a matrix {list(x.shape)}"))
    pairs = 2048
    (omega,) = deltalab.get_rule("s5").gates["omega"].parameters["value"]((1, pairs), None)
    rates = torch.arange(2 * pairs, dtype=torch.float64) + 0.5
    angles = torch.stack([(value.double() / rates).atan().sum() for value in omega])
    slopes = torch.stack([(rates / (rates**2 + value.double() ** 2)).sum() for value in omega])
    off = (angles - rates[:pairs] * math.pi) / slopes / omega
    assert float(off.abs().max()) < 1e-7
