"""Measures how fast whole language models train: tokens a second, share of the peak, memory, time to the first step.

    export PYTHONPATH=platform:plugins
    python3 benchmarks/pretrain.py --out out --model ours:comba --shape 8x2048 --shape 8x4096
    python3 benchmarks/pretrain.py --out out --model ours:comba --model fla:comba --model export:FOLDER --shape 8x2048
    torchrun --nproc-per-node 4 benchmarks/pretrain.py --out out --model ours:comba --shape 8x4096   # a GPU each
    torchrun --nproc-per-node 2 benchmarks/pretrain.py --out out --model ours:comba --shape 2x65536 --context
    python3 benchmarks/pretrain.py --out out --model ours:comba --size toy --shape 2x64              # on a CPU

Models (--model, repeatable):

- ours:RULE: a deltalab `Model` with any rule; ours:transformer is softmax attention (SDPA) with RoPE and SwiGLU.
- export:FOLDER: a folder of `deltalab export`, loaded by transformers without deltalab.
- fla:comba, fla:gated_deltanet: models of flash-linear-attention with the same sizes and its chunked linear
  cross-entropy.

A step is forward, backward, clipping to norm 1 and fused AdamW on random tokens. The precisions (--precision) are:

- fsdp (default): fp32 weights and optimizer, FSDP2 (also on one GPU) with bf16 parameters and fp32 reduction, as
  torchtitan trains.
- bf16: weights, gradients and optimizer in bf16, as in a plain loop.
- autocast: fp32 weights.

The share of the peak is 6 N tokens/s over the dense bf16 rate of the GPU, with N the number of all parameters. Memory
is the allocator's peak. With --context, all GPUs share each sequence, and a shape is that of all together. The time to
the first step counts from the start of the process, with an empty cache of Triton. Each model has a process of its own,
which --limit ends after so many seconds. --graphs and --step-graph replay CUDA graphs. OUT/pretrain.json gets a row
after each shape.
"""

import argparse
import gc
import importlib.abc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

SIZES: dict[str, dict[str, int]] = {
    "394M": {"vocab_size": 32000, "d_model": 1024, "layers": 24, "heads": 8},
    "1.3B": {"vocab_size": 32000, "d_model": 2048, "layers": 21, "heads": 16},
    "toy": {"vocab_size": 64, "d_model": 32, "layers": 2, "heads": 2},
}
TRANSFORMER = {"rule": "attention", "rope": True, "conv": 0, "output_norm": False, "output_gate": False}
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations a second, by a part of the GPU's name."""

KINDS = {
    "products": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitK"),
    "flash attention": ("flash_", "fmha", "cudnn"),
    "norm": ("norm",),
    "SwiGLU": ("swiglu",),
    "loss": ("row_kernel", "cross_entropy", "SoftMax"),
    "optimizer and clipping": ("adam", "multi_tensor", "lpnorm"),
    "embedding": ("lookup_kernel", "ends_kernel", "sum_kernel", "embedding", "radix", "RadixSort"),
    "communication and its copies": ("nccl", "split_with_sizes", "chunk_cat"),
    "concatenation": ("CatArray",),
    "elementwise": ("elementwise", "reduce_kernel"),
    "copies": ("Memcpy", "Memset"),
    "convolution": ("convolve", "causal_conv", "forward", "backward"),
}
"""The kinds of kernels, each with parts of the kernels' names. The first kind that matches counts, and a kernel of no
kind is the mixer's."""


def age() -> float:
    """Returns the seconds since this process began."""
    began = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class Contestant:
    """A model with its loss.

    Attributes:
        model: The model.
        blocks: The blocks of the model, which FSDP and checkpointing wrap one by one.
        vocabulary: The number of tokens that the model knows.
        loss: Computes the mean cross-entropy of tokens [B, T] and targets [B, T].
        start: Draws the parameters of a model that was made without memory; None for a model that has parameters.
        context: The processes that share each sequence; None if each has its own.
    """

    def __init__(
        self,
        model: Any,
        blocks: Any,
        vocabulary: int,
        loss: Callable[[Any, Any], Any],
        start: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.blocks, self.vocabulary, self.loss, self.start = model, blocks, vocabulary, loss, start
        self.context: Any = None


def ours(rule: str, sizes: dict[str, int]) -> Contestant:
    """Makes a model of deltalab with a rule."""
    import torch

    import deltalab
    from deltalab.models.layer import initialize
    from deltalab.models.model import Model
    from deltalab.models.spec import ModelSpec
    from deltalab.registry import add_plugin

    if not deltalab.list_rules():  # not installed, as on a bare GPU image
        for file in sorted((ROOT / "plugins" / "deltalab_rules").glob("[!_]*.py")):
            add_plugin(file)
    spec = TRANSFORMER if rule == "transformer" else {"rule": rule}
    with torch.device("meta"):
        model = Model(ModelSpec.of({**spec, **sizes, "tie_embeddings": False}))

    def loss(tokens: Any, targets: Any) -> Any:
        if contestant.context is None:
            return model.loss(tokens, targets)
        part = contestant.context.part(tokens)
        return model.loss(part.cut(tokens), part.cut(targets), part=part)

    contestant = Contestant(model, model.blocks, sizes["vocab_size"], loss, lambda: initialize(model, 0))
    return contestant


class NotInstalled(importlib.abc.MetaPathFinder):
    """A finder that makes the import of a package fail, as if the package were not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def exported(folder: str, sizes: dict[str, int]) -> Contestant:
    """Makes the model of an exported folder by its own code and configuration, which has its own sizes."""
    sys.meta_path.insert(0, NotInstalled("deltalab"))
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    return Contestant(model, model.model.blocks, config.vocab_size, _of_transformers(model))


def fla(name: str, sizes: dict[str, int]) -> Contestant:
    """Makes a model of flash-linear-attention."""
    import fla.models as models
    from transformers import AutoModelForCausalLM

    width, heads = sizes["d_model"], sizes["heads"]
    shared = {
        "hidden_size": width, "num_heads": heads, "num_hidden_layers": sizes["layers"],
        "vocab_size": sizes["vocab_size"], "intermediate_size": -(-8 * width // 24) * 8, "tie_word_embeddings": False,
        "fuse_cross_entropy": False, "fuse_linear_cross_entropy": True, "use_cache": False,
    }  # fmt: skip
    recurrent = {"expand_v": 1.0, "head_dim": width // heads}
    config = {
        "comba": lambda: models.CombaConfig(**shared, **recurrent),
        "gated_deltanet": lambda: models.GatedDeltaNetConfig(**shared, **recurrent),
    }[name]()
    model = AutoModelForCausalLM.from_config(config)
    return Contestant(model, model.model.layers, sizes["vocab_size"], _of_transformers(model))


def _of_transformers(model: Any) -> Callable[[Any, Any], Any]:
    """The loss of a model of transformers, which shifts its labels: targets are moved one place to the right."""

    def loss(tokens: Any, targets: Any) -> Any:
        labels = tokens.new_full(tokens.shape, -100)
        labels[:, 1:] = targets[:, :-1]
        return model(input_ids=tokens, labels=labels, use_cache=False).loss

    return loss


MAKERS = {"ours": ours, "export": exported, "fla": fla}


def prepared(
    contestant: Contestant, device: Any, precision: str, checkpoint: bool, compiled: bool, keep: bool, together: int
) -> Contestant:
    """Puts a model on its device in a precision, and with `fsdp` shards it over all processes.

    Args:
        contestant: The model, which is changed in place.
        device: The device.
        precision: `fsdp`, `bf16` or `autocast`.
        checkpoint: Whether backward computes the activations of each block again.
        compiled: Whether each block is compiled.
        keep: Whether gathered weights stay from a block's forward to its backward.
        together: Blocks whose weights are gathered, and whose gradients are reduced, by one call.
    """
    import torch

    model, blocks = contestant.model, contestant.blocks
    if precision == "bf16":
        model.to(torch.bfloat16)
    if contestant.start is None:
        model.to(device)
    else:
        model.to_empty(device=device)
        contestant.start()
    model.train()
    if checkpoint:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for i, block in enumerate(blocks):
            blocks[i] = checkpoint_wrapper(block)
    if compiled:
        for block in blocks:
            block.compile()
    if precision == "fsdp":
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # Blocks that gather weights one by one would keep all processes of a sequence at the same block.
        for at in range(0, len(blocks), together) if contestant.context is None else ():
            part = list(blocks[at : at + together])
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        if hasattr(model, "loss"):
            register_fsdp_forward_method(model, "loss")
    return contestant


def rows(options: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Trains a model at each shape, in this process, and yields a row for each."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    world = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if options.precision == "fsdp":
        alone = {} if world > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if on_gpu else "gloo", **alone)
    kind, _, detail = name.partition(":")
    torch.manual_seed(0)
    contestant = MAKERS[kind](detail, SIZES[options.size])
    count = sum(p.numel() for p in contestant.model.parameters())
    if options.context:
        from deltalab.models.parts.context import Context

        contestant.context = Context(world)
    contestant = prepared(
        contestant, device, options.precision, options.checkpoint, options.compile, options.keep, options.together
    )
    matrices = [p for p in contestant.model.parameters() if p.dim() > 1]
    others = [p for p in contestant.model.parameters() if p.dim() <= 1]
    capturable = {"capturable": True} if options.step_graph else {}
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-4, betas=(0.9, 0.95), fused=True, **capturable,
    )  # fmt: skip
    gpu = torch.cuda.get_device_name() if on_gpu else "CPU"
    peak = next((rate for part, rate in PEAKS.items() if part in gpu), None)
    first: float | None = None
    for shape in options.shape:
        batch, length = map(int, shape.split("x"))
        row = {
            "model": name if kind != "export" else "export", "size": options.size, "shape": shape, "gpus": world,
            "context": options.context,
            "precision": options.precision, "checkpoint": options.checkpoint, "compiled": options.compile,
            "keep": options.keep, "together": options.together, "graphs": options.graphs,
            "step_graph": options.step_graph, "parameters": count, "device": gpu, "torch": torch.__version__,
        }  # fmt: skip

        def step(batch: int = batch, length: int = length) -> Any:
            tokens = torch.randint(contestant.vocabulary, (batch, length + 1), device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "autocast"):
                loss = contestant.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(contestant.model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if options.graphs:
            getattr(contestant.model, "model", contestant.model).graph_blocks()
        try:
            loss = float(step())
            first = first or age()
            for _ in range(options.warm):
                step()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            timed_step = _captured(step) if options.step_graph else step
            seconds = min(_timed(timed_step, options.steps, device) for _ in range(3))
        except torch.OutOfMemoryError as error:
            yield {**row, "error": str(error).split(". ")[1]}
            optimizer.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
            continue
        rate = batch * length * (1 if options.context else world) / seconds
        if options.context:
            mean = torch.tensor(loss, device=device) / world
            dist.all_reduce(mean)
            loss = float(mean)
        row |= {"first_loss": loss, "ms": seconds * 1e3, "tokens_per_second": rate}
        if options.cold:
            row["first_step_s"] = first
        if peak:
            row["share_of_peak"] = 6 * count * rate / (peak * world)
        if on_gpu:
            # The memory of CUDA graphs is reserved, and not counted as allocated.
            graphs = options.graphs or options.step_graph
            row["peak_gib"] = (torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated)() / 2**30
        if options.profile:
            row |= profiled(step, device)
        yield row
    if dist.is_initialized():
        dist.destroy_process_group()


def _captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as one CUDA graph. Gradients must be None before the capture, so that they lie in the graph's memory."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _timed(step: Callable[[], Any], steps: int, device: Any) -> float:
    """The mean seconds of a step."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def profiled(step: Callable[[], Any], device: Any, steps: int = 2) -> dict[str, Any]:
    """Measures the milliseconds of a step in each kernel of the device and in each kind, and the launches of a step."""
    import torch

    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device.type == "cuda" else activity.CPU]) as profiler:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    taken: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiler.events():
        if device.type == "cuda" and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        microseconds = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        taken[event.name] += microseconds / 1e3
        launches[event.name] += 1
    kinds: Counter[str] = Counter()
    for name, ms in taken.items():
        kinds[kind_of(name)] += ms / steps
    kernels = [
        {"kernel": name[:140], "ms": ms / steps, "launches": launches[name] / steps}
        for name, ms in taken.most_common(40)
    ]
    return {"device_ms": sum(kinds.values()), "kinds": dict(kinds.most_common()), "kernels": kernels}


def kind_of(kernel: str) -> str:
    """Returns the entry of `KINDS` for a kernel's name.

    >>> kind_of("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"), kind_of("output_kernel")
    ('products', 'mixer')
    """
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), "mixer")


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line of text, followed by lines of its profile if there is one."""
    text = f"{row['model']:20} {row['size']} {row['shape']:>8} {row['gpus']} GPU {row['precision']:8}"
    text += (
        " sharing each sequence" * row["context"]
        + " checkpointed" * row["checkpoint"]
        + " compiled" * row["compiled"]
        + " a step as one graph" * row["step_graph"]
        + " blocks in graphs" * row["graphs"]
    )
    if "error" in row:
        return f"{text} {row['error']}"
    text += f" {row['ms']:8.1f} ms {row['tokens_per_second'] / 1e3:8.1f} thousand tokens/s"
    if "share_of_peak" in row:
        text += f" {row['share_of_peak']:.3f} of peak"
    if "peak_gib" in row:
        text += f" {row['peak_gib']:.1f} GiB"
    if "first_step_s" in row:
        text += f" first step {row['first_step_s']:.1f} s"
    text += f", loss {row['first_loss']:.3f}"
    if "kinds" in row:
        text += f"\n  device {row['device_ms']:.1f} ms a step: "
        text += ", ".join(f"{kind} {ms:.1f}" for kind, ms in row["kinds"].items())
        for kernel in row["kernels"]:
            text += f"\n  {kernel['ms']:8.2f} ms {kernel['launches']:6.0f} x {kernel['kernel']}"
    return text


def measure(options: argparse.Namespace, name: str) -> None:
    """Trains a model, and appends its rows to OUT/pretrain.json."""
    file = options.out / "pretrain.json"
    for row in rows(options, name):
        if int(os.environ.get("RANK", 0)):
            continue
        print(line(row), flush=True)
        earlier = json.loads(file.read_text())["rows"] if file.exists() else []
        file.write_text(json.dumps({"rows": [*earlier, row]}, indent=1))


def apart(options: argparse.Namespace, name: str) -> None:
    """Runs `measure` in a process of its own with an empty cache of Triton, and ends it after --limit seconds."""
    environment = dict(os.environ)
    command = [
        sys.executable,
        __file__,
        "--here",
        "--cold",
        "--model",
        name,
        "--out",
        str(options.out),
        "--size",
        options.size,
    ]
    command += [part for shape in options.shape for part in ("--shape", shape)]
    command += ["--precision", options.precision, "--steps", str(options.steps), "--warm", str(options.warm)]
    flags = ("checkpoint", "compile", "graphs", "step_graph", "profile")
    command += [f"--{flag.replace('_', '-')}" for flag in flags if getattr(options, flag)]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        try:
            code = subprocess.run(command, env=environment, timeout=options.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: ended after {options.limit:g} s", flush=True)
        else:
            if code:
                print(f"{name}: exit {code}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", action="append", required=True, metavar="KIND:NAME")
    parser.add_argument("--size", choices=SIZES, default="394M")
    parser.add_argument("--shape", action="append", required=True, metavar="SEQUENCESxTOKENS")
    parser.add_argument("--precision", choices=("fsdp", "bf16", "autocast"), default="fsdp")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block's activations in the backward")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--keep", action="store_true", help="keep FSDP2's gathered weights until the backward")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="blocks that FSDP2 gathers by one call")
    parser.add_argument("--context", action="store_true", help="all GPUs of torchrun share each sequence (ours, fsdp)")
    parser.add_argument("--graphs", action="store_true", help="each block of ours as CUDA graphs (not with fsdp)")
    parser.add_argument("--step-graph", action="store_true", help="a whole step as one CUDA graph (not with fsdp)")
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes")
    parser.add_argument("--steps", type=int, default=8, help="steps of one timing; the fastest of 3 counts")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--limit", type=float, help="seconds that a model may take")
    parser.add_argument("--here", action="store_true", help="in this process; the first step is not timed")
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # transformers looks for a package `kernels`, and must not find benchmarks/kernels.py.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    for name in options.model:
        if name.partition(":")[0] not in MAKERS:
            parser.error(f"--model {name}: must start with one of {', '.join(MAKERS)}")
        if options.context and (not name.startswith("ours:") or options.precision != "fsdp"):
            parser.error("--context is for models of ours with precision fsdp")
    if options.context and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("--context needs several processes: start it by torchrun")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.model:
        (measure if options.here or "RANK" in os.environ else apart)(options, name)


if __name__ == "__main__":
    main()
