"""Measures of a module what a study relies on: causality, gradients, packing, a start from the seed alone."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltalab.authoring.check import Measurement, Note
from deltalab.models.parts.module_layer import ModuleLayer, cache_argument, decoded
from deltalab.models.start import initialize
from deltalab.own_module import OwnModule

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 128, 129, 200)
"""Lengths around the borders of chunks."""
LONGEST = max(LENGTHS)
PLACES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 199)
"""Tokens that are changed, for causality."""
PROMPTS = (1, 3, 63)
"""The tokens that are read at once before others follow one by one."""
DECODED = 6
"""The tokens that follow one by one."""


class Subject(NamedTuple):
    """A module to check, and where it runs.

    Attributes:
        rule: The module and its arguments.
        of_model: The settings of the model around it.
        device: The CPU, or a GPU for a module that needs one.
        length: The most tokens. A module that is not causal sees so many at all times, the patches of an image.
        trains: Whether checks run it as in training, but without dropout. A module that draws random numbers in
            training all the same is checked as in evaluations.
    """

    rule: OwnModule
    of_model: Mapping[str, float]
    device: str
    length: int = LONGEST
    trains: bool = True

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of tokens that the module must take."""
        return LENGTHS if self.rule.causal else (self.length,)

    def layer(self, seed: int = 0) -> ModuleLayer:
        """Makes the layer, started from a seed, without dropout."""
        layer = ModuleLayer(self.rule, self.of_model)
        initialize(layer, seed)
        layer = layer.to(self.device).train(self.trains)
        for part in layer.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.eval()
        return layer

    @torch.no_grad()
    def draws(self) -> bool:
        """Returns whether calls in training give different numbers with different random numbers."""
        layer, x = self.layer(), self.inputs(16 if self.rule.causal else None)
        first = self.called(layer, x)
        torch.manual_seed(1)
        with torch.autocast(self.device, torch.bfloat16, self.device != "cpu"):
            second: Tensor = layer(x)
        return not torch.equal(first, second.float())

    def inputs(self, length: int | None = None, batch: int = 2, seed: int = 0) -> Tensor:
        """Draws x [B, T, d], with the most tokens if `length` is None."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(batch, length or self.length, int(self.of_model["d_model"]), generator=draw).to(self.device)

    @property
    def exact(self) -> float:
        """The relative error of equal computations in another order: of fp32, or of a GPU's bf16."""
        return 1e-4 if self.device == "cpu" else 3e-2

    def called(self, layer: ModuleLayer, x: Tensor, *more: Tensor) -> Tensor:
        """Calls the layer as training does: in bf16 on a GPU. Two calls draw the same random numbers."""
        torch.manual_seed(0)
        with torch.autocast(self.device, torch.bfloat16, self.device != "cpu"):
            y: Tensor = layer(x, *more)
        return y.float()


def _apart(y: Tensor, want: Tensor) -> float:
    """Returns the largest difference, as a share of the largest value."""
    return float((y - want).abs().max() / want.abs().max().clamp_min(1e-12))


def runs(subject: Subject) -> Iterator[Measurement]:
    """Measures the share of the values that are not finite, at each length."""
    layer = subject.layer()
    for length in subject.lengths:
        y = subject.called(layer, subject.inputs(length))
        yield Measurement(
            float((~y.isfinite()).float().mean()), f"the share of y at {length} tokens that is not finite"
        )


@torch.no_grad()
def causality(subject: Subject) -> Iterator[Measurement]:
    """Measures how far earlier outputs move with a later token."""
    layer, x = subject.layer(), subject.inputs()
    y = subject.called(layer, x)
    for place in PLACES:
        changed = x.clone()
        changed[:, place] += 1
        moved = subject.called(layer, changed)
        yield Measurement(
            _apart(moved[:, :place], y[:, :place]) / subject.exact,
            f"the error of outputs before token {place} after a change of that token, in units of rounding,",
        )


@torch.no_grad()
def prefixes(subject: Subject) -> Iterator[Measurement]:
    """Measures how far the outputs of the first tokens depend on how many tokens there are."""
    layer, x = subject.layer(), subject.inputs()
    y = subject.called(layer, x)
    for length in LENGTHS:
        alone = subject.called(layer, x[:, :length])
        yield Measurement(
            _apart(alone, y[:, :length]) / subject.exact,
            f"the error of {length} tokens alone against the first of {LONGEST}, in units of rounding,",
        )


@torch.no_grad()
def decoding(subject: Subject) -> Iterator[Measurement | Note]:
    """Measures tokens one by one, by the module's own cache, against all tokens at once."""
    layer, x = subject.layer().eval(), subject.inputs()
    name = cache_argument(layer.inner)
    if name is None:
        yield Note("its forward takes no cache, so that each new token reads all tokens again")
        return
    for prompt in PROMPTS:
        stop = prompt + DECODED
        try:
            with torch.autocast(subject.device, torch.bfloat16, subject.device != "cpu"):
                y, _ = decoded(layer.inner, x[:, :stop].split([prompt, *[1] * DECODED], dim=1))
        except Exception as error:  # the argument may mean something else
            yield Note(f"tokens one by one by `{name}` could not be tried: {type(error).__name__}: {error!s:.200}")
            return
        yield Measurement(
            _apart(torch.cat(y, dim=1).float(), subject.called(layer, x[:, :stop])) / subject.exact,
            f"the error of {DECODED} tokens one by one by `{name}`, after {prompt} at once, in units of rounding,",
        )


@torch.no_grad()
def reach(subject: Subject) -> Iterator[Measurement | Note]:
    """Measures how far any output moves with a later token, for a module that says it is not causal."""
    layer, x = subject.layer(), subject.inputs()
    if subject.length == 1:
        yield Note("an image of one patch has no later one")
        return
    y, largest = subject.called(layer, x), 0.0
    for place in {1, subject.length // 2, subject.length - 1} - {0}:
        changed = x.clone()
        changed[:, place] += 1
        largest = max(largest, _apart(subject.called(layer, changed)[:, :place], y[:, :place]))
    yield Measurement(
        largest / subject.exact,
        "the largest change of an output after a change of a later token, in units of rounding,",
    )


@torch.no_grad()
def rows(subject: Subject) -> Iterator[Measurement]:
    """Measures how far a row depends on the other rows of its batch."""
    layer, x = subject.layer(), subject.inputs(batch=4)
    y = subject.called(layer, x)
    for row in range(len(x)):
        alone = subject.called(layer, x[row : row + 1])
        yield Measurement(
            _apart(alone, y[row : row + 1]) / subject.exact,
            f"the error of row {row} alone against the row in a batch, in units of rounding,",
        )


@torch.no_grad()
def repetition(subject: Subject) -> Iterator[Measurement]:
    """Measures what a call leaves behind: other outputs of the next call, or changed buffers."""
    layer, x = subject.layer(), subject.inputs()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    y = subject.called(layer, x)
    subject.called(layer, subject.inputs(seed=1))
    yield Measurement(
        _apart(subject.called(layer, x), y) / subject.exact, "the error of equal calls, in units of rounding,"
    )
    for name, value in layer.state_dict().items():
        changed = not torch.equal(value, before[name])
        yield Measurement(float(changed), f"whether a call changes '{name.removeprefix('inner.')}'")


def gradients(subject: Subject) -> Iterator[Measurement | Note]:
    """Measures the gradient along a direction against a difference of two outputs."""
    layer, x = subject.layer(), subject.inputs()
    layer, x, precision = _most_precise(subject, layer, x)
    if precision.note:
        yield Note(precision.note)
    parameters = dict(layer.named_parameters())
    x = x.requires_grad_()
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(x.shape, generator=draw).to(x)

    def output(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        with torch.autocast(subject.device, torch.bfloat16, precision.bf16):
            y: Tensor = layer(x)
        return y.to(weights.dtype)

    given = [x, *parameters.values()]
    y = output(x)
    found = torch.autograd.grad((y * weights).sum(), given, allow_unused=True)
    unused = [name for name, part in zip(parameters, found[1:], strict=True) if part is None]
    if unused:
        yield Note(f"no gradient reaches {', '.join(name.removeprefix('inner.') for name in unused[:4])}")
    for name, part in zip(["x", *parameters], found, strict=True):
        bad = 0.0 if part is None else float((~part.isfinite()).float().mean())
        yield Measurement(
            bad, f"the share of the gradient of {name.removeprefix('inner.')} that is not finite", "", 0.0
        )
    # Change each tensor by an equal share of its size, so that no tensor hides the others.
    ways = [torch.randn(value.shape, generator=draw).to(value) * _size(value) for value in given]
    slope = sum(float((part * way).sum()) for part, way in zip(found, ways, strict=True) if part is not None)
    ends = []
    with torch.no_grad():
        for sign in (1, -1):
            for value, way in zip(given, ways, strict=True):
                value.add_(sign * precision.step * way)
            ends.append(float((output(x) * weights).sum()))
            for value, way in zip(given, ways, strict=True):
                value.sub_(sign * precision.step * way)
    difference = (ends[0] - ends[1]) / (2 * precision.step)
    error = abs(slope - difference) / max(abs(difference), abs(slope), float(y.detach().norm()))
    yield Measurement(
        error / precision.limit, "the error of the gradient along a direction, as a share of what is allowed,", "", 1.0
    )


class _Precision(NamedTuple):
    """How a gradient is held to a difference.

    Attributes:
        step: The change of a tensor, as a share of its size.
        limit: The error that is allowed, which is that of the difference.
        bf16: Whether products are in bf16.
        note: What to say of it.
    """

    step: float
    limit: float
    bf16: bool = False
    note: str = ""


def _most_precise(subject: Subject, layer: ModuleLayer, x: Tensor) -> tuple[ModuleLayer, Tensor, _Precision]:
    """Finds the most precise numbers in which a module runs: fp64 on a CPU, fp32 or bf16 on a GPU."""
    if subject.device == "cpu":
        with torch.no_grad():
            double = copy.deepcopy(layer).double()
            try:
                double(x.double())
            except Exception:  # some kernels take fp32 alone
                note = "the module does not run in fp64, so that gradients are held to a difference in fp32"
                return layer, x, _Precision(1e-2, 0.1, note=note)
        return double, x.double(), _Precision(1e-6, 1e-4)
    if not _runs_in_fp32(layer, x):
        note = "the module does not run in fp32, so that gradients are held to a difference in bf16"
        return layer, x, _Precision(0.1, 0.3, bf16=True, note=note)
    return layer, x, _Precision(3e-2, 0.1)  # kernels may round their products to TF32


@torch.no_grad()
def _runs_in_fp32(layer: ModuleLayer, x: Tensor) -> bool:
    try:
        layer(x)
    except Exception:  # such as kernels for bf16 alone
        return False
    return True


def _size(value: Tensor) -> float:
    """Returns the root mean square of a tensor, or 0.01 for one that is smaller."""
    return max(float(value.detach().square().mean().sqrt()), 0.01) if value.numel() else 0.0


@torch.no_grad()
def precisions(subject: Subject) -> Iterator[Measurement | Note]:
    """Measures the error of bf16 products, as a GPU trains with them."""
    layer, x = subject.layer(), subject.inputs()
    if not _runs_in_fp32(layer, x):
        yield Note("the module does not run in fp32")
        return
    torch.manual_seed(0)
    want = layer(x).float()
    torch.manual_seed(0)
    with torch.autocast(subject.device, torch.bfloat16):
        y = layer(x).float()
    yield Measurement(float((y - want).norm() / want.norm().clamp_min(1e-12)), "the error with products in bf16")


@torch.no_grad()
def packing(subject: Subject) -> Iterator[Measurement | Note]:
    """Measures packed sequences against each of them alone."""
    layer = subject.layer()
    if not layer.packs:
        yield Note("its forward takes no `cu_seqlens`, so that packed sequences run one by one")
    x, bounds = subject.inputs(batch=1), [0, 1, 30, 94, LONGEST]
    with torch.autocast(subject.device, torch.bfloat16, subject.device != "cpu"):
        y = layer.advance(x, cu_seqlens=torch.tensor(bounds, device=subject.device))[0].float()
    for start, stop in itertools.pairwise(bounds):
        alone = subject.called(layer, x[:, start:stop])
        yield Measurement(
            _apart(y[:, start:stop], alone) / subject.exact,
            f"the error of the packed tokens {start} to {stop}, in units of rounding,",
        )


@torch.no_grad()
def starts(subject: Subject) -> Iterator[Measurement | Note]:
    """Measures whether the weights follow from the seed alone, and whether they can be saved and loaded."""
    first, again, other = subject.layer(0), subject.layer(0), subject.layer(1)
    values = dict(first.named_parameters())
    same = all(torch.equal(value, values[name]) for name, value in again.named_parameters())
    yield Measurement(float(not same), "whether the weights differ between two starts from one seed")
    if values and all(torch.equal(value, values[name]) for name, value in other.named_parameters()):
        yield Note("the weights start alike at every seed")
    x = subject.inputs()
    want = subject.called(first, x)
    other.load_state_dict(first.state_dict())
    yield Measurement(
        _apart(subject.called(other, x), want) / subject.exact, "the error of loaded weights, in units of rounding,"
    )
