"""Processes that share sequences, against one process in fp64: losses and all gradients."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from deltalab.errors import InputError
from deltalab.models.model import Model, build_model, head_loss
from deltalab.models.parts.cache import LayerCache
from deltalab.models.parts.context import Context, Part

pytestmark = pytest.mark.slow

LENGTH, VOCABULARY = 36, 32
PLAIN = {"vocab_size": VOCABULARY, "d_model": 16, "heads": 2, "layers": 2}
ATTENTION = {"rule": "comba", "layers": 3, "attention": [1]}
ENDS = (5, 12, 18, 36)
"""The ends of packed documents. One is the end of a part of two processes, another that of a part of three."""
LONG = (4, 34, 36)
"""The ends of packed documents, of which one lies in three parts."""

Case = tuple[Mapping[str, Any], tuple[int, ...] | None]
RULES = (
    "comba",
    "rdn",
    "rla",
    "gka",
    "mesa_net",
    "mamba2",
    "rwkv7",
    "titans",
    "ttt_mlp",
    "slstm",
    "log_linear_attention",
)
CASES: dict[str, Case] = {
    **{rule: ({"rule": rule}, ends) for rule, ends in zip(RULES, (None, ENDS, LONG) * 4, strict=False)},
    "a rule, packed": ({"rule": "comba"}, ENDS),
    "a rule, long": ({"rule": "gated_deltanet"}, LONG),
    "attention": ({**ATTENTION, "rope": True}, None),
    "attention, packed": ({**ATTENTION, "rope": True}, ENDS),
    "attention, long": ({**ATTENTION, "rope": True, "window": 7}, LONG),
    "latents": ({"rule": "attention", "kv_rank": 6, "rope": True, "rope_dim": 4, "conv": 0}, ENDS),
    "canon": ({"rule": "comba", "canon": ["A", "B", "C", "D"]}, LONG),
    "shift and values": ({"rule": "rwkv7", "token_shift": True, "value_residual": {}}, ENDS),
    "blocks of RWKV-7": ({"preset": "rwkv7"}, ENDS),
    "blocks of RWKV-6": ({"preset": "rwkv6", "canon": ["C"]}, None),
    "beside": ({"rule": "mamba2", "beside": "attention"}, ENDS),
    "short parts": ({"rule": "comba", "conv": 8, "canon": ["B"]}, (1, 35, 36)),
}


def drawn(ends: tuple[int, ...] | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, targets of which some do not count, and the bounds of documents."""
    data = torch.randint(VOCABULARY, (2 if ends is None else 1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    targets = data[:, 1:].clone()
    targets[:, 3:9] = -100
    return data[:, :-1], targets, None if ends is None else torch.tensor([0, *ends])


def gradients(model: Model, parts: list[tuple[Tensor, Tensor, Part | None]]) -> dict[str, Tensor]:
    """The sum of losses over parts, and the gradients of all parameters."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets, part in parts:
        features, _ = model.read(tokens, cu_seqlens=None if part is None else part.cu_seqlens, part=part)
        loss = head_loss(features, model.head, targets, ignore=-100, count=1)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return {"loss": total} | {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in model.named_parameters()
    }


def made(case: Case) -> Model:
    """A model in fp64. What starts at zero, and may hide the gradient of what stands before it, is moved."""
    model = build_model({**PLAIN, **case[0]}, seed=1).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            if not value.any():
                value += 0.1 * torch.randn(value.shape, generator=generator)
    return model


def alone(case: Case) -> dict[str, Tensor]:
    """One process, which computes each document by itself."""
    model, (tokens, targets, bounds) = made(case), drawn(case[1])
    ends = [0, LENGTH] if bounds is None else bounds.tolist()
    return gradients(model, [(tokens[:, i:j], targets[:, i:j], None) for i, j in itertools.pairwise(ends)])


def together(case: Case, size: int) -> dict[str, Tensor]:
    """The sums over the processes, each of which computes its part."""
    model, (tokens, targets, bounds) = made(case), drawn(case[1])
    context = Context(size)
    # After as many tokens, other processes of longer sequences hand on. The last pass knows the forms of the states.
    for times in (2, 1, 1) if bounds is None else (1, 1):
        longer = [x.repeat(1, times) for x in (tokens, targets)]
        part = context.part(longer[0], bounds)
        found = gradients(model, [(part.cut(longer[0]), part.cut(longer[1]), part)])
    for value in found.values():
        dist.all_reduce(value)
    return found


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """A mistake in what a process receives, or in where its documents begin."""
    received, made = Part.received, Part.__init__
    changes: dict[str, Callable[[LayerCache], LayerCache]] = {
        "no state": lambda cache: cache.mapped(lambda x: x * 0),
        "no gradient": lambda cache: cache.mapped(Tensor.detach),
        "no positions": lambda cache: replace(cache, place=cache.place * 0),
    }

    def changed(self: Part, layer: int) -> LayerCache | None:
        cache = received(self, layer)
        return cache if cache is None or bug not in changes else changes[bug](cache)

    def without_borders(self: Part, *given: Any) -> None:
        made(self, *given)
        if bug == "no borders":
            self.before = self.before or self.begin
            self.after = self.after or self.end % LENGTH

    Part.received, Part.__init__ = changed, without_borders  # type: ignore[method-assign]
    yield
    Part.received, Part.__init__ = received, made  # type: ignore[method-assign]


BUGS = {
    "no state": "comba",
    "no gradient": "comba",
    "no positions": "attention",
    "no borders": "a rule, packed",
}


def work(rank: int, size: int, folder: Path) -> None:
    """A process, the first of which writes what all have found."""
    torch.set_num_threads(1)
    how: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=120)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", **how)
    found = {name: together(case, size) for name, case in CASES.items()}
    for bug, name in BUGS.items():
        with planted(bug):
            found[bug] = together(CASES[name], size)
    with pytest.raises(InputError, match=f"{size} processes cannot share 37 tokens evenly"):
        Context(size).part(torch.zeros(1, 37))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("context")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MASTER_ADDR", raising=False)
        patch.syspath_prepend(request.config.rootpath)  # The processes import this module by its name.
        mp.spawn(work, (request.param, folder), nprocs=request.param)  # type: ignore[no-untyped-call]
    read: dict[str, dict[str, Tensor]] = torch.load(folder / "found.pt")
    return read


def test_padding_and_whole_sequences_are_not_shared() -> None:
    part: Any = object()
    model, tokens = build_model({**PLAIN, "rule": "comba"}), drawn(None)[0]
    with pytest.raises(InputError, match="processes share sequences without padding"):
        model.read(tokens, attention_mask=torch.ones(2, LENGTH), part=part)
    with pytest.raises(InputError, match="of a model that reads token after token"):
        build_model({**PLAIN, "rule": "comba", "readout": "last"}).read(tokens, part=part)


def error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest error of a loss or of a parameter's gradient, relative to its size."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - x).norm() / x.norm().clamp_min(1e-12)) for name, x in expected.items())


@pytest.mark.parametrize("name", CASES)
def test_processes_that_share_sequences_have_the_gradients_of_one(name: str, found: dict[str, Any]) -> None:
    expected = alone(CASES[name])
    assert all(float(x.norm()) > 1e-9 for x in expected.values())
    assert error(found[name], expected) < 1e-11


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_changes_gradients(bug: str, found: dict[str, Any]) -> None:
    assert error(found[bug], alone(CASES[BUGS[bug]])) > 1e-4
