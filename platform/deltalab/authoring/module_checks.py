"""The checks of a module in place of a rule: what a study relies on, although the module declares nothing."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from deltalab.authoring.check import Check, CheckResult, Measurement, Note, run_checks, told_once
from deltalab.errors import InputError, WrongRules
from deltalab.models.parts.module_layer import ModuleLayer, cache_argument, decoded
from deltalab.models.spec import ModelSpec
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
OPTIONS = {"d_model": 64, "heads": 2}
"""The settings of the model in which `deltalab module check` tries a module, unless the caller gives others."""
PATCHES = (1, LONGEST, 1)
"""The patches of that model for a module that is not causal."""


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


def tried(rule: OwnModule, settings: Mapping[str, object] = MappingProxyType({})) -> ModelSpec:
    """Returns the model in which a module is tried, with settings in place of `OPTIONS`: of images, if not causal."""
    patches = {} if rule.causal else {"patches": PATCHES}
    return ModelSpec.of({"vocab_size": 2, **OPTIONS, **patches, **settings, "rule": rule.spec()})


def _subject(rule: OwnModule, spec: ModelSpec, device: str) -> Subject:
    length = LONGEST if rule.causal or spec.patches is None else spec.patches[0] * spec.patches[1]
    return Subject(rule, spec.of_module, device, length)


@torch.no_grad()
def unstackable(rule: OwnModule, spec: ModelSpec) -> str | None:
    """Returns why runs of a module cannot train as one stack; None if they can.

    Args:
        rule: The module and its arguments.
        spec: The model in which it stands.
    """
    subject = _subject(rule, spec, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        layer, x = subject.layer(), subject.inputs(17 if rule.causal else None)
        weights = {name: torch.stack([value.detach()] * 2) for name, value in layer.named_parameters()}
        with torch.autocast(subject.device, torch.bfloat16, subject.device != "cpu"):
            vmap(lambda given, x: functional_call(layer, given, (x,)), randomness="same")(weights, torch.stack([x, x]))
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None


_ROUNDING = 1.0
CHECKS: tuple[Check[Subject], ...] = (
    Check("runs", runs, 0.0, "the module divides by 0, or overflows"),
    Check(
        "repetition",
        repetition,
        _ROUNDING / 2,
        "the module keeps state between calls: return it, or keep it out of `forward`",
    ),
    Check(
        "causality",
        causality,
        _ROUNDING,
        "a token reads later tokens: a mean over time, a padding on both sides, a mask",
    ),
    Check(
        "prefixes",
        prefixes,
        _ROUNDING,
        "the module does otherwise for short or odd lengths, so that decoding differs from training",
    ),
    Check(
        "reach",
        reach,
        _ROUNDING,
        "no output reads a later token, so that the module is causal: leave `causal = False` out",
        at_least=True,
    ),
    Check("rows", rows, _ROUNDING, "a row reads other rows: a norm or a state over the batch"),
    Check("gradients", gradients, 1.0, "a custom backward is wrong, or a part is detached"),
    Check("precisions", precisions, 0.1, "a part needs fp32: compute it in fp32, whatever autocast says"),
    Check("packing", packing, _ROUNDING, "a sequence reads the one before it: `cu_seqlens` is not used everywhere"),
    Check(
        "decoding",
        decoding,
        _ROUNDING,
        "its cache lacks what later tokens need, or its forward does not read it; studies use no cache of a module",
    ),
    Check("starts", starts, _ROUNDING / 2, "the start draws from another generator than torch's"),
)


OF_CAUSAL = ("causality", "prefixes", "packing", "decoding")
"""The checks of causal modules alone: an image is whole, is not packed, and nothing follows it."""
OF_OTHERS = ("reach",)
"""The check of modules that are not causal alone."""
QUICK = ("causality", "reach", "rows", "repetition")
"""The checks that a study needs before it trains, beside `runs`."""


def check_module(
    rule: OwnModule, spec: ModelSpec | None = None, *, forked: bool = False, quick: bool = False
) -> list[CheckResult]:
    """Checks a module.

    Args:
        rule: The module and its arguments.
        spec: The model in which it stands; None for one of `OPTIONS`.
        forked: Whether each check runs in a process of its own.
        quick: Whether to run only the checks that a study needs before it trains.

    Returns:
        A result for each check. If the module does not run at all, only that.
    """
    spec = spec or tried(rule)
    subject = _subject(rule, spec, "cpu")
    first = _run(subject, CHECKS[0])
    if not first.passed:
        if not torch.cuda.is_available():
            return [first]
        subject = subject._replace(device="cuda")
        if not (first := _run(subject, CHECKS[0])).passed:
            return [first]
    with _quiet():
        subject = subject._replace(trains=not subject.draws())
    others = OF_OTHERS if rule.causal else OF_CAUSAL
    wanted = [check for check in CHECKS[1:] if check.name not in others and (not quick or check.name in QUICK)]
    fork = forked and subject.device == "cpu"
    results = [first, *run_checks(wanted, partial(_run, subject), where=rule.name, forked=fork)]
    if not quick:
        reason = unstackable(rule, spec)
        note = "its runs train as one stack" if reason is None else f"its runs train one by one: {reason}"
        results[0] = CheckResult(first.name, True, first.figure, f"{first.message}; {note}")
    return told_once(results)


def demand_modules(specs: list[ModelSpec]) -> None:
    """Checks the modules of models before anything trains.

    Raises:
        WrongRules: Some fail; the error has a line for each.
    """
    wrong, seen = [], set[str]()
    for spec in specs:
        rule = spec.make_rule()
        if not isinstance(rule, OwnModule) or (key := f"{rule.spec()} {spec.of_module}") in seen:
            continue
        seen.add(key)
        failed = [result for result in check_module(rule, spec, quick=True) if not result.passed]
        if failed:
            wrong.append(
                f"module '{rule.name}' fails the check '{failed[0].name}': {failed[0].message}; "
                f"`deltalab module check {rule.name}` says more, --unchecked runs the study all the same"
            )
    if wrong:
        raise WrongRules(wrong)


@contextmanager
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_rng_state(state)
        torch.set_num_threads(threads)


def _run(subject: Subject, check: Check[Subject]) -> CheckResult:
    """Runs one check, and returns its worst result."""
    where, notes, measured = subject.rule.name, list[str](), list[Measurement]()
    try:
        with _quiet():
            for found in check.measure(subject):
                if isinstance(found, Note):
                    notes.append(found.text)
                else:
                    measured.append(found)
    except InputError as error:
        return CheckResult(check.name, False, None, str(error))
    except Exception as error:
        return check.raised(error, where)
    if not measured:
        return CheckResult(check.name, True, None, f"{where}: nothing measured: {'; '.join(notes)}")
    worst = min(measured, key=lambda measurement: check.slack(measurement.figure, measurement.limit))
    return check.judge(worst, where, "".join(f"; {note}" for note in notes))
