"""Gemma models on CPUs, with the KV cache as a first-class object.

    import gemmakv

    gemma = gemmakv.Gemma.load("gemma-3-270m")
    print(gemma.generate("Once upon a time", max_tokens=16).text)

Weights are immutable and shared by any number of conversations; a
conversation is its `KVCache`, which `gemma.new_cache` makes.
"""

from gemmakv._support import interrupts as _interrupts  # before the others

# isort: split
from gemmakv._support import compiled as _compiled  # before what needs it

# isort: split
from typing import TYPE_CHECKING, Any

from gemmakv import options, templates
from gemmakv._support.public import publish as _publish
from gemmakv.cache._kv_cache import (
    KVCache,
    LayerView,
    Truncation,
    create_kv_cache,
)
from gemmakv.cache._padded import (
    CacheProtocol,
    CyclicCache,
    LayerCache,
    attention,
    compute_left_pads,
)
from gemmakv.cache._pool import BlockPool
from gemmakv.cache._prefix import PrefixCache, PrefixStats
from gemmakv.cache._remote_client import RemoteStore
from gemmakv.chat._functions import tool_schema
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import Message, Segment, Template
from gemmakv.chat._session import Session, SessionStats
from gemmakv.chat._stream import ChatStream
from gemmakv.diagnostics._cpu import cpu_info
from gemmakv.errors import (
    ArgumentError,
    CacheFullError,
    CorruptFile,
    GemmaKVError,
    MismatchError,
)
from gemmakv.generation._grammar import Grammar
from gemmakv.generation._profile import PhaseProfile, StepProfile
from gemmakv.generation._result import (
    Generation,
    Piece,
    Prefill,
    Timings,
    ToolCall,
    TopLogprobs,
    Usage,
)
from gemmakv.generation._stream import Stream
from gemmakv.generation._threads import ThreadPlacement
from gemmakv.models._config import ModelConfig, ModelType
from gemmakv.models._loading import PartialModelWarning
from gemmakv.models._packed import PackedWeights
from gemmakv.tokenizers._sentencepiece import SentencePieceTokenizer
from gemmakv.tokenizers._tokenizer import Tokenizer

if TYPE_CHECKING:
    from gemmakv import verify

del _compiled, _interrupts

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BlockPool",
    "CacheFullError",
    "CacheProtocol",
    "ChatStream",
    "CorruptFile",
    "CyclicCache",
    "Gemma",
    "GemmaKVError",
    "Generation",
    "Grammar",
    "KVCache",
    "LayerCache",
    "LayerView",
    "Message",
    "MismatchError",
    "ModelConfig",
    "ModelType",
    "PackedWeights",
    "PartialModelWarning",
    "PhaseProfile",
    "Piece",
    "Prefill",
    "PrefixCache",
    "PrefixStats",
    "RemoteStore",
    "Segment",
    "SentencePieceTokenizer",
    "Session",
    "SessionStats",
    "StepProfile",
    "Stream",
    "Template",
    "ThreadPlacement",
    "Timings",
    "Tokenizer",
    "ToolCall",
    "TopLogprobs",
    "Truncation",
    "Usage",
    "attention",
    "compute_left_pads",
    "cpu_info",
    "create_kv_cache",
    "options",
    "templates",
    "tool_schema",
    "verify",
]

_publish(globals())
del _publish


def __getattr__(name: str) -> Any:
    """Imports a module that few programs need at its first use."""
    if name == "verify":
        import importlib

        return importlib.import_module("gemmakv.verify")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
