"""A rule run on given inputs with its gradients, and how far apart two results are."""

import torch

import deltalab
from deltalab.authoring.inputs import Inputs, parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def error(result: torch.Tensor, right: torch.Tensor) -> float:
    """The norm of the difference, relative to that of the right tensor."""
    result, right = result.detach().double(), right.detach().double().to(result.device)
    return float((result - right).norm() / right.norm().clamp_min(1e-12))


def cosines(x: torch.Tensor) -> torch.Tensor:
    """Upstream gradients that are exact in bf16, and so the same in every dtype."""
    return torch.arange(x.numel(), dtype=torch.float64, device=x.device).cos().bfloat16().double().view_as(x)


def run(rule, x: Inputs, backend: str, **more):
    """Scans, and returns o, the last state and the gradient of every input that requires one, by name."""
    o, state = deltalab.scan(rule, x.q, x.k, x.v, x.gates, state=x.state, backend=backend, **more)
    results = {"o": o, **{f"last {name}": part for name, part in parts(state).items()}}
    total = sum((result.double() * cosines(result)).sum() for result in results.values())
    leaves = {name: part for name, part in x.named().items() if part.requires_grad}
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {**results, **{f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}}
