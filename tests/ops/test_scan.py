"""`scan`: what it takes, what it refuses in one line, and which form it chooses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import draw, parts
from deltalab.errors import InputError
from deltalab.ops import reference
from deltalab.rule import UpdateRule

B, T, H, K, V = 2, 5, 3, 4, 6


def arguments(of: str = "gated_deltanet", **changes: Any) -> dict[str, Any]:
    """Valid arguments of `scan`, some of them replaced: by a value, or by a function of the valid one."""
    rule = deltalab.get_rule(of)
    x = draw(rule, batch=B, length=T, heads=H, key_dim=K, value_dim=V).map(Tensor.float)
    right: dict[str, Any] = {"rule": rule, "q": x.q, "k": x.k, "v": x.v, "gates": dict(x.gates)}
    for name, change in changes.items():
        right[name] = change(right[name]) if callable(change) else change
    return right


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda gates: {n: value for n, value in gates.items() if n != name}


def with_(name: str, value: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda gates: {**gates, name: value}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "chunkd"}, "unknown backend 'chunkd'; did you mean 'chunked'?"),
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1, not 0"),
        ({"chunk_size": 2.0}, "chunk_size must be a whole number of at least 1, not 2.0"),
        ({"chunk_size": True}, "chunk_size must be a whole number of at least 1, not True"),
        ({"q": lambda q: q[0]}, r"q must be a floating [B, T, H, ...] tensor, not torch.float32 [5, 3, 4]"),
        ({"v": lambda v: v.long()}, r"v must be a floating [B, T, H, ...] tensor, not torch.int64 [2, 5, 3, 6]"),
        (
            {"q": lambda q: q[..., :3]},
            "q must be [B, T, H, K], k [B, T, H, K] and v [B, T, H, V], none of them empty, not [2, 5",
        ),
        ({"k": lambda k: k[:, :4]}, "q must be [B, T, H, K]"),
        ({"v": lambda v: v[:1]}, "q must be [B, T, H, K]"),
        ({"v": lambda v: v[:, :, :1]}, "q must be [B, T, H, K]"),
        ({"v": lambda v: v[..., :0]}, "none of them empty"),
        ({"k": lambda k: k.double()}, "q, k and v must share dtype and device, not torch.float32, torch.float64"),
        ({"v": lambda v: v.to("meta")}, "q, k and v must share dtype and device"),
        ({"gates": with_("bet", torch.ones(H))}, "rule 'gated_deltanet': unknown gate 'bet'; did you mean 'beta'?"),
        ({"gates": without("beta")}, "rule 'gated_deltanet' needs a value for its gate 'beta'"),
        (
            {"gates": with_("g", torch.zeros(B, T))},
            "gate 'g', per token, must be [2, 5, 3] or [3] on cpu, not [2, 5] on cpu",
        ),
        ({"gates": with_("g", torch.zeros(B, T, H, device="meta"))}, "on cpu, not [2, 5, 3] on meta"),
        ({"gates": with_("beta", 0.5)}, "on cpu, not a float"),
        (
            {"state": (torch.zeros(B, H, V, K),)},
            "the state of rule 'gated_deltanet' must be a tuple of one [B, H, K, V] = [2, 3, 4, 6] on cpu, "
            "not ([2, 3, 6, 4] on cpu)",
        ),
        ({"state": torch.zeros(B, H, K, V)}, "a tuple of one [B, H, K, V] = [2, 3, 4, 6] on cpu, not a Tensor"),
        ({"state": (torch.zeros(B, H, K, V),) * 2}, "not ([2, 3, 4, 6] on cpu, [2, 3, 4, 6] on cpu)"),
        ({"state": (torch.zeros(B, H, K, V, device="meta"),)}, "not ([2, 3, 4, 6] on meta)"),
        ({"state": (None,)}, "not (a NoneType)"),
    ],
)
def test_wrong_input_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        deltalab.scan(**arguments(**changes))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("delta_product", {"k": lambda k: k[:, :T]}, "k [B, 2 T, H, K] and v [B, 2 T, H, V], none of them empty"),
        ("delta_product", {"v": lambda v: v[:, :T]}, "k [B, 2 T, H, K] and v [B, 2 T, H, V], none of them empty"),
        ("delta_product", {"gates": with_("beta", torch.zeros(B, T, H))}, "per step, must be [2, 10, 3] or [3]"),
        ("kda", {"gates": with_("g", torch.zeros(B, T, H))}, "'g', per channel, must be [2, 5, 3, 4] or [3, 4] on cpu"),
        ("rwkv7", {"gates": with_("xi", torch.zeros(H))}, "per head_channel, must be [2, 5, 3, 4] or [3, 4]"),
        ("rla", {"state": (torch.zeros(B, H, K, V),)}, "must be a tuple of two [B, H, K, V] = [2, 3, 4, 6]"),
        ("attention", {"state": torch.zeros(B, H, K, V)}, "a tuple of tensors, as an earlier call returned it, on cpu"),
        (
            "rla",
            {"state": (torch.zeros(B, H, K, V), torch.zeros(B, H, V, K))},
            "not ([2, 3, 4, 6] on cpu, [2, 3, 6, 4] on cpu)",
        ),
    ],
)  # fmt: skip
def test_steps_channels_and_pairs_have_shapes_of_their_own(name: str, changes: dict[str, Any], message: str) -> None:
    deltalab.scan(**arguments(name))
    with pytest.raises(InputError) as raised:
        deltalab.scan(**arguments(name, **changes))
    assert message in str(raised.value)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    name=st.sampled_from(["attention", "comba", "delta_product", "deltanet", "kda", "mamba2", "rla", "rwkv7"]),
    backend=st.sampled_from(["auto", "recurrent", "chunked"]),
    sizes=st.fixed_dictionaries({n: st.integers(1, 4) for n in ("batch", "length", "heads", "key_dim", "value_dim")}),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_any_shape_that_fits_is_taken_and_any_that_does_not_is_refused(
    name: str, backend: Any, sizes: dict[str, int], dtype: torch.dtype
) -> None:
    rule = deltalab.get_rule(name)
    x = draw(rule, **sizes).map(lambda part: part.to(dtype))
    o, state = deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend=backend, chunk_size=2)
    assert o.shape == (*x.q.shape[:3], sizes["value_dim"])
    assert o.dtype == dtype
    for tensor in parts(state).values() if rule.transition is not None else ():
        assert tensor.shape == (sizes["batch"], sizes["heads"], sizes["key_dim"], sizes["value_dim"])
        assert tensor.dtype == torch.promote_types(dtype, torch.float32)
    for part in ("q", "k", "v"):
        given_parts = {"q": x.q, "k": x.k, "v": x.v}
        for dim in range(4) if part != "v" else range(3):
            if rule.grouped and (part, dim, sizes["heads"]) == ("q", 2, 1):
                continue  # two queries share one key
            longer = torch.cat([given_parts[part], given_parts[part].narrow(dim, 0, 1)], dim)
            with pytest.raises(InputError):
                deltalab.scan(rule, **(given_parts | {part: longer}), gates=x.gates, backend=backend)


@dataclass(frozen=True, kw_only=True)
class Sum(UpdateRule):
    """S_t = S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, with S as one tensor or in a tuple of one."""

    name: ClassVar[str] = "sum"
    in_a_tuple: bool

    def initial_state(self, k: Tensor, v: Tensor) -> Any:
        return self._formed(v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]))

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Any
    ) -> tuple[Tensor, Any]:
        assert isinstance(state, tuple) == self.in_a_tuple
        S = state[0] if self.in_a_tuple else state
        states = S[:, None] + torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1)
        return scale * torch.einsum("bthk,bthkv->bthv", q, states), self._formed(states[:, -1])

    def _formed(self, S: Tensor) -> Any:
        return (S,) if self.in_a_tuple else S


@pytest.mark.parametrize("in_a_tuple", [False, True])
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_a_rule_may_keep_one_tensor_or_a_tuple_and_scan_returns_a_tuple(in_a_tuple: bool, backend: Any) -> None:
    x = arguments("linear_attention")
    want, (last,) = deltalab.scan(**x)
    x["rule"] = Sum(in_a_tuple=in_a_tuple)
    o, after = deltalab.scan(**x, backend=backend)
    assert isinstance(after, tuple)
    torch.testing.assert_close((o, after), (want, (last,)))
    first, state = deltalab.scan(**{n: z[:, :2] if n in "qkv" else z for n, z in x.items()}, backend=backend)
    rest = {n: z[:, 2:] if n in "qkv" else z for n, z in x.items()}
    second, after = deltalab.scan(**rest, state=state, backend=backend)
    torch.testing.assert_close((torch.cat([first, second], dim=1), after), (want, (last,)))


def test_constant_gates_may_be_given_or_left_out() -> None:
    rule = deltalab.get_rule("comba", b=1, d=0)
    x = draw(rule, batch=B, length=T, heads=H, key_dim=K, value_dim=V)
    assert set(x.gates) == {"g", "beta"}
    constants = {"b": torch.ones(H), "d": torch.zeros(B, T, H)}
    left_out, _ = deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    spelled_out, _ = deltalab.scan(rule, x.q, x.k, x.v, {**x.gates, **constants})
    assert torch.equal(left_out, spelled_out)


def test_the_scale_is_the_root_of_the_key_dimension() -> None:
    default, _ = deltalab.scan(**arguments())
    torch.testing.assert_close(deltalab.scan(**arguments(), scale=1.0)[0], default * K**0.5)


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("name", ["gated_deltanet", "linear_attention"])
def test_a_state_of_higher_precision_is_not_rounded(name: str, backend: Any) -> None:
    state = (torch.full((B, H, K, V), 1 / 3, dtype=torch.float64),)
    o, (after,) = deltalab.scan(**arguments(name), state=state, backend=backend)
    assert (o.dtype, after.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("length", "backend", "form"),
    [(1, "auto", "recurrent"), (2, "auto", "chunked"), (1, "chunked", "chunked"), (2, "recurrent", "recurrent")],
)
def test_one_token_takes_the_recurrence_and_several_the_parallel_form(
    length: int, backend: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for name in ("recurrent", "chunked"):
        run = getattr(reference, name)
        monkeypatch.setattr(reference, name, lambda *a, run=run, name=name, **k: taken.append(name) or run(*a, **k))
    x = arguments("linear_attention")
    deltalab.scan(x["rule"], *(x[n][:, :length] for n in ("q", "k", "v")), {}, backend=backend)
    assert taken == [form]


def test_inputs_are_left_as_they_were_and_autocast_does_not_reach_the_recurrence() -> None:
    x = arguments()
    before = {name: x[name].clone() for name in ("q", "k", "v")}
    want, _ = deltalab.scan(**x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = deltalab.scan(**x)
    assert torch.equal(got, want)
    assert all(torch.equal(x[name], value) for name, value in before.items())
