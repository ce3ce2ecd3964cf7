"""Generation keywords: their table, and types for your own functions.

Types of names that are enumerated, like `KvDtype`, are `Literal`s.
"""

from gemmakv._support.arguments import QuantizeType
from gemmakv._support.public import publish as _publish
from gemmakv.cache._kv_cache import KvDtype
from gemmakv.chat._session_file import Overflow
from gemmakv.chat._tools import ToolChoice
from gemmakv.generation._message import Role
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
    "Overflow",
    "PrefixMode",
    "QuantizeType",
    "Role",
    "Speculate",
    "Stop",
    "ToolChoice",
]

_publish(globals())
del _publish
