"""Measures the time and memory that a rule and its peers take, and their share of what the hardware can do.

Time: The median of many calls, with the L2 cache cleared before each. Forward runs without gradients. Forward and
    backward computes the gradients of every input. On a GPU a call is replayed from a CUDA graph, which gives the time
    of the device. Launch is the time that Python takes to launch the call, which bounds a call that is not captured.
    Decode is a call on one token with a state, on so many copies of its tensors that they exceed the L2 cache.
First call: Forward and backward with compilation and autotuning. Caches start empty, so only the first shape counts.
Extra memory: The peak during a call, less the memory before it and the gradients that it returns. The output o counts.
Shares: The share of the bandwidth of a large copy, and of the rate of a large matrix product. Both rates are measured
    in the same run.
    `flops` counts the bytes and the operations.
"""

import gc
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltalab import progress
from deltalab.authoring.inputs import Inputs, draw, moves
from deltalab.authoring.kernel_line import kernel_line
from deltalab.bench.flops import CHUNK, decode_bytes, flops, forward_bytes, size, training_bytes
from deltalab.bench.peers import Call, Contestant, Peer, installed, peer
from deltalab.bench.recurrence_alone import alone
from deltalab.bench.results import CPU_SHAPE, GPU_SHAPE, Figures, Results, Shape, whole_numbers
from deltalab.errors import unknown
from deltalab.models.graphs.capture import captured
from deltalab.ops.recurrence import Backend
from deltalab.ops.scan import scan
from deltalab.rule import State, UpdateRule

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DRAWN = 256
"""The number of tokens that are drawn at random. Longer sequences repeat these tokens."""
MOST_COPIES = 64
CPU_SECONDS = 0.3
"""The time of each measurement on a CPU."""


class Bench:
    """One run on this machine's GPU or, without a GPU, on its CPU: `add` times a rule, `results` holds the figures.

    The environment variables that name the cache, TRITON_CACHE_DIR among them, are set only while `add` runs.

    Args:
        dtype: "bf16", "fp16" or "fp32".
        after: Called with `results` after each contestant.
        cache: A folder that keeps compiled kernels and autotuning results for later runs, which then have no first call
            to time; None for a new folder that only this run uses.

    Raises:
        InputError: The dtype is unknown.
    """

    def __init__(
        self,
        dtype: str = "bf16",
        after: Callable[["Results"], None] = lambda _: None,
        cache: Path | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES, where="--dtype")
        self._own = None if cache else tempfile.TemporaryDirectory(prefix="deltalab-bench-")
        folder = self._own.name if self._own else str(cache)
        self._variables = {"TRITON_CACHE_DIR": folder, "TILELANG_CACHE_DIR": folder}
        if cache:
            self._variables["TRITON_CACHE_AUTOTUNING"] = "1"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype, self.after = DTYPES[dtype], after
        name = torch.cuda.get_device_name() if self.on_gpu else f"CPU, {torch.get_num_threads()} threads"
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.results = Results(name, dtype, self._ceilings(), _versions(), date)

    @property
    def on_gpu(self) -> bool:
        """Whether the run is on a GPU."""
        return self.device.type == "cuda"

    def add(
        self,
        rule: UpdateRule,
        shape: Shape,
        *,
        backends: Sequence[Backend] | None = None,
        against: Iterable[str | Peer] = (),
        label: str = "",
        parts: bool = False,
    ) -> list[Figures]:
        """Times a rule at one shape, by our backends and then by peers.

        A call that fails, for lack of memory for example, has the reason in its figures.

        Args:
            rule: The rule with its settings.
            shape: The sizes of the call.
            backends: Our backends to time; None for those of this device.
            against: The peers to time.
            label: The name that the results show instead of the rule's name.
            parts: Whether to time the rule's recurrence alone, too, by the first of the backends.

        Returns:
            The figures of each contestant.

        Raises:
            InputError: A peer is not installed or has no op for the rule.
        """
        default_backends: Sequence[Backend] = ("triton", "chunked") if self.on_gpu else ("chunked", "recurrent")
        x, now = self._inputs(rule, shape)
        with _environment(self._variables):
            backends = backends or default_backends
            contestants = [_ours(rule, x, now, backend) for backend in backends]
            if parts and rule.transition is not None:
                contestants.append(alone(rule, x, backends[0]))
            contestants += [
                (peer(contestant) if isinstance(contestant, str) else contestant)(rule, x, now)
                for contestant in against
            ]
            reference, rows = None, []
            for contestant in contestants:
                figures = self._contest(
                    contestant, flops(rule, shape) if contestant.flops is None else contestant.flops
                )
                o = figures.pop("o", None)
                if contestant.same and o is not None:
                    if reference is not None:
                        figures["error"] = float((o.float() - reference.float()).norm() / reference.float().norm())
                    reference = o if reference is None else reference
                rows.append(Figures(label or rule.name, contestant.name, str(shape), **figures))
                self.results.figures.append(rows[-1])
                self.after(self.results)
        return rows

    def _contest(self, contestant: Contestant, operations: float | None) -> dict[str, Any]:
        """Returns the fields of `Figures` that could be measured, and o.

        `operations` is the number of operations of a forward call.
        """
        call, token, ceilings = contestant.sequence, contestant.token, self.results.ceilings
        both, inputs = call.backward(), call.tensors.values()
        fields: dict[str, Any] = {}
        why: list[str] = []

        def first_call() -> None:
            seconds = self._seconds(both)
            if self._own:
                fields["first_call"] = seconds
            fields["o"] = call.forward()

        def time_forward() -> None:
            fields["forward_memory"] = self._extra_memory(lambda: [call.forward()], kept=0)
            fields["forward"], fields["forward_launch"] = self._times(call.forward, why)
            fields["forward_copy"] = copied(forward_bytes(inputs, fields["o"]), fields["forward"])
            fields["forward_matmul"] = multiplied(1, fields["forward"])

        def time_both() -> None:
            fields["both_memory"] = self._extra_memory(both, kept=size(inputs))
            fields["both"], fields["both_launch"] = self._times(both, why)
            fields["both_copy"] = copied(training_bytes(inputs, fields["o"]), fields["both"])
            fields["both_matmul"] = multiplied(3, fields["both"])  # backward takes twice the products of forward

        def time_decode() -> None:
            assert token is not None
            fields["decode"] = self._decode(token)
            fields["decode_copy"] = copied(decode_bytes(token.tensors), fields["decode"])

        def copied(moved: int, ms: float) -> float:
            return moved / ceilings["copy"] / ms * 1e3

        def multiplied(times: int, ms: float) -> float | None:
            return None if operations is None else times * operations / ceilings["matmul"] / ms * 1e3

        for measure in (first_call, time_forward, time_both, *([time_decode] if token else [])):
            try:
                measure()
            except torch.OutOfMemoryError:
                why.append(f"{measure.__name__}: out of memory")
            except Exception as error:  # a peer may fail in any way, and a backend may not take this rule
                reason = " ".join(str(error).split())[:300]
                why.append(f"{measure.__name__}: {type(error).__name__}: {reason}")
            if "o" not in fields:
                break
        return {**fields, "why": "; ".join(why)}

    def _inputs(self, rule: UpdateRule, shape: Shape) -> tuple[Inputs, Inputs]:
        """Returns the inputs of a sequence, and those of one token with a state.

        q, k, v and gates per channel are in the run's dtype, other gates in fp32.
        """
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
        # Run some tokens first, so that the token to decode continues from a realistic state.
        prefix = x.span(0, min(shape.length, CHUNK))
        with torch.no_grad():
            _, state = scan(rule, prefix.q, prefix.k, prefix.v, prefix.gates, backend="chunked")
        return x, x.span(0, 1, state).map(lambda part: part.clone())

    def _ceilings(self) -> dict[str, float]:
        """Measures the rates of a large copy and of a large matrix product."""
        size, width = (2**30, 8192) if self.on_gpu else (2**26, 1024)
        source, target = torch.randint(256, (2, size), dtype=torch.uint8, device=self.device)
        copy = 2 * size / self._median(lambda: target.copy_(source)) * 1e3
        a, b = torch.randn(2, width, width, device=self.device).to(self.dtype)
        return {"copy": copy, "matmul": 2 * width**3 / self._median(lambda: a @ b) * 1e3}

    def _synchronize(self) -> None:
        """Waits until the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def _seconds(self, run: Callable[[], Any]) -> float:
        """Returns the time of one call, in s."""
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - start

    def _median(self, run: Callable[[], Any]) -> float:
        """Returns the median time of a call in ms, after a warm-up."""
        if self.on_gpu:
            from triton.testing import do_bench

            return float(do_bench(run, warmup=10, rep=50, return_mode="median"))
        once = self._seconds(run)
        return 1e3 * statistics.median(self._seconds(run) for _ in range(max(3, min(50, int(CPU_SECONDS / once)))))

    def _times(self, run: Callable[[], Any], why: list[str]) -> tuple[float, float | None]:
        """Returns the time of a call in ms and, on a GPU, the time to launch it."""
        if not self.on_gpu:
            return self._median(run), None
        launches = []
        for _ in range(20):
            self._synchronize()
            start = time.perf_counter()
            run()
            launches.append(time.perf_counter() - start)
        try:
            timed = captured(run)
        except RuntimeError as error:
            why.append(f"timed as launched, not captured: {str(error).splitlines()[0]}")
            timed = run
        return self._median(timed), 1e3 * statistics.median(launches)

    def _extra_memory(self, run: Callable[[], list[Tensor]], *, kept: int) -> int | None:
        """Returns the peak memory during a call, less the memory before it and the bytes that it returns, `kept`."""
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
        """Returns the time of a call on one token, in ms."""
        if not self.on_gpu:
            return self._median(token.forward)
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        copies = min(MOST_COPIES, 1 + 2 * cache // size(token.tensors.values()))
        calls = [token, *(token.fresh() for _ in range(copies - 1))]
        return self._median(captured(lambda: [call.forward() for call in calls])) / copies


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, and restores the earlier ones at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def bench(
    rule: UpdateRule,
    *,
    shape: str | None = None,
    dtype: str | None = None,
    lengths: str | None = None,
    against: str | None = None,
    out: Path | None = None,
) -> Results:
    """Times one rule as `deltalab rule bench` does, with options as they are typed there.

    Args:
        rule: The rule with its settings.
        shape: B,T,H,K,V; by default the sizes of the figures in papers on a GPU, and small ones on a CPU.
        dtype: The dtype; by default bf16 on a GPU and fp32 on a CPU.
        lengths: Values of T with commas between them, each timed with as many tokens in all as `shape` has.
        against: Names of peers with commas between them.
        out: A folder for NAME.json and, with lengths, NAME.png.

    Raises:
        InputError: An option is wrong.
    """
    gpu = torch.cuda.is_available()
    base_shape = Shape.parse(shape) if shape else GPU_SHAPE if gpu else CPU_SHAPE
    shapes = (
        [base_shape.at(length) for length in whole_numbers(lengths, where="--lengths")] if lengths else [base_shape]
    )
    peers = [name.strip() for name in against.split(",")] if against else []
    for name in peers:
        installed(name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run = Bench(dtype or ("bf16" if gpu else "fp32"))
    if not gpu:
        kernel = f"the kernel of '{rule.name}'" if rule.brings_kernel else "a kernel"
        progress.note(f"no GPU: times 'chunked' and 'recurrent' on the CPU; timing {kernel} takes a GPU")
        line = kernel_line(rule, key_dim=base_shape.key_dim, value_dim=base_shape.value_dim)
        progress.note(f"{rule.name}: Triton kernels {line}")
    for shape_at in shapes:
        run.add(rule, shape_at, against=peers, parts=True)
    if out is not None:
        (out / f"{rule.name}.json").write_text(run.results.to_json() + "\n", encoding="utf-8")
        if lengths:
            run.results.plot(out / f"{rule.name}.png")
    return run.results


def _ours(rule: UpdateRule, x: Inputs, now: Inputs, backend: Backend) -> Contestant:
    """Makes the contestant of our own backend.

    For kernels on a GPU, the first call uses the backend "triton", which raises for unsupported inputs. Later calls use
    "auto", as users do: it takes the same kernel, and does not wait for the device to check that the state does not
    grow.
    """

    def call(x: Inputs) -> Call:
        current_backend = backend

        def run(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> tuple[Tensor, State]:
            nonlocal current_backend
            states = tuple(rest.pop(name) for name in list(rest) if name.startswith("state"))
            result = scan(rule, q, k, v, rest, state=states or None, backend=current_backend)
            if current_backend == "triton" and q.is_cuda:
                current_backend = "auto"
            return result

        return Call(run, x.named())

    return Contestant(backend, call(x), call(now))


def _versions() -> dict[str, str]:
    """Returns the versions of the software."""
    versions = {"python": platform.python_version()}
    for package in ("deltalab", "torch", "triton", "fla-core", "flash-qla", "tilelang"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
