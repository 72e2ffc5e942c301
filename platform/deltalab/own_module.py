"""Any `torch.nn.Module` in the place of a rule: `rule: my_layer.py:MyLayer`, or a class of an installed package."""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Self

from torch import nn

from deltalab.errors import InputError, unknown
from deltalab.rule import UpdateRule

WIDTHS = ("d_model", "dim", "hidden_size", "embed_dim", "hidden_dim", "model_dim", "n_embd", "width")
"""The names by which modules take the width of x. The first that a module has is set to `$d_model`."""

OF_A_MODEL = ("chunk_size", "d_model", "heads", "key_dim", "norm_eps", "value_dim")
"""What a value `$NAME` may stand for: a setting of the model, or the widths of its heads."""


@dataclass(frozen=True, kw_only=True)
class OwnModule(UpdateRule):
    """A module that maps x [B, T, d] to y [B, T, d], and that declares nothing but whether it is causal.

    It has neither gates nor a transition. Its knobs are the arguments of its constructor.

    Attributes:
        make: Makes the module: a class, or a function.
        arguments: The arguments as JSON, so that two rules with equal arguments are equal.
    """

    make: ClassVar[Callable[..., object]]

    arguments: str = "{}"

    @classmethod
    def configured(cls, knobs: Mapping[str, object]) -> Self:
        """Returns the module with arguments, and with the defaults that YAML can write.

        Raises:
            InputError: The constructor does not take an argument, or needs one that is not given.
        """
        parameters = _parameters(cls.make, cls.name)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        named = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "name"
        }
        for key, value in knobs.items():
            if key not in named and not takes_all:
                raise unknown("argument", key, named, where=f"module '{cls.name}'")
            if isinstance(value, str) and value.startswith("$") and value[1:] not in OF_A_MODEL:
                raise unknown(
                    "setting of the model", value, [f"${name}" for name in OF_A_MODEL], where=f"{cls.name}.{key}"
                )
        width = {name: "$d_model" for name in WIDTHS if name in named and not knobs.keys() & set(WIDTHS)}
        chosen = {name: parameter.default for name, parameter in named.items() if _plain(parameter.default)}
        chosen.update([*width.items()][:1])
        chosen.update(knobs)
        missing = [name for name, p in named.items() if p.default is p.empty and name not in chosen]
        if missing:
            raise InputError(
                f"module '{cls.name}' needs {', '.join(missing)}: give kwargs {{{missing[0]}: ...}}, where $d_model "
                "stands for the width of the model"
            )
        try:
            return cls(arguments=json.dumps(chosen, sort_keys=True))
        except (TypeError, ValueError) as error:
            raise InputError(f"module '{cls.name}': an argument is no value of YAML: {error}") from None

    def build(self, of_model: Mapping[str, float]) -> nn.Module:
        """Makes the module, whose parameters start as the module starts them.

        Args:
            of_model: The value of each of `OF_A_MODEL`.

        Raises:
            InputError: It cannot be made, or is not a module that can train.
        """
        arguments = {
            name: of_model[value[1:]] if isinstance(value, str) and value.startswith("$") else value
            for name, value in self.knobs().items()
        }
        try:
            module = self.make(**arguments)
        except Exception as error:
            text = " ".join(str(error).split())
            raise InputError(f"module '{self.name}' cannot be made: {type(error).__name__}: {text:.300}") from error
        if not isinstance(module, nn.Module):
            raise InputError(f"'{self.name}' makes a {type(module).__name__}, and not a torch.nn.Module")
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                raise InputError(f"module '{self.name}': the shape of '{name}' is not known before it runs")
            if not parameter.requires_grad or not parameter.is_floating_point():
                raise InputError(f"module '{self.name}': '{name}' does not train: register it as a buffer")
        return module

    @property
    def settings(self) -> frozenset[str]:
        """The settings of the model that the arguments name, and those that make the widths of its heads."""
        named = {value[1:] for value in self.knobs().values() if isinstance(value, str) and value[:1] == "$"}
        return frozenset(named | ({"heads", "key_dim", "expand_v"} if named & {"key_dim", "value_dim"} else set()))

    @property
    def causal(self) -> bool:
        """Whether no output reads later tokens: true, unless the module's class has `causal = False`."""
        return getattr(self.make, "causal", True) is not False

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """Unknown: any real number."""
        return (-math.inf, math.inf)

    def knobs(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        found: dict[str, Any] = json.loads(self.arguments)
        return found

    def spec(self) -> dict[str, Any]:
        """Returns the module's name and its arguments."""
        return {"name": self.name, **self.knobs()}

    def turned(self, other: Self) -> str:
        """Returns the arguments of `other` that differ, as text for people."""
        ours, theirs = self.knobs(), other.knobs()
        return ", ".join(f"{n}={theirs[n]}" for n in theirs if theirs[n] != ours.get(n)) or "as declared"

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made when its module is found, so that a pickle names the module and not the class.
        registry = import_module(".registry", __package__)
        return partial(registry.get_rule, self.name, **self.knobs()), ()


def of_module(name: str, make: Callable[..., object]) -> type[OwnModule]:
    """Returns the class of the rules that `make` makes a module for."""
    document = inspect.getdoc(make) if make.__doc__ else ""
    return type("OwnModule", (OwnModule,), {"name": name, "make": staticmethod(make), "__doc__": document or name})


def is_path(name: object) -> bool:
    """Returns whether a name is that of a module, `file.py:Name` or `package.Name`, as far as its form tells.

    Examples:
        >>> [is_path(name) for name in ("my_layer.py:MyLayer", "fla.layers.GatedDeltaNet", "comba")]
        [True, True, False]
    """
    return isinstance(name, str) and (".py:" in name or ("." in name.strip(".") and not name.endswith(".py")))


def as_rule(mixer: object, where: str) -> dict[str, Any]:
    """Writes a mixer, `{module: ..., kwargs: {...}}` or a module's name alone, as a rule with its knobs.

    Args:
        mixer: The mixer as YAML has it.
        where: The key of the mixer, which errors name.

    Raises:
        InputError: It has another form.

    Examples:
        >>> as_rule({"module": "mine.py:Mine", "kwargs": {"taps": 4}}, "model.mixer")
        {'name': 'mine.py:Mine', 'taps': 4}
    """
    given = {"module": mixer} if isinstance(mixer, str) else mixer
    if not isinstance(given, Mapping) or not isinstance(given.get("module"), str):
        raise InputError(f"{where} must be {{module: file.py:Name or package.Name, kwargs: {{...}}}}, not {mixer!r}")
    for key in given:
        if key not in ("module", "kwargs"):
            raise unknown("key", key, ("module", "kwargs"), where=where)
    name, kwargs = given["module"], given.get("kwargs") or {}
    if not is_path(name):
        raise InputError(
            f"{where}.module must be file.py:Name or package.Name, not {name!r}; a rule's name stands in `rule`"
        )
    if not isinstance(kwargs, Mapping) or "name" in kwargs or not all(isinstance(key, str) for key in kwargs):
        raise InputError(f"{where}.kwargs must be a mapping of arguments, none of which is `name`, not {kwargs!r}")
    return {"name": name, **kwargs}


def _parameters(make: Callable[..., object], name: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError) as error:
        raise InputError(f"module '{name}': its arguments cannot be read: {error}") from None


def _plain(value: object) -> bool:
    """Returns whether a default is a value of YAML that a study may turn."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)
