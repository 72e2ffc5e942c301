"""One token as a CUDA graph: who holds the cache, when a graph is captured, and that it computes what no graph does."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deltalab.models.graphs import tokens as graphs
from deltalab.models.graphs.tokens import Step, TokenGraphs
from deltalab.models.model import Model, build_model
from deltalab.models.parts.cache import LayerCache

MODEL = {"rule": "comba", "vocab_size": 13, "d_model": 16, "layers": 2, "heads": 2}


class Held:
    """A sequence's cache between tokens."""

    def __init__(self, states: list[LayerCache]) -> None:
        self.states = states


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Lets a CPU capture: the graph does the same work anew, on the same tensors. Returns what was captured."""
    found: list[Callable[[], Any]] = []

    def captured(work: Callable[[], Any]) -> Callable[[], Any]:
        work()
        found.append(work)
        return work

    monkeypatch.setattr(graphs, "captured", captured)
    monkeypatch.setattr(TokenGraphs, "device_type", "cpu")
    return found


def model(**more: Any) -> Model:
    return build_model({**MODEL, **more}).double().eval()


def texts(*shape: int) -> Tensor:
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(sum(shape)))


def prompt(network: Model, batch: int = 2, length: int = 5) -> Held:
    with torch.no_grad():
        return Held(network.step(texts(batch, length))[1])


@torch.no_grad()
def token(at: TokenGraphs, network: Model, tokens: Tensor, held: Held, step: Step | None = None) -> Tensor:
    """The logits of a token, by a graph where there is one."""
    step = step or network.step
    logits = at.token(network, step, tokens, held)
    if logits is None:
        logits, held.states = step(tokens, held.states)
    return logits


@torch.no_grad()
def right(network: Model, text: Tensor, held: list[LayerCache]) -> Tensor:
    """The logits of the last token of a text [B, n] after a cache, without a graph."""
    return network.step(text, held)[0][:, -1:]


def follow(at: TokenGraphs, network: Model, text: Tensor, held: Held, *, inference: bool = False) -> None:
    """Reads a text [B, T] token by token after a cache. Each token must have the logits that no graph gives it."""
    before = held.states
    for n in range(text.shape[1]):
        with torch.inference_mode(inference):
            logits = token(at, network, text[:, n : n + 1], held)
        torch.testing.assert_close(logits, right(network, text[:, : n + 1], before), rtol=1e-12, atol=1e-12)


def test_token_by_token(captures: list[Any]) -> None:
    network, at, text = model(), TokenGraphs(), texts(2, 6)
    for inference in (True, False):
        follow(at, network, text, prompt(network), inference=inference)
    assert len(captures) == 1, "a second sequence goes on with the same graph"


def test_sequences_in_turn(captures: list[Any]) -> None:
    network, at, text = model(), TokenGraphs(), texts(2, 8)
    both = [prompt(network, length=4), prompt(network, length=7)]
    before = [held.states for held in both]
    for n in range(8):
        for held, start in zip(both, before, strict=True):
            logits = token(at, network, text[:, n : n + 1], held)
            torch.testing.assert_close(logits, right(network, text[:, : n + 1], start), rtol=1e-12, atol=1e-12)
    assert len(captures) == 1


def test_rows_in_another_order(captures: list[Any]) -> None:
    network, at, text, order = model(), TokenGraphs(), texts(3, 4), torch.tensor([2, 0, 0])
    held = prompt(network, batch=3)
    start = [layer.rows(order) for layer in held.states]
    token(at, network, text[:, :1], held)
    token(at, network, text[:, 1:2], held)
    assert at.graph is not None
    assert held.states is at.graph.cache
    held.states = [layer.rows(order) for layer in held.states]
    logits = token(at, network, text[:, 2:3], held)
    wanted = right(network, torch.cat([text[order, :2], text[:, 2:3]], 1), start)
    torch.testing.assert_close(logits, wanted, rtol=1e-12, atol=1e-12)


def test_another_number_of_rows(captures: list[Any]) -> None:
    network, at = model(), TokenGraphs()
    for batch in (2, 1, 2):
        follow(at, network, texts(batch, 4), prompt(network, batch=batch))
    assert len(captures) == 3


def test_keys_of_attention_grow(captures: list[Any]) -> None:
    network, at, text = model(attention=[1]), TokenGraphs(), texts(2, 4)
    for _ in range(2):  # the first token has the same form in both
        follow(at, network, text, prompt(network))
    assert not captures


def test_weights_that_move(captures: list[Any]) -> None:
    network, other, at, text = model(), build_model(MODEL, seed=1).double().eval(), TokenGraphs(), texts(2, 3)
    for weights in (None, other.state_dict()):
        if weights is not None:
            network.load_state_dict(weights, assign=True)
        follow(at, network, text, prompt(network))
    assert len(captures) == 2


def test_hooks_see_each_call(captures: list[Any]) -> None:
    network, at, text, seen = model(), TokenGraphs(), texts(2, 4), []
    hook = network.blocks[1].register_forward_pre_hook(lambda *_: seen.append(1))
    held = prompt(network)
    for n in range(4):
        token(at, network, text[:, n : n + 1], held)
    assert len(seen) == 5
    hook.remove()
    network.blocks[1]._hf_hook = "accelerate's, which replaces forward"  # type: ignore[assignment]
    held = prompt(network)
    for n in range(4):
        token(at, network, text[:, n : n + 1], held)
    assert not captures


def test_what_cannot_be_captured(captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refused(work: Callable[[], Any]) -> Callable[[], Any]:
        tries.append(work)
        raise RuntimeError("operation not permitted\nmore")

    monkeypatch.setattr(graphs, "captured", refused)
    network, at, text = model(), TokenGraphs(), texts(2, 5)
    held = prompt(network)
    before = held.states
    token(at, network, text[:, :1], held)
    with pytest.warns(UserWarning, match="without a CUDA graph, and slower: operation not permitted$"):
        token(at, network, text[:, 1:2], held)
    for n in range(2, 5):
        logits = token(at, network, text[:, n : n + 1], held)
    torch.testing.assert_close(logits, right(network, text, before), rtol=1e-12, atol=1e-12)
    assert len(tries) == 1


def test_a_cache_that_exchanges_its_tensors(captures: list[Any]) -> None:
    """The new cache may consist of tensors of the old one, at other places."""
    none = torch.zeros(1, 0)

    def step(tokens: Tensor, cache: list[LayerCache]) -> tuple[Tensor, list[LayerCache]]:
        a, b = cache[0].state
        return a.clone(), [LayerCache(none, (b, a), none, none)]

    at, held, idle = TokenGraphs(), Held([LayerCache(none, (torch.ones(1), 2 * torch.ones(1)), none, none)]), model()
    found = [float(token(at, idle, torch.zeros(1, 1, dtype=torch.long), held, step)) for _ in range(6)]
    assert found == [1, 2, 1, 2, 1, 2]
    assert len(captures) == 1


def test_a_released_sequence_keeps_its_cache(captures: list[Any]) -> None:
    network, at, text = model(), TokenGraphs(), texts(2, 2)
    held = prompt(network)
    for n in range(2):
        token(at, network, text[:, n : n + 1], held)
    kept = copy.deepcopy(held.states)
    for n in range(2):
        token(at, network, text[:, n : n + 1], other := prompt(network, length=9))
    del other
    gc.collect()
    assert all(map(torch.equal, graphs.tensors(held.states), graphs.tensors(kept)))


def test_a_second_thread_goes_without_the_graph(captures: list[Any]) -> None:
    network, at, text, idle = model(), TokenGraphs(), texts(2, 3), []
    first, second = prompt(network), prompt(network)

    def step(tokens: Tensor, cache: list[LayerCache]) -> tuple[Tensor, list[LayerCache]]:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: idle.append(at.token(network, network.step, text[:, :1], second)))
            thread.start()
            thread.join()
        return network.step(tokens, cache)

    for n in range(3):
        token(at, network, text[:, n : n + 1], first, step)
    assert captures
    assert len(idle) > 3
    assert idle == [None] * len(idle)


def test_copies_capture_for_themselves(captures: list[Any]) -> None:
    network, at = model(), TokenGraphs()
    held = prompt(network)
    for n in range(2):
        token(at, network, texts(2, 2)[:, n : n + 1], held)
    assert at.graph is not None
    assert copy.deepcopy(at).graph is None
    assert pickle.loads(pickle.dumps(at)).graph is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"rule": "gated_deltanet"}, {"rule": "kda"}, {"rule": "rwkv7"}, {"preset": "rwkv7"}, {"rule": "gka"},
        {"rule": "rla"}, {"rule": "mamba2"}, {"rule": "comba", "canon": ["A", "C"], "rope": True}, {"rule": "mamba3"},
        {"rule": "delta_product"}, {"rule": "ttt_linear"}, {"rule": "log_linear_attention"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("bf16", [False, True])
def test_graphs_of_a_gpu(settings: dict[str, Any], bf16: bool) -> None:
    spec = {**MODEL, "d_model": 64, **settings}
    if "preset" in spec:
        del spec["rule"]
    network = build_model(spec).cuda().eval()
    at, text = TokenGraphs(), texts(2, 6).cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, bf16):
        for _ in range(2):
            one, other = (Held(network.step(texts(2, 5).cuda())[1]) for _ in range(2))
            for n in range(6):
                logits = token(at, network, text[:, n : n + 1], one)
                wanted, other.states = network.step(text[:, n : n + 1], other.states)
                torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    # The tokens of TTT's mini-batch and the levels of log-linear attention change the cache's size.
    grows = settings.get("rule") in ("ttt_linear", "log_linear_attention")
    assert (at.graph is None) == grows, at.refused
