"""A rule run on given inputs with its gradients, and how far apart two results are."""

import torch

import deltalab
from deltalab.authoring.inputs import Inputs, parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    found, right = found.detach().double(), right.detach().double().to(found.device)
    return float((found - right).norm() / right.norm().clamp_min(1e-12))


def cosines(x: torch.Tensor) -> torch.Tensor:
    """Upstream gradients, the same in every dtype: they are exact in bf16."""
    return torch.arange(x.numel(), dtype=torch.float64, device=x.device).cos().bfloat16().double().view_as(x)


def run(rule, x: Inputs, backend: str, **more):
    """o, the last state and the gradient of every input that requires one, by name."""
    o, state = deltalab.scan(rule, x.q, x.k, x.v, x.gates, state=x.state, backend=backend, **more)
    found = {"o": o, **{f"last {name}": part for name, part in parts(state).items()}}
    total = sum((part.double() * cosines(part)).sum() for part in found.values())
    named = {name: part for name, part in x.named().items() if part.requires_grad}
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {**found, **{f"d {name}": grad for name, grad in zip(named, grads, strict=True)}}
