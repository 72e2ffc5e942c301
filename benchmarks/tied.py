"""Whether recall is learned as well with the bounded factor of tied logits (docs/decisions/111).

    PYTHONPATH=platform:plugins python3 benchmarks/tied.py --seconds 150                  # on a GPU
    python3 benchmarks/tied.py --small                                                    # tiny, where there is none

Trains MQAR with tied embeddings at several widths, each rate with both factors and the same six seeds: `before` is
d ** -0.5 at every width, `after` is 8 / d above width 64. Prints the loss of the untrained model, the mean accuracy on
the validation split over the training, and the mean and least accuracy on the test split.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean

import torch

import deltalab
from deltalab.models import spec as specs
from deltalab.models.spec import ModelSpec
from deltalab.tasks import IGNORE
from deltalab.training.train import TrainSpec, train

SEEDS = range(6)
FACTORS = {"before": 2**62, "after": specs.TIED_WIDTH}
"""The width up to which the factor is d ** -0.5."""


@contextmanager
def factor(name: str) -> Iterator[None]:
    kept = specs.TIED_WIDTH
    specs.TIED_WIDTH = FACTORS[name]
    try:
        yield
    finally:
        specs.TIED_WIDTH = kept


def first_loss(task: deltalab.tasks.Task, spec: ModelSpec) -> float:
    model, batch = deltalab.build_model(spec), task.batch("train", size=8, seed=0, step=0)
    with torch.no_grad():
        logits = model(batch.inputs)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="start no training that would end after these")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    began, longest = time.monotonic(), 0.0
    task = deltalab.get_task("mqar", length=64, pairs=8, vocab_size=8192)
    grid, steps, batch = [(128, 3e-3), (512, 1e-3), (128, 1e-3), (256, 2e-3)], 3000, 256
    if args.small:
        task, grid, steps, batch = deltalab.get_task("mqar", length=16, pairs=2, vocab_size=64), [(128, 1e-2)], 20, 8
    print("width  rate    factor  first loss  test mean   least  validation over the training", flush=True)
    for width, rate in grid:
        spec = ModelSpec.of({"rule": "comba", "vocab_size": task.vocab_size, "d_model": width, "heads": width // 64})
        how = TrainSpec(steps=steps, batch_size=batch, lr=rate, evaluations=10)
        for name in FACTORS:
            if time.monotonic() - began + 1.2 * longest > args.seconds:
                print("no time is left for more")
                return
            started = time.monotonic()
            with factor(name):
                first = first_loss(task, spec)
                runs = train(task, spec, how, list(SEEDS), test=True).runs
            longest = max(longest, time.monotonic() - started)
            scores = [run.final("test", task.metric) for run in runs]
            curves = [
                [value for split, metric, _, value in run.metrics if (split, metric) == ("validation", task.metric)]
                for run in runs
            ]
            curve = " ".join(f"{mean(values):.3f}" for values in zip(*curves, strict=True))
            print(f"{width:5d}  {rate:.0e}  {name:6s}  {first:10.2f}  {mean(scores):9.4f}  {min(scores):6.4f}  {curve}")
            print(f"       test by seed: {' '.join(f'{score:.4f}' for score in scores)}", flush=True)


if __name__ == "__main__":
    main()
