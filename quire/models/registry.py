"""Every model by name, and the plain JSON description that builds it again.

A model is a `nn.Module` whose constructor takes one frozen config dataclass and keeps it as
``self.config``. The description of a model is its registered name and the fields of that config; a
name that is read from a file resolves in `MODELS` and nowhere else. Networks with names of their own, such
as resnet50, have a builder in `BUILDERS` besides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import nn

from quire.errors import InputError, nearest
from quire.registry import Registry

Class = TypeVar("Class", bound=type[nn.Module])


@dataclass(frozen=True)
class Example:
    """A tiny configuration and the shape of one of its inputs, without N, to try the model by."""

    config: Mapping[str, Any]
    input_shape: tuple[int, ...]


class Model(NamedTuple):
    """A registered model: the dataclass that describes it and the module that it builds."""

    config: type[Any]
    module: type[nn.Module]
    example: Example


MODELS: Registry[Model] = Registry("model")
BUILDERS: Registry[Callable[..., nn.Module]] = Registry("network")
"""Functions that build a network by its published name."""


def model(name: str, config: type[Any], *, example: Example) -> Callable[[Class], Class]:
    """Register the decorated module class under `name`; `config` is the dataclass it is built from."""

    def add(module: Class) -> Class:
        MODELS.register(name)(Model(config, module, example))
        return module

    return add


def build_model(spec: Mapping[str, Any]) -> nn.Module:
    """The model that ``{"model": NAME, **config}`` describes, with fresh weights."""
    name = spec.get("model")
    if not isinstance(name, str):
        raise InputError(
            f"a model description without its name: {dict(spec)}",
            expected='an entry "model": NAME',
            fix=f"add one of {', '.join(sorted(MODELS))}",
        )
    entry = MODELS[name]
    values = {key: _tuples(value) for key, value in spec.items() if key != "model"}
    fields = {field.name: field for field in dataclasses.fields(entry.config)}
    check_options(name, values, fields)
    missing = [key for key, field in fields.items() if key not in values and _required(field)]
    if missing:
        raise InputError(
            f"the description of model '{name}' lacks {', '.join(missing)}",
            expected=f"values for {', '.join(key for key, field in fields.items() if _required(field))}",
            fix=f"add {', '.join(missing)}",
        )
    return entry.module(entry.config(**values))


def check_options(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse options that the model does not have."""
    for key in given:
        if key not in known:
            raise InputError(
                f"unknown option '{key}' of model '{name}'",
                expected=f"one of {', '.join(known)}",
                fix=nearest(key, known) or f"leave '{key}' out",
            )


def model_spec(module: nn.Module) -> dict[str, Any]:
    """The description from which `build_model` makes the same model, as plain JSON values."""
    for name, entry in MODELS.items():
        if entry.module is type(module):
            config: Any = module.config
            return {
                "model": name,
                **{key: _lists(value) for key, value in dataclasses.asdict(config).items()},
            }
    raise InputError(
        f"{type(module).__name__} is not a registered model",
        expected=f"one of {', '.join(sorted(MODELS))}",
        fix='decorate the class with @model("name", Config, example=Example(...))',
    )


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
