"""Names and shapes of models."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from gemmakv import _core
from gemmakv._core import ModelConfig
from gemmakv.errors import brief

if TYPE_CHECKING:

    class ModelType(str, enum.Enum):
        """Models whose shape is known by name (the table is in the core)."""

        GEMMA_2B = "gemma-2b"
        GEMMA_7B = "gemma-7b"
        GEMMA2_2B = "gemma2-2b"
        GEMMA2_9B = "gemma2-9b"
        GEMMA2_27B = "gemma2-27b"
        GEMMA3_270M = "gemma3-270m"
        GEMMA3_1B = "gemma3-1b"
        GEMMA3_4B = "gemma3-4b"
        GEMMA3_12B = "gemma3-12b"
        GEMMA3_27B = "gemma3-27b"
        RECURRENTGEMMA_2B = "recurrentgemma-2b"
        RECURRENTGEMMA_9B = "recurrentgemma-9b"

else:
    ModelType = enum.Enum(
        "ModelType",
        {
            name.upper().replace("-", "_"): name
            for name in _core.model_type_names()
        },
        type=str,
        module=__name__,
    )
    ModelType.__doc__ = "Models whose shape is known by name."
    ModelType.__str__ = lambda self: self.value

__all__ = ["ModelConfig", "ModelType", "config_of", "type_of"]


def config_of(model: ModelType | str | ModelConfig) -> ModelConfig:
    """The configuration that `model` names, or `model` itself.

    Raises ValueError listing the known names if `model` is none of them.
    """
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, str):
        return ModelConfig.from_name(
            model.value if isinstance(model, ModelType) else model
        )
    raise ValueError(
        "model: expected a ModelType, its name or a ModelConfig, found "
        + brief(model)
    )


def type_of(config: ModelConfig) -> ModelType | None:
    """The named type of a configuration; None for other shapes."""
    return ModelType(config.name) if config.name else None
