"""A GPU computes what the CPU does in fp64, and trains in bf16. Run with `pytest -m gpu`."""

import pytest
import torch

import deltalab
from deltalab.authoring.inputs import draw
from deltalab.models.spec import ModelSpec
from deltalab.training.train import TrainSpec, train

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _variants():
    for name in deltalab.list_rules():
        for rule in deltalab.get_rule(name).variants():
            yield pytest.param(rule, id=f"{name}: {deltalab.get_rule(name).turned(rule)}")


def _error(actual: torch.Tensor, right: torch.Tensor) -> float:
    return float((actual.double().cpu() - right).norm() / right.norm().clamp_min(1e-12))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", _variants())
def test_chunked_on_the_gpu_is_the_recurrence_in_fp64(rule, dtype):
    if rule.transition is None and dtype != torch.float64:
        pytest.skip("a rule that divides or learns online amplifies rounding: only fp64 is compared")
    length = 150 if rule.transition is not None else 40  # weights that learn online are chaotic over long spans
    x = draw(rule, batch=2, length=length, heads=2, key_dim=32, value_dim=48)
    rounded = x.map(lambda tensor: tensor.to(dtype).double())
    right = rounded.map(lambda tensor: tensor.requires_grad_())
    actual = rounded.map(lambda tensor: tensor.detach().to("cuda", dtype).requires_grad_())
    outputs = []
    for inputs, backend in ((right, "recurrent"), (actual, "chunked")):
        o, _ = deltalab.scan(rule, inputs.q, inputs.k, inputs.v, inputs.gates, backend=backend)
        # Weight the sum: the plain sum over channels that a rule normalizes is always 0.
        weights = torch.arange(o[0].numel(), dtype=torch.float64, device=o.device).cos().view_as(o[0])
        (o.double() * weights).sum().backward()
        outputs.append(o.detach())
    assert _error(outputs[1], outputs[0]) <= TOLERANCE[dtype]
    for name, tensor in actual.named().items():
        wanted = right.named()[name].grad
        assert (tensor.grad is None) == (wanted is None), name
        assert wanted is None or _error(tensor.grad, wanted) <= 2 * TOLERANCE[dtype], name


def test_training_in_bf16_learns_recall():
    task = deltalab.get_task("mqar", length=32, pairs=4, vocab_size=128)
    model = ModelSpec(rule="comba", vocab_size=128, d_model=32, layers=1, heads=2, chunk_size=32)
    result = train(task, model, TrainSpec(steps=400, batch_size=32, lr=2e-2), [1, 2], test=True)
    print(result.hardware, f"{result.tokens_per_second:.0f} tokens/s")
    assert all(run.final("test", "accuracy") > 0.9 for run in result.runs)


def test_a_diverged_run_records_its_step():
    task = deltalab.get_task("mqar", length=16, pairs=2, vocab_size=32)
    model = ModelSpec(rule="comba", vocab_size=32, d_model=16, layers=1, heads=1)
    run = train(task, model, TrainSpec(steps=20, batch_size=8, lr=1e30, clip=0.0), [1]).runs[0]
    assert run.diverged_at is not None
    assert run.diverged_at < 20
