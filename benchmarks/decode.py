"""Measures how fast models write text by `generate` of transformers: tokens a second, with and without CUDA graphs.

    export PYTHONPATH=platform:plugins
    python3 benchmarks/decode.py --out benchmarks/decode_h200.json --model comba --model gated_deltanet --fla
    python3 benchmarks/decode.py --size toy --model comba --new 8                     # on a CPU, without graphs

The model is a deltalab model in the class that `deltalab export` writes, in bf16, with fp32 for what gates learn. It
reads a prompt and writes tokens by greedy decoding. The time of a token is that of `generate` with `--new` tokens, less
that with one token, and the smallest of three counts. With --fla, FLA's model with the same weights stands beside it,
converted as `deltalab export --to fla` does. Its kernels take their first configurations, since tuning takes minutes;
`text` holds the first tokens that a model wrote after the first prompt.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, int]] = {
    "340M": {"vocab_size": 32000, "d_model": 1024, "layers": 24, "heads": 8},
    "toy": {"vocab_size": 64, "d_model": 32, "layers": 2, "heads": 2},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ours(rule: str, sizes: dict[str, int]) -> Any:
    """Makes a deltalab model in the class for transformers, with random weights."""
    import deltalab
    from deltalab.export.modeling_deltalab import DeltaLabConfig, DeltaLabForCausalLM
    from deltalab.models.spec import ModelSpec
    from deltalab.registry import add_plugin

    if not deltalab.list_rules():  # not installed, as on a bare GPU image
        for file in sorted((ROOT / "plugins" / "deltalab_rules").glob("[!_]*.py")):
            add_plugin(file)
    spec = ModelSpec.of({"rule": rule, **sizes})
    config = {f.name: getattr(spec, f.name) for f in fields(ModelSpec)} | {"rule": spec.make_rule().spec()}
    torch.manual_seed(0)
    return DeltaLabForCausalLM(DeltaLabConfig(**config))


def of_fla(model: Any) -> Any:
    """Makes FLA's model with the weights of ours."""
    from fla_logits import imported
    from transformers import AutoConfig, AutoModelForCausalLM

    from deltalab.export.fla import to_fla

    imported()  # registers FLA's classes
    spec = model.config.spec()
    config, weights = to_fla(spec, model.model.state_dict())
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    missing, foreign = theirs.load_state_dict(weights, strict=False)
    if foreign or set(missing) - {"lm_head.weight"} or (missing and not spec.tie_embeddings):
        raise ValueError(f"{[*missing, *foreign][0]}: FLA's model and the converted one differ")
    return theirs


def placed(model: Any) -> Any:
    """Puts a model on the device, in bf16 but for what has to stay in fp32."""
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if "learned" in name or name.endswith(("A_log", "dt_bias")) else torch.bfloat16
        parameter.data = parameter.data.to(DEVICE, dtype if DEVICE == "cuda" else torch.float32)
    return model.to(DEVICE).eval()


def seconds(run: Callable[[], Any], tries: int = 3) -> float:
    """The smallest time of some calls."""
    times = []
    for _ in range(tries):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def measured(model: Any, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """Times a model's `generate`."""
    drawn = torch.randint(model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
    tokens = drawn.to(DEVICE)
    mask = torch.ones_like(tokens)

    def generate(count: int) -> Any:
        how = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
        return model.generate(tokens, attention_mask=mask, use_cache=True, **how)

    began = time.perf_counter()
    written = generate(new)
    first = time.perf_counter() - began
    assert written.shape == (batch, prompt + new)
    each = (seconds(lambda: generate(new)) - seconds(lambda: generate(1))) / (new - 1)
    return {
        "ms_a_token": each * 1e3, "tokens_per_second": batch / each, "first_s": first,
        "text": written[0, prompt : prompt + 16].tolist(),
    }  # fmt: skip


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each model, way and batch."""
    for rule in options.model:
        model = placed(ours(rule, SIZES[options.size]))
        graphs = model.token_graphs
        contestants: list[tuple[str, Any, Any]] = [
            ("deltalab", model, graphs),
            ("deltalab without graphs", model, None),
        ]
        if options.fla:
            try:
                contestants.append(("FLA", placed(of_fla(model)), None))
            except Exception as error:  # FLA may lack the rule, or refuse its settings
                yield {"rule": rule, "by": "FLA", "error": " ".join(str(error).split())[:300]}
        count = sum(p.numel() for p in model.parameters())
        for batch in options.batch:
            for by, contestant, own in contestants:
                if by != "FLA":
                    contestant.token_graphs = own
                row = {
                    "rule": rule, "by": by, "size": options.size, "parameters": count, "batch": batch,
                    "prompt": options.prompt, "new": options.new,
                }  # fmt: skip
                try:
                    row |= measured(contestant, batch, options.prompt, options.new)
                except Exception as error:  # a peer may fail in any way
                    row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                if by == "deltalab" and graphs is not None:
                    row["graph"] = graphs.graph is not None
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="a rule")
    parser.add_argument("--size", choices=SIZES, default="340M")
    parser.add_argument("--batch", action="append", type=int, help="1 and 64 by default")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=129)
    parser.add_argument("--fla", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.batch = options.batch or [1, 64]
    found: dict[str, Any] = {"about": about(), "rows": []}
    for row in rows(options):
        found["rows"].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=2) + "\n")


def about() -> dict[str, str]:
    """What the figures were measured with."""
    found = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", "date": time.strftime("%Y-%m-%d")}
    for package in ("torch", "triton", "transformers", "flash-linear-attention"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
