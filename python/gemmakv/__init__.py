"""Gemma models on CPUs, with the KV cache as a first-class object.

    import gemmakv

    gemma = gemmakv.Gemma.load("gemma-3-270m")
    cache = gemmakv.create_kv_cache(gemma.model_type)
    print(gemma.generate(cache, "The capital of France is", max_tokens=16))

Weights are immutable and shared by any number of conversations; a
conversation is its `KVCache`.
"""

from gemmakv.cache import KVCache, LayerView, Truncation, create_kv_cache
from gemmakv.chat_stream import ChatStream
from gemmakv.cpu import cpu_info
from gemmakv.errors import (
    CacheFullError,
    CorruptFile,
    GemmaKVError,
    MismatchError,
)
from gemmakv.gemma import Gemma
from gemmakv.generation import Generation, Piece, Timings, Usage
from gemmakv.loading import PartialModelWarning
from gemmakv.model_type import ModelConfig, ModelType
from gemmakv.packed import PackedWeights
from gemmakv.padded import (
    CacheProtocol,
    CyclicCache,
    LayerCache,
    attention,
    compute_left_pads,
)
from gemmakv.pool import BlockPool
from gemmakv.sentencepiece_tokenizer import SentencePieceTokenizer
from gemmakv.session import Message, Session, SessionStats
from gemmakv.stream import Stream
from gemmakv.templates import Segment, Template
from gemmakv.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "CacheFullError",
    "CacheProtocol",
    "ChatStream",
    "CorruptFile",
    "CyclicCache",
    "Gemma",
    "GemmaKVError",
    "Generation",
    "KVCache",
    "LayerCache",
    "LayerView",
    "Message",
    "MismatchError",
    "ModelConfig",
    "ModelType",
    "PackedWeights",
    "PartialModelWarning",
    "Piece",
    "Segment",
    "SentencePieceTokenizer",
    "Session",
    "SessionStats",
    "Stream",
    "Template",
    "Timings",
    "Tokenizer",
    "Truncation",
    "Usage",
    "attention",
    "compute_left_pads",
    "cpu_info",
    "create_kv_cache",
]
