"""What a rule costs to run: time, memory and its share of what the hardware can do, beside its peers in the same run.

Time: the median of many calls, the L2 cache cleared before each. Forward runs without gradients; forward and backward
    gives those of every input. On a GPU a call is replayed from a CUDA graph, so that its time is the device's; launch
    is what Python takes to launch it, which is the time of a call where it is the longer one and nothing is captured.
    Decode is one token with a state, over copies that together exceed the L2 cache.
First call: forward and backward, with compilation and autotuning; caches start empty, so the first shape counts.
Extra memory: the peak over a call, less what was there before it and the gradients that it returns; o counts.
Shares: of the bandwidth that a large copy reaches, and of the rate of a large matrix product, in the same run. Bytes
    are those of inputs, o and gradients, once in each direction; products those of the chunked algorithm with chunks
    of 64, and twice as many for backward.
"""

import functools
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deltalab.authoring.inputs import Inputs, draw, moves
from deltalab.bench.peers import Call, Contestant, installed, peer
from deltalab.bench.results import CPU_SHAPE, GPU_SHAPE, Figures, Report, Shape, whole_numbers
from deltalab.errors import unknown
from deltalab.ops.scan import Backend, scan
from deltalab.rule import State, UpdateRule

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DRAWN = 256
"""Tokens that are drawn; longer sequences repeat them."""
CHUNK = 64
MOST_COPIES = 64
CPU_SECONDS = 0.3
"""For each measurement on a CPU."""


class Bench:
    """One run on this machine's GPU or, without one, its CPU: `add` times a rule, `report` holds what was found.

    Kernels are compiled into a folder of the run's own, or into `cache`, which keeps them, and what autotuning found,
    for a later run: there is no first call to time then. after: called with each contestant's figures in the report.
    Raises `InputError` for an unknown dtype.
    """

    def __init__(
        self,
        dtype: str = "bf16",
        after: Callable[["Report"], None] = lambda _: None,
        cache: Path | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES, where="--dtype")
        self._own = None if cache else tempfile.TemporaryDirectory(prefix="deltalab-bench-")
        for variable in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"):
            os.environ[variable] = self._own.name if self._own else str(cache)
        if cache:
            os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype, self.after = DTYPES[dtype], after
        name = torch.cuda.get_device_name() if self.on_gpu else f"CPU, {torch.get_num_threads()} threads"
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.report = Report(name, dtype, self._ceilings(), _versions(), date)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def add(
        self,
        rule: UpdateRule,
        shape: Shape,
        *,
        backends: Sequence[Backend] | None = None,
        against: Iterable[str] = (),
        label: str = "",
    ) -> list[Figures]:
        """Times a rule at one shape, by our backends (those that this device is for) and by peers, one after another.

        label: in place of the rule's name. Raises `InputError` for a peer that cannot be had; a call that fails, as
        where memory does not do, leaves its reason.
        """
        here: Sequence[Backend] = ("triton", "chunked") if self.on_gpu else ("chunked", "recurrent")
        x, now = self._inputs(rule, shape)
        contestants = [_ours(rule, x, now, backend) for backend in backends or here]
        contestants += [peer(name, rule, x, now) for name in against]
        products, reference = flops(rule, shape), None
        found = []
        for one in contestants:
            figures = self._contest(one, attention_flops(shape) if one.name == "sdpa" else products)
            o = figures.pop("o", None)
            if one.same and o is not None:
                if reference is not None:
                    figures["error"] = float((o.float() - reference.float()).norm() / reference.float().norm())
                reference = o if reference is None else reference
            found.append(Figures(label or rule.name, one.name, str(shape), **figures))
            self.report.figures.append(found[-1])
            self.after(self.report)
        return found

    def _contest(self, one: Contestant, products: float | None) -> dict[str, Any]:
        """The fields of `Figures` that could be measured, and o."""
        call, token, ceilings = one.sequence, one.token, self.report.ceilings
        both = call.backward()
        found: dict[str, Any] = {}
        why: list[str] = []

        def first_call() -> None:
            seconds = self._seconds(both)
            if self._own:
                found["first_call"] = seconds
            found["o"] = call.forward()

        def time_forward() -> None:
            found["forward_memory"] = self._extra_memory(lambda: [call.forward()], kept=0)
            found["forward"], found["forward_launch"] = self._times(call.forward, why)
            moved = _bytes([*call.tensors.values(), found["o"]])
            found["forward_copy"], found["forward_matmul"] = share(moved, products, found["forward"])

        def time_both() -> None:
            found["both_memory"] = self._extra_memory(both, kept=_bytes(call.tensors.values()))
            found["both"], found["both_launch"] = self._times(both, why)
            moved = 3 * _bytes(call.tensors.values()) + 2 * found["o"].nbytes
            found["both_copy"], found["both_matmul"] = share(moved, products and 3 * products, found["both"])

        def time_decode() -> None:
            assert token is not None
            found["decode"] = self._decode(token)
            states = [tensor for name, tensor in token.tensors.items() if "state" in name]
            # The next state is written too.
            found["decode_copy"], _ = share(_bytes([*token.tensors.values(), *states]), None, found["decode"])

        def share(moved: int, operations: float | None, ms: float) -> tuple[float, float | None]:
            rate = None if operations is None else operations / ceilings["matmul"] / ms * 1e3
            return moved / ceilings["copy"] / ms * 1e3, rate

        for measure in (first_call, time_forward, time_both, *([time_decode] if token else [])):
            try:
                measure()
            except torch.OutOfMemoryError:
                why.append(f"{measure.__name__}: out of memory")
            except Exception as error:
                # A peer's code is a stranger's, and a backend may not be for this rule: the reason is the figure.
                said = " ".join(str(error).split())[:300]
                why.append(f"{measure.__name__}: {type(error).__name__}: {said}")
            if "o" not in found:
                break
        return {**found, "why": "; ".join(why)}

    def _inputs(self, rule: UpdateRule, shape: Shape) -> tuple[Inputs, Inputs]:
        """A sequence, and a token with a state; q, k, v and gates with channels are in dtype, other gates in fp32."""
        drawn = draw(
            rule,
            batch=1,
            length=min(shape.length, DRAWN),
            heads=shape.heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
        )

        def placed(x: Tensor) -> Tensor:
            return x.to(self.device, self.dtype if x.dim() == 4 else torch.float32)

        def spread(x: Tensor) -> Tensor:
            if not moves(x):
                return x
            rows = x.shape[1] // drawn.q.shape[1] * shape.length
            return x.repeat(shape.batch, -(-rows // x.shape[1]), *[1] * (x.dim() - 2))[:, :rows].contiguous()

        x = drawn.map(placed).map(spread)
        # A state that tokens of this kind leave.
        few = x.span(0, min(shape.length, CHUNK))
        with torch.no_grad():
            _, state = scan(rule, few.q, few.k, few.v, few.gates, backend="chunked")
        return x, x.span(0, 1, state).map(lambda part: part.clone())

    def _ceilings(self) -> dict[str, float]:
        size, width = (2**30, 8192) if self.on_gpu else (2**26, 1024)
        source, target = torch.randint(256, (2, size), dtype=torch.uint8, device=self.device)
        copy = 2 * size / self._median(lambda: target.copy_(source)) * 1e3
        a, b = torch.randn(2, width, width, device=self.device).to(self.dtype)
        return {"copy": copy, "matmul": 2 * width**3 / self._median(lambda: a @ b) * 1e3}

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _seconds(self, run: Callable[[], Any]) -> float:
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - start

    def _median(self, run: Callable[[], Any]) -> float:
        """ms, after a warm-up."""
        if self.on_gpu:
            from triton.testing import do_bench

            return float(do_bench(run, warmup=10, rep=50, return_mode="median"))
        once = self._seconds(run)
        return 1e3 * statistics.median(self._seconds(run) for _ in range(max(3, min(50, int(CPU_SECONDS / once)))))

    def _times(self, run: Callable[[], Any], why: list[str]) -> tuple[float, float | None]:
        """ms of a call on the device, and on a GPU of launching it."""
        if not self.on_gpu:
            return self._median(run), None
        launches = []
        for _ in range(20):
            self._synchronize()
            start = time.perf_counter()
            run()
            launches.append(time.perf_counter() - start)
        try:
            timed: Callable[[], Any] = _captured([run]).replay
        except RuntimeError as error:
            why.append(f"timed as launched, not captured: {str(error).splitlines()[0]}")
            timed = run
        return self._median(timed), 1e3 * statistics.median(launches)

    def _extra_memory(self, run: Callable[[], list[Tensor]], *, kept: int) -> int | None:
        if not self.on_gpu:
            return None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - kept

    def _decode(self, token: Call) -> float:
        if not self.on_gpu:
            return self._median(token.forward)
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        copies = min(MOST_COPIES, 1 + 2 * cache // _bytes(token.tensors.values()))
        calls = [token, *(token.fresh() for _ in range(copies - 1))]
        return self._median(_captured([call.forward for call in calls]).replay) / copies


def _captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def bench(
    rule: UpdateRule,
    *,
    shape: str | None = None,
    dtype: str | None = None,
    lengths: str | None = None,
    against: str | None = None,
    out: Path | None = None,
) -> Report:
    """Times one rule as `platform rule bench` does, with options as they are typed there.

    shape, dtype: for None, what the figures of the papers are at on a GPU, and something small on a CPU. out: a folder
    for NAME.json and, with lengths, NAME.png. Raises `InputError` for options that are wrong.
    """
    gpu = torch.cuda.is_available()
    one = Shape.parse(shape) if shape else GPU_SHAPE if gpu else CPU_SHAPE
    shapes = [one.at(length) for length in whole_numbers(lengths, where="--lengths")] if lengths else [one]
    peers = [name.strip() for name in against.split(",")] if against else []
    for name in peers:
        installed(name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run = Bench(dtype or ("bf16" if gpu else "fp32"))
    if not gpu:
        print("no GPU: the CPU says nothing about the kernels; chunked and recurrent are timed", file=sys.stderr)
    for at in shapes:
        run.add(rule, at, against=peers)
    if out is not None:
        (out / f"{rule.name}.json").write_text(run.report.to_json() + "\n", encoding="utf-8")
        if lengths:
            run.report.plot(out / f"{rule.name}.png")
    return run.report


def _ours(rule: UpdateRule, x: Inputs, now: Inputs, backend: Backend) -> Contestant:
    """Kernels are called by name once, which refuses what they do not take, and then as users call them, by `auto`:
    it takes the same ones, and does not wait for the device to tell whether a state grows.
    """

    def call(x: Inputs) -> Call:
        chosen = backend

        def run(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> tuple[Tensor, State]:
            nonlocal chosen
            states = tuple(rest.pop(name) for name in list(rest) if name.startswith("state"))
            found = scan(rule, q, k, v, rest, state=states or None, backend=chosen)
            if chosen == "triton" and q.is_cuda:
                chosen = "auto"
            return found

        return Call(run, x.named())

    return Contestant(backend, call(x), call(now))


def flops(rule: UpdateRule, shape: Shape) -> float | None:
    """Of the products of a rule's chunked algorithm, forward, with chunks of 64.

    A rule outside the algebra is counted on its pure torch form at two lengths, for a cost that is linear in T or
    quadratic; None where that has no products that PyTorch counts.
    """
    tokens, transition = shape.batch * shape.length * shape.heads, rule.transition
    k, v = shape.key_dim, shape.value_dim
    if transition is None:
        one, two = (_counted(rule, length, k, v) for length in (DRAWN, 2 * DRAWN))
        squared = (two - 2 * one) / (2 * DRAWN**2)
        return tokens * (one / DRAWN + squared * (shape.length - DRAWN)) or None
    # Of each token of a chunk: r k^T, that by what is written, and r S; then k^T by what is written.
    read, write = 2 * (CHUNK * k + CHUNK * v + k * v), 2 * k * v
    # As a read, with the inverse; where free there are two products more of each kind, as a is beside k.
    erase = {"none": 0.0, "tied": read + 2 / 3 * CHUNK**2, "free": 3 * read - 2 * k * v + 2 / 3 * CHUNK**2}
    scanned = read + write + erase[transition.low_rank]
    # The first state also reads what it predicts.
    return tokens * transition.steps * (2 * scanned + read if rule.second_state else scanned)


@functools.cache
def _counted(rule: UpdateRule, length: int, key_dim: int, value_dim: int) -> int:
    x = draw(rule, batch=1, length=length, heads=1, key_dim=key_dim, value_dim=value_dim).map(Tensor.float)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        scan(rule, x.q, x.k, x.v, x.gates, backend="chunked", chunk_size=CHUNK)
    return int(counter.get_total_flops())


def attention_flops(shape: Shape) -> float:
    """Of causal attention, forward."""
    return shape.batch * shape.heads * shape.length**2 * (shape.key_dim + shape.value_dim)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("deltalab", "torch", "triton", "fla-core", "flash-qla", "tilelang"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
