"""The command as a stranger types it, and a study that takes seconds."""

from collections.abc import Callable
from dataclasses import dataclass

STUDY = """
name: tiny
task: {mqar: {length: 16, pairs: 2, vocab_size: 32}}
base:
  rule: comba
  model: {d_model: 16, layers: 1, heads: 1, mlp: false}
  train: {steps: 4, batch_size: 4, lr: 1e-2, evaluations: 2, eval_batches: 1}
ablate: [d]
tune: {train.lr: {log_uniform: [1e-3, 1e-1]}, trials: 2}
seeds: 2
profiles:
  longer: {base: {train: {steps: 6}}}
"""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


Platform = Callable[..., Said]
