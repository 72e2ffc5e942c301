"""The kernels through `scan`, against the recurrence in fp64, in Triton's interpreter."""

import dataclasses
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.support.kernel_runs import DEVICE, cosines, error, run

import deltalab
from deltalab.authoring.inputs import Inputs, draw
from deltalab.errors import InputError
from deltalab.kernels import sequence_parts as kernel_parts
from deltalab.ops.backends import available, lacks_triton


def compare(
    rule, *, length: int, tolerance: float, batch: int = 1, key_dim: int = 16, value_dim: int = 16,
    dtype: torch.dtype = torch.float32, slower: float = 1.0, state: bool = False, **more,
):  # fmt: skip
    """slower: a factor of the log-decays."""

    def narrow(x: Inputs) -> Inputs:
        return dataclasses.replace(x, q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype))

    shape = {"batch": batch, "heads": 2, "key_dim": key_dim, "value_dim": value_dim}
    x = draw(rule, length=length, **shape)
    x = dataclasses.replace(x, gates={n: gate * (slower if n == "g" else 1.0) for n, gate in x.gates.items()})
    if state:
        past = draw(rule, length=4, seed=1, **shape)
        _, last = deltalab.scan(rule, past.q, past.k, past.v, past.gates, backend="chunked")
        x = dataclasses.replace(x, state=last)
    x = narrow(x.map(torch.Tensor.float)).map(torch.Tensor.double)
    wanted = run(rule, x.map(lambda part: part.requires_grad_()), "recurrent", **more)
    ours = narrow(x.map(lambda part: part.detach().float().to(DEVICE))).map(lambda part: part.requires_grad_())
    actual = run(rule, ours, "triton", **{name: value.to(DEVICE) for name, value in more.items()})
    for name, right in wanted.items():
        assert (right is None) == (actual[name] is None), name
        assert right is None or error(actual[name], right) <= tolerance, (name, error(actual[name], right))


RULES = [name for name in deltalab.list_rules() if deltalab.get_rule(name).transition is not None]


@pytest.mark.slow(keep="gated_deltanet")
@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_the_algebra_reaches_its_kernel(name):
    compare(deltalab.get_rule(name), length=19, tolerance=2e-5)


@pytest.mark.parametrize("name", ["comba", "delta_product", "rdn", "gla", "erase_then_delta"])
def test_widths_that_no_block_has(name):
    compare(deltalab.get_rule(name), length=5, key_dim=12, value_dim=20, tolerance=2e-5)


@pytest.mark.parametrize("name", ["rla", "sgla", "comba"])
def test_16_bits(name):
    """In `scan`, RLA derives further operands from those of 16 bits."""
    compare(deltalab.get_rule(name), length=35, dtype=torch.float16, tolerance=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-4), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize(
    ("rule", "times"),
    [
        (deltalab.get_rule("mamba3", lam=1), 1),
        (deltalab.get_rule("mamba3"), 1),
        (deltalab.get_rule("mamba3_mimo"), 2.5),
    ],
    ids=["one write", "two writes", "ranks"],
)
def test_the_gradients_of_a_phase_cancel(rule, times, dtype, tolerance):
    """A turn of all keys and queries after a token changes little.

    It did by 1e-3 in fp16 and by 8e-3 in bf16, and with ranks by 3.5e-3 and 3.1e-2.
    """
    x = draw(rule, batch=1, heads=4, length=260, key_dim=16, value_dim=16).map(torch.Tensor.float)
    x = dataclasses.replace(x, q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype))
    wanted = run(rule, x.map(lambda part: part.double().requires_grad_()), "chunked")
    actual = run(rule, x.map(lambda part: part.to(DEVICE, copy=True).requires_grad_()), "triton")
    for name in ("d theta", "d dt"):
        assert error(actual[name], wanted[name]) <= times * tolerance, (name, error(actual[name], wanted[name]))


class Apart(type(deltalab.get_rule("rdn"))):
    """A second state with a reader and a decay of its own, and, except for l2, a value of its own to predict."""

    name = "apart"

    def operands(self, q, k, v, **gates):
        x = super().operands(q, k, v, **gates)
        fit = dataclasses.replace(x.fit, r=q.flip(-1), v=v if self.loss == "l2" else 0.5 * v, g=2 * x.g)
        return dataclasses.replace(x, beta=None, fit=fit)


def test_a_second_state_may_have_operands_of_its_own():
    compare(Apart(), length=19, tolerance=2e-5)
    compare(Apart(output="sum", loss="l2"), length=19, tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["comba", "rla", "sgla", "kda", "delta_product", "erase_then_delta", "pre_state_deltanet", "rwkv6"]
)
def test_packed_sequences_are_each_for_itself(name):
    compare(deltalab.get_rule(name), length=23, cu_seqlens=torch.tensor([0, 3, 20, 23]), tolerance=2e-5)


@pytest.fixture
def split(monkeypatch):
    """Splits a sequence of two chunks into two parts."""
    monkeypatch.setattr(kernel_parts, "SHORTEST", 1)
    monkeypatch.setattr("deltalab.kernels.launch._plans", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length"), [("comba", 64), ("deltanet", 32), ("sgla", 64), ("rdn", 32), ("pre_state_deltanet", 32)]
)
def test_a_sequence_in_parts_is_the_same(name, length, split):
    compare(deltalab.get_rule(name), length=length, value_dim=32, slower=0.02, state=True, tolerance=2e-6)


def test_parts_are_as_many_as_would_idle():
    assert [kernel_parts.count(programs, 1024) for programs in (1, 8, 16, 32, 48, 66, 67, 132, 1024)] == [
        16, 16, 8, 4, 2, 2, 1, 1, 1,
    ]  # fmt: skip
    assert [kernel_parts.count(8, chunks) for chunks in (1, 63, 64, 66, 255, 256, 384)] == [1, 1, 2, 2, 1, 8, 8]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("comba", 9), ("comba", 32), ("gla", 9), ("rdn", 9)])
def test_stacked_models_fold_into_the_batch(name, length, split):
    rule = deltalab.get_rule(name)
    x = draw(rule, batch=1, length=length, heads=1, key_dim=16, value_dim=16).map(lambda part: part.float().to(DEVICE))
    stacked = [torch.stack([part, 0.5 * part]).requires_grad_() for part in (x.q, x.k, x.v)]

    def scanned(q, k, v):
        return deltalab.scan(rule, q, k, v, x.gates, backend="triton")[0]

    together = torch.func.vmap(scanned)(*stacked)
    alone = torch.stack([scanned(*(part[i] for part in stacked)) for i in range(2)])
    torch.testing.assert_close(together, alone)
    grads = [torch.autograd.grad((y * cosines(y).float()).sum(), stacked) for y in (together, alone)]
    torch.testing.assert_close(*grads)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("comba", 9), ("rdn", 32), ("gla", 9)])
def test_a_compiler_takes_all_of_it_as_one_graph(name, length, split, monkeypatch):
    rule = deltalab.get_rule(name)
    monkeypatch.setattr("deltalab.ops.recurrence.automatic", available)
    x = draw(rule, batch=1, length=length, heads=1, key_dim=16, value_dim=16).map(lambda part: part.float().to(DEVICE))

    def scanned(*given):
        q, k, v, *gates = given
        return deltalab.scan(rule, q, k, v, dict(zip(x.gates, gates, strict=True)))[0]

    given = [part.requires_grad_() for part in x.named().values()]
    outputs = [scanned(*given), torch.compile(scanned, fullgraph=True, backend="aot_eager")(*given)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), given) for o in outputs))


def test_what_the_kernels_do_not_take_is_said_before_a_launch():
    rule = deltalab.get_rule("gated_deltanet")
    x = draw(rule, batch=1, length=4, heads=1, key_dim=16, value_dim=16).map(lambda part: part.float().to(DEVICE))
    with pytest.raises(InputError, match="g is a log-decay"):
        deltalab.scan(rule, x.q, x.k, x.v, {**x.gates, "g": 0.1 + 0 * x.gates["g"]}, backend="triton")
    wide = draw(rule, batch=1, length=4, heads=1, key_dim=272, value_dim=16).map(lambda part: part.float().to(DEVICE))
    with pytest.raises(InputError, match="K up to 256, not 272"):
        deltalab.scan(rule, wide.q, wide.k, wide.v, wide.gates, backend="triton")
    with pytest.raises(InputError, match=r"bf16, fp16 or fp32, not torch\.float64"):
        deltalab.scan(rule, *(part.double() for part in (x.q, x.k, x.v)), x.gates, backend="triton")
    with pytest.raises(InputError, match="rule 'attention' brings no Triton kernel"):
        deltalab.scan(deltalab.get_rule("attention"), x.q, x.k, x.v, {}, backend="triton")
    with pytest.raises(InputError, match="cu_seqlens must be whole numbers"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, cu_seqlens=torch.tensor([0.0, 4.0], device=DEVICE))


def test_without_a_gpu_the_kernels_say_what_they_need(monkeypatch):
    rule = deltalab.get_rule("gated_deltanet")
    x = draw(rule, batch=1, length=4, heads=1, key_dim=16, value_dim=16).map(torch.Tensor.float)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("deltalab.ops.recurrence.lacks_triton", lacks_triton.__wrapped__)
    with pytest.raises(InputError, match="backend 'triton' needs a GPU"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="triton")
