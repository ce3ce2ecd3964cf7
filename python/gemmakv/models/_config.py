"""Names and shapes of models."""

from __future__ import annotations

import copyreg
import enum
from typing import TYPE_CHECKING, Any, Protocol

from gemmakv import _core
from gemmakv._core import ModelConfig
from gemmakv.errors import unexpected
from gemmakv.models._aliases import ALIASES

if TYPE_CHECKING:

    class _Members(enum.EnumMeta):
        # Members come from the core's table, so that a new size is one row.
        def __getattr__(cls, name: str) -> ModelType: ...

    class ModelType(enum.StrEnum, metaclass=_Members):
        """Models whose shape is known by name: `ModelType.GEMMA2_9B`, ..."""

else:
    ModelType = enum.StrEnum(
        "ModelType",
        {
            name.upper().replace("-", "_"): name
            for name in _core.model_type_names()
        },
        module=__name__,
    )
    ModelType.__doc__ = "Models whose shape is known by name."

__all__ = ["LoadedModel", "ModelConfig", "ModelType", "config_of", "type_of"]


def _config_of_arguments(arguments: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**arguments)


def _reduce(config: ModelConfig) -> tuple[Any, tuple[dict[str, Any]]]:
    return _config_of_arguments, (config.arguments(),)


# Configs can be pickled and copied, by the arguments that make them.
copyreg.pickle(ModelConfig, _reduce)


class LoadedModel(Protocol):
    """What caches need of a `Gemma`."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def fingerprint(self) -> str: ...


def config_of(
    model: ModelType | str | ModelConfig | LoadedModel,
) -> ModelConfig:
    """The configuration that `model` names or has, or `model` itself.

    Raises ValueError listing the known names if `model` is none of them.
    """
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, str):
        alias = ALIASES.get(model)
        return ModelConfig.from_name(alias.model_type if alias else str(model))
    config = getattr(model, "config", None)  # also of a Gemma that is closed
    if isinstance(config, ModelConfig):
        return config
    expected = "a ModelType, its name, an alias, a ModelConfig or a Gemma"
    raise unexpected("model", expected, model)


def type_of(config: ModelConfig) -> ModelType | None:
    """The named type of a configuration; None for other shapes."""
    return ModelType(config.name) if config.name else None
