"""Generation keywords: their table, and types for your own functions.

Types of names that are enumerated, like `KvDtype`, are `Literal`s.
"""

from gemmakv._support.arguments import QuantizeType
from gemmakv._support.public import publish as _publish
from gemmakv.cache._kv_cache import KvDtype
from gemmakv.generation._options import (
    BatchOptions,
    GenerationOptions,
    LogitBias,
    LogitsProcessor,
    Option,
    Options,
    PrefixMode,
    Speculate,
    Stop,
)
from gemmakv.generation._result import FinishReason

__all__ = [
    "BatchOptions",
    "FinishReason",
    "GenerationOptions",
    "KvDtype",
    "LogitBias",
    "LogitsProcessor",
    "Option",
    "Options",
    "PrefixMode",
    "QuantizeType",
    "Speculate",
    "Stop",
]

_publish(globals())
del _publish
