"""Exceptions of this package; all derive from `GemmaKVError`."""

from gemmakv._core import (
    CacheFullError,
    CorruptFile,
    GemmaKVError,
    MismatchError,
)

__all__ = ["CacheFullError", "CorruptFile", "GemmaKVError", "MismatchError"]
