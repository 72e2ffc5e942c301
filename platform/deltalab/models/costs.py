"""Counts what a model holds and computes on one block of each kind, so that hundreds of models take seconds."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from deltalab.errors import InputError
from deltalab.models.block import Block
from deltalab.models.model import Model
from deltalab.models.parts.cache import CacheSize, LayerCache
from deltalab.models.parts.experts import idle_parameters
from deltalab.models.spec import ModelSpec

SAMPLE = 16
"""How many tokens a block is run on at most, unless its state grows with the tokens."""
MOST_COMPUTED = 2**21
"""The most elements of one matrix of a block, or of the products of its queries and keys, for which the block is run.

A larger block is counted without numbers, on PyTorch's device `meta`, which takes longer for small blocks and no memory
for large ones."""

MOST_WRITTEN = 2**24
"""The most elements that the operators of a pass of one block write on a CPU. A larger pass is made without numbers."""

MOST_CALLS = 10_000
"""The most calls of PyTorch's operators in a pass of one block of rules over `SAMPLE` tokens, which take seconds."""

MOST_FORMS = 10_000
"""The forms of results that are kept at once, in some 50 MB."""

PASSES = 3
"""The operations of a training step, divided by those of its forward pass: a backward pass has twice as many."""


@dataclass(frozen=True)
class ModelCosts:
    """What a model holds and computes on a sequence of T tokens.

    Attributes:
        parameters: Elements that are trained.
        cache: Elements held for one sequence after T tokens, by what they are for.
        flops_per_token: Operations of the matrix products of a forward pass, without embedding and logits. Of experts,
            those that a token uses.
        written_per_token: Elements that the operators of a forward pass write, views of them too, which bounds what a
            step of training holds.
    """

    parameters: int
    cache: CacheSize
    flops_per_token: float
    written_per_token: float = 0.0

    def by_quantity(self) -> dict[str, float]:
        """Lists the costs under the names of quantities that a study's file uses.

        Examples:
            >>> ModelCosts(parameters=9, cache=CacheSize(4, 2, 3), flops_per_token=2.5).by_quantity()
            {'state': 6, 'cache': 9, 'parameters': 9, 'flops': 2.5}
        """
        return {
            "state": self.cache.state,
            "cache": sum(self.cache),
            "parameters": self.parameters,
            "flops": self.flops_per_token,
        }


def training_flops(model: ModelSpec, flops_per_token: float, length: int, scored: int) -> float:
    """Returns the operations of matrix products in training on one sequence, forward and backward.

    Logits count, and so does the embedding of an image's patches.

    Args:
        model: The model.
        flops_per_token: Operations of a forward pass per token, without logits.
        length: The tokens of the sequence.
        scored: How many of them have logits.
    """
    embedding = 0 if model.patches is None else 2 * model.d_model * model.patches[2] * length
    return PASSES * (flops_per_token * length + embedding + 2 * model.d_model * model.vocab_size * scored)


class CostCounter:
    """Counts the costs of models; each kind of block is built and run once.

    `parameters` and `cache` are exact. A model is run to T tokens only if one more token makes its state larger.
    `flops_per_token` leaves out what a chunk longer than `SAMPLE` adds.

    Attributes:
        built: How many blocks were built so far.
    """

    def __init__(self) -> None:
        """Begins with no block."""
        self.built = 0
        self._blocks: dict[tuple[str, int | None, bool], _Blocks] = {}
        self._refused: dict[tuple[Any, ...], str] = {}

    def costs(self, model: ModelSpec, length: int) -> ModelCosts:
        """Counts a model after `length` tokens. Raises what the model raises when it is built or run."""
        kinds = [(count, self._block(block, length)) for count, block in model.kinds()]
        # Each token of the vocabulary has a row in the embedding, and one in the output matrix unless they are tied. A
        # class of images has a row in the output matrix alone.
        gates = 2 * (model.depth - 1) * model.value_flops
        rows = (model.vocab_size - 1) * (1 if model.tie_embeddings or model.patches else 2)
        return ModelCosts(
            parameters=kinds[0][1].ends
            + rows * model.d_model
            + model.value_shares
            + sum(n * block.parameters for n, block in kinds),
            cache=CacheSize.summed(block.cache for n, block in kinds for _ in range(n)),
            flops_per_token=sum(n * block.flops_per_token for n, block in kinds) + gates,
            written_per_token=sum(n * block.written_per_token for n, block in kinds),
        )

    def whole_flops_per_token(self, model: ModelSpec, length: int) -> float:
        """Counts the operations of a forward pass per token, those of whole chunks too, and on all machines alike.

        Raises what the model raises. A module of another author must run on a CPU, where no kernel hides its products.
        """
        blocks = sum(n * self._counted(block, length, gpu=False).flops_per_token for n, block in model.kinds())
        return blocks + 2 * (model.depth - 1) * model.value_flops

    def _block(self, model: ModelSpec, length: int) -> "_Blocks":
        # The products of a module may grow with the tokens in any way, and a scan of an image reads all of its patches.
        if model.foreign() or model.patches is not None:
            return self._counted(model, length)
        sample = self._counted(model, None if length > SAMPLE else length)
        return self._counted(model, length) if sample.grows else sample

    def _counted(self, model: ModelSpec, length: int | None, *, gpu: bool = True) -> "_Blocks":
        key = repr(model), length, gpu
        if key in self._blocks:
            return self._blocks[key]
        # How often a block calls operators follows from its rules and tokens. A search tries them in many widths.
        second = model.second()
        rules = [one.make_rule() for one in (model, second) if one is not None]
        scans = model.patches, model.bidirectional, model.axes
        calls = repr(rules), repr(model.experts), model.chunk_size, scans, length
        if calls in self._refused:
            raise InputError(self._refused[calls])
        self.built += 1
        try:
            self._blocks[key] = _count(model, length, gpu=gpu)
        except _TooMany as error:
            self._refused[calls] = str(error)
            raise
        return self._blocks[key]


@dataclass(frozen=True)
class _Blocks:
    """The costs of one block of a model whose blocks are all equal, and of what lies outside of them."""

    ends: int
    """Parameters outside of the blocks."""
    parameters: int
    cache: CacheSize
    flops_per_token: float
    written_per_token: float
    grows: bool
    """Whether the cache was larger one token later."""


def _count(model: ModelSpec, length: int | None, *, gpu: bool) -> _Blocks:
    """Counts after `length` tokens, or after `SAMPLE` tokens and one more if `length` is None.

    A module of another author that does not run on a CPU is counted on a GPU if `gpu` allows it.
    """
    width = model.heads * sum(model.head_dims)
    mlp_width = model.mlp_width or 3 * model.d_model
    if model.experts is not None:
        mlp_width = model.experts["count"] * (model.experts["width"] or mlp_width)
    ranks = (rank or 0 for rank in (model.q_rank, model.kv_rank, model.gate_rank))
    matrix = max(model.d_model * max(width, mlp_width), max(model.d_model, width) * max(ranks))
    if not model.foreign():
        largest = max(matrix, model.heads * (length or 0) ** 2 // 8, _state(model, torch.device("meta")))
        device = torch.device("meta" if largest > MOST_COMPUTED else "cpu")
        try:
            return _count_on(device, model, length)
        except _TooLarge:
            return _count_on(torch.device("meta"), model, length)
    try:
        return _count_on(torch.device("cpu"), model, length)
    except Exception:
        if not gpu or not torch.cuda.is_available():
            raise
        with torch.autocast("cuda", torch.bfloat16):  # the module needs a GPU
            return _count_on(torch.device("cuda"), model, length)


def _state(model: ModelSpec, device: torch.device) -> int:
    """Makes the states of a block of rules for one sequence, and returns their elements."""
    elements = 0
    for one in (model, model.second()):
        if one is not None:
            k, v = (torch.empty(1, 1, one.heads, width, device=device) for width in one.head_dims)
            elements += sum(state.numel() for state in one.make_rule().start(k, v))
    return elements


@torch.no_grad()
def _count_on(device: torch.device, model: ModelSpec, length: int | None) -> _Blocks:
    with device:
        network = Model(model)
    if not model.foreign():
        _state(
            model, device
        )  # A rule may make what its states start with once in a process: that is no cost of a pass.
    tokens = length or SAMPLE
    counted, cache = _run(network, tokens, device)
    flops = counted.total / tokens - 2 * idle_parameters(network)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with _Counter(None, device):
        grows = length is None and network.hidden(token, cache)[1][0].numel() != cache[0].numel()
    inside = sum(p.numel() for p in network.blocks.parameters())
    ends = sum(p.numel() for p in network.parameters()) - inside
    size = cast(Block, network.blocks[0]).cache_size(cache[0])
    written = counted.written / tokens / model.depth
    return _Blocks(ends, inside // model.depth, size, flops / model.depth, written, grows)


def _run(network: Model, length: int, device: torch.device) -> tuple["_Counter", list[LayerCache]]:
    """Runs a model on `length` tokens: what was counted, and the caches."""
    # Other attentions of a CPU hide their products from the counter.
    # A module of another author may well loop over its tokens, but a rule is run on few.
    # An image is run on all of its patches.
    looped = network.spec.foreign() or (length > SAMPLE and network.spec.patches is None)
    written = None if network.spec.foreign() or device.type != "cpu" else MOST_WRITTEN
    with sdpa_kernel(SDPBackend.MATH), _Counter(None if looped else length, device, written) as counter:
        _, cache = network.transform(network.blank(length))
    return counter, cache


class _TooLarge(Exception):
    """A pass on a CPU writes more than `MOST_WRITTEN` elements."""


class _TooMany(InputError):
    """A pass calls operators more often than `MOST_CALLS` allows."""


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class _Forms:
    """Calls operators on the device `meta`, and finds the form of a result once for arguments of the same forms.

    PyTorch finds many forms in Python, and a rule that loops over its tokens calls the same operators for each.
    """

    def __init__(self) -> None:
        """Begins with no result."""
        self._known: dict[Any, Any] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what an operator returns: a result without numbers has its form alone."""
        if func._schema.is_mutable or not (_numberless(args) and _numberless(tuple(kwargs.values()))):
            return func(*args, **kwargs)
        key = func, _form(args), _form(tuple(kwargs.items()))
        if key in self._known:
            return _another(self._known[key])
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor | tuple | list) and _numberless(out):
            if len(self._known) == MOST_FORMS:
                self._known.clear()
            self._known[key] = _another(out)
        return out


def _numberless(value: Any) -> bool:
    """Whether no tensor in a value holds numbers."""
    return all(map(_numberless, value)) if isinstance(value, tuple | list) else getattr(value, "is_meta", True)


def _form(value: Any) -> Any:
    """What decides the form of an operator's result. The numbers 1, 1.0 and true differ in type alone."""
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()


def _another(out: Any) -> Any:
    """Makes tensors of the same forms, which an operator in place may change."""
    if isinstance(out, tuple | list):
        return type(out)(map(_another, out))
    return out.detach() if isinstance(out, torch.Tensor) else out


_forms = _Forms()


class _Counter(TorchDispatchMode):
    """Counts what PyTorch's `FlopCounterMode` counts, without loading the compiler, which takes seconds.

    Attributes:
        total: Operations of matrix products.
        written: Elements of all results, but for those that come from the host, such as hashes that are made once.
    """

    def __init__(self, tokens: int | None, device: torch.device, most_written: int | None = None) -> None:
        """Begins to count.

        Args:
            tokens: The tokens of the pass, which bound its calls; None for a pass with any number of calls.
            device: The device of the pass.
            most_written: The most elements of all results; None for no bound.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.written = self.calls = 0
        self._tokens = tokens
        self._most = None if tokens is None else MOST_CALLS * math.ceil(tokens / SAMPLE)
        self._most_written = most_written
        self._call = _forms if device.type == "meta" else _plain

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load the compiler, to tell it to leave this class alone.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        if self._most is not None and self.calls > self._most:
            raise _TooMany(
                f"a pass of a block over {self._tokens} tokens takes over {self._most:,} calls of PyTorch's operators: "
                "give its rule fewer iterations or steps"
            )
        out = self._call(func, args, kwargs)
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.total += flops(*args, **kwargs, out_val=out)
        if func is torch.ops.aten.lift_fresh.default:
            return out
        self.written += sum(one.numel() for one in (out if isinstance(out, tuple | list) else (out,))
                            if isinstance(one, torch.Tensor))  # fmt: skip
        if self._most_written is not None and self.written > self._most_written:
            raise _TooLarge
        return out
