"""Generation keywords: their table, and types for your own functions."""

from gemmakv.generation._options import (
    BatchOptions,
    GenerationOptions,
    LogitBias,
    LogitsProcessor,
    Option,
    Options,
    Stop,
)

__all__ = [
    "BatchOptions",
    "GenerationOptions",
    "LogitBias",
    "LogitsProcessor",
    "Option",
    "Options",
    "Stop",
]
