"""Models of FLA beside ours, computed by FLA's own code: logits, gradients, cached decoding and padding.

FLA (`pip install flash-linear-attention==0.6.0`) is no dependency, so that nothing here runs where it is missing:

    pytest tests/export/test_fla_itself.py -n 12 --dist loadgroup

Without a GPU, Triton's interpreter runs FLA's kernels, in fp32 on few tokens and for exported models alone. The models
are those of `benchmarks/fla_logits.py`: exported from ours (`to`), or FLA's own and taken back (`back`). What ours
compute in fp64 is the reference.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.support.folders import BENCHMARKS
from torch import Tensor

FLA = importlib.util.find_spec("fla") is not None
pytestmark = [pytest.mark.slow(keep="comba"), pytest.mark.skipif(not FLA, reason="needs flash-linear-attention 0.6")]


def read_models() -> Any:
    """The file of the models. It imports what a machine for GPU tests may lack."""
    spec = importlib.util.spec_from_file_location("fla_logits", BENCHMARKS / "fla_logits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = read_models() if FLA else None
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
READ = 40 if GPU else 8
"""The tokens that FLA reads one by one, in fp32."""
CHUNKED = 160
"""The tokens that FLA reads in chunks, in bf16."""
STEPS = 16 if GPU else 2
"""The tokens that are decoded one by one from a cache."""
WITHIN = {"forgetting_attention": 2e-3, "log_linear_mamba2": 2e-3, "mamba3": 2e-2, "mesa_net": 5e-3} if GPU else {}
"""The errors of logits in fp32 that are allowed beyond 2e-5. FLA's kernel of FoX is off by 8e-4 on an H100. That of
log-linear attention, which FLA has in chunks alone, multiplies in TF32, and is off by 8e-4 on an H200. MesaNet rounds
q and k to 16 bits, and adds 1e-5 in each step of its solver: 1.3e-3 by FLA's naive form on a CPU. Mamba-3's kernels
round their inputs to bf16."""
ON_A_GPU = {"log_linear_mamba2", "mamba3"}
"""The models whose layers FLA runs on a GPU alone."""
IN_FP32 = {"log_linear_mamba2"}
"""The models whose chunks FLA computes in fp32 alone: under autocast its kernel multiplies fp32 by bf16, which Triton
does not compile."""
SWAPS = {"raven": 0.1}
"""The errors of logits in bf16 that are allowed beyond 1e-2: rounding swaps slots that Raven's router takes."""
NEEDS_MASK = {"forgetting_attention"}
"""The models that decode from a cache only with an attention mask."""
OTHERWISE = {
    (
        "abc",
        "cached",
    ): "fla/ops/abc/chunk.py:1004: the state has hk and hv, and not z, the sum that both are divided by",
    ("abc", "padded"): "fla/layers/abc.py:200: the mask makes v of padding 0, and leaves its k and s in the sums",
}
"""What FLA 0.6 computes in another way than for the whole text, with the line of FLA."""
NEEDS_FLASH_ATTENTION = {"transformer", "hybrid", "latent_attention"}
"""The models that need flash-attn to read padded rows."""


class Pair(NamedTuple):
    """A `Model` of ours in fp64 on the CPU, the same in fp32 on the device, and FLA's model of it on the device."""

    case: str
    exact: Any
    ours: Any
    theirs: Any


@pytest.fixture(scope="module")
def fla() -> Iterator[ModuleType]:
    """FLA's models, whose kernels take the first of their configurations instead of trying them all."""
    from triton.runtime.autotuner import Autotuner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autotuner, "_bench", Autotuner._bench)  # to be put back: `imported` replaces it
        yield models.imported()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((case, way), id=f"{case}-{way}", marks=[pytest.mark.xdist_group(case), *only])
        for case in (models.CASES if FLA else ())
        for way, only in (("to", []), ("back", [pytest.mark.gpu]))
    ],
)
def pair(fla: ModuleType, request: pytest.FixtureRequest) -> Pair:
    case, way = request.param
    if case in ON_A_GPU and not GPU:
        pytest.skip("FLA's layer runs on a GPU alone")
    ours, theirs = models.WAYS[way](fla, case)
    exact = type(ours)(ours.spec).double()
    exact.load_state_dict(ours.state_dict())
    return Pair(case, exact, ours.to(DEVICE), theirs.to(DEVICE).eval())


def drawn(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, models.SIZES["vocab_size"], (2, length), generator=generator)


def away(found: Tensor, wanted: Tensor) -> float:
    """The relative error |found - wanted| / |wanted|."""
    return ((found.detach().double().cpu() - wanted).norm() / wanted.norm()).item()


@contextmanager
def runnable() -> Iterator[None]:
    """Skips where FLA refuses this GPU, or needs a GPU: a kernel refuses fp32, or does what the interpreter cannot."""
    try:
        yield
    except Exception as error:
        of_cpu = (
            "'int' object has no attribute 'to'",
            "'NoneType' object has no attribute 'type'",
            "does not support float32",
        )
        of_gpu = (
            "produces incorrect results for gated chunk_bwd_dqkwg",
            "Mamba-3 SISO kernels are unavailable",
            "Mamba-3 decode kernels are not available",
        )
        if not any(reason in str(error) for reason in (of_gpu if GPU else of_cpu)):
            raise
        pytest.skip(f"FLA refuses this GPU: {error}" if GPU else f"FLA's kernel needs a GPU: {error}")


def expect_known_difference(pair: Pair, read: str, request: pytest.FixtureRequest) -> None:
    """Says in the test's outcome that FLA reads in another way. The test fails if FLA does so no longer."""
    if reason := OTHERWISE.get((pair.case, read)):
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=True, reason=reason))


@torch.no_grad()
def test_logits_are_ours(pair: Pair) -> None:
    tokens = drawn(READ)
    with runnable():
        logits = pair.theirs(tokens.to(DEVICE), use_cache=False).logits
    assert away(logits, pair.exact(tokens)) < WITHIN.get(pair.case, 2e-5)


@pytest.mark.gpu
@torch.no_grad()
def test_logits_of_chunks_are_as_near_as_ours(pair: Pair) -> None:
    tokens = drawn(CHUNKED)
    reference = pair.exact(tokens)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=pair.case not in IN_FP32):
        theirs = pair.theirs(tokens.to(DEVICE), use_cache=False).logits
        ours = pair.ours(tokens.to(DEVICE))
    assert away(theirs, reference) < 2 * away(ours, reference) + SWAPS.get(pair.case, 1e-2)


@torch.no_grad()
def test_cached_decoding_gives_the_logits_of_the_whole(pair: Pair, request: pytest.FixtureRequest) -> None:
    expect_known_difference(pair, "cached", request)
    tokens = drawn(READ)
    start = READ - STEPS
    past, logits = None, []
    for first, last in [(0, start), *((place, place + 1) for place in range(start, READ))]:
        mask = {"attention_mask": torch.ones_like(tokens[:, :last]).to(DEVICE)} if pair.case in NEEDS_MASK else {}
        with runnable():
            output = pair.theirs(tokens[:, first:last].to(DEVICE), past_key_values=past, use_cache=True, **mask)
        past = output.past_key_values
        logits.append(output.logits)
    assert away(torch.cat(logits, dim=1), pair.exact(tokens)) < WITHIN.get(pair.case, 2e-5)


@torch.no_grad()
def test_padding_on_the_left_changes_no_logits(pair: Pair, request: pytest.FixtureRequest) -> None:
    expect_known_difference(pair, "padded", request)
    if pair.case in NEEDS_FLASH_ATTENTION and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("FLA's attention reads padded rows by flash-attn")
    tokens, padding = drawn(READ), 3
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    with runnable():
        logits = pair.theirs(tokens.to(DEVICE), attention_mask=mask.to(DEVICE), use_cache=False).logits
    assert away(logits[1:], pair.exact(tokens[1:])) < WITHIN.get(pair.case, 2e-5)
    assert away(logits[:1, padding:], pair.exact(tokens[:1, padding:])) < WITHIN.get(pair.case, 2e-5)


def test_gradients_are_ours(pair: Pair) -> None:
    """The gradients of the embeddings, and of the matrices of q, k, v and the output in the first layer."""
    tokens = drawn(CHUNKED if GPU else READ)
    wanted, ours = (gradients(model, tokens) for model in (pair.exact, pair.ours))
    pair.theirs.zero_grad()
    with runnable():
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU and pair.case not in IN_FP32):
            logits = pair.theirs(tokens.to(DEVICE), use_cache=False).logits
        loss_of(logits, tokens).backward()
    found = {name: value.grad for name, value in pair.theirs.named_parameters() if value.grad is not None}
    compared = wanted.keys() & found.keys()
    assert len(compared) >= 3
    for name in compared:
        allowed = 2 * away(ours[name], wanted[name]) + 2e-2 if GPU else 2e-4
        assert away(found[name], wanted[name]) < allowed, name


def gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Our gradients by FLA's names of the parameters, of those that `to_fla` moves without changing them."""
    device = model.embed.weight.device
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(tokens.to(device))
    loss_of(logits, tokens).backward()
    weights = model.state_dict()
    names = ["qkv.weight", "qkv.down.weight", "qkv.kv.weight", "out.weight"]
    if model.spec.make_rule().name in ("mamba2", "mamba3", "log_linear_attention"):
        # They share a matrix of FLA with q, k and v.
        names += [
            "gate.weight",
            *(name.removeprefix("blocks.0.mixer.") for name in weights if ".0.mixer.gates.project" in name),
        ]
    taken = {"embed.weight", *(f"blocks.0.mixer.{name}" for name in names)} & weights.keys()

    def moved(of_taken: Callable[[str], Tensor], factor: float = 1) -> dict[str, Tensor]:
        from deltalab.export.fla import to_fla

        scaled = {  # MesaNet's convolution leaves v as it is, and else has no equal
            name: value if name.endswith(".conv") else factor * value for name, value in weights.items()
        }
        given = {name: of_taken(name) if name in taken else scaled[name] for name in weights}
        return to_fla(model.spec, given)[1]

    parameters = dict(model.named_parameters())
    found = moved(lambda name: grad_of(parameters[name]))
    others = moved(lambda name: weights[name] + 1), moved(lambda name: grad_of(parameters[name]), factor=2)
    return {
        name: value.double().cpu()
        for name, value in found.items()
        if not torch.equal(value, others[0][name]) and torch.equal(value, others[1][name])
    }


def grad_of(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, which has one."""
    assert parameter.grad is not None
    return parameter.grad


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The loss of each token's next one."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten().to(logits.device))
