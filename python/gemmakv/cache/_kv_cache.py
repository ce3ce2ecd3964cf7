"""Conversations: the KV cache and its inspection, saving and loading."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gemmakv import _core
from gemmakv._core import Truncation
from gemmakv._support.arguments import byte_view, choice, integer
from gemmakv._support.files import PathOrFile, piecewise_writer, read_all
from gemmakv.cache._pool import BlockPool, core_pool
from gemmakv.errors import MismatchError, unexpected
from gemmakv.models._config import (
    LoadedModel,
    ModelConfig,
    ModelType,
    config_of,
)

__all__ = ["KVCache", "LayerView", "Truncation", "create_kv_cache"]

# Of a snapshot's head: magic, version, dtype and the bytes of the whole.
_MAGIC = b"GKVCACHE"
_HEAD_BYTES = 24
_NEWEST = 3  # version of the format
KvDtype = Literal["f32", "bf16", "int8"]
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


class KVCache:
    """One conversation: its tokens and their keys and values.

    Made by `create_kv_cache`, `fork`, `from_bytes` or `load`. `len(cache)`
    counts every token given or sampled. Keys and values are kept in blocks
    that forks share; a block that is shared is copied before it is written.

    All methods may be called from any thread, also while a call generates
    into the cache: they see the last completed step.
    """

    __slots__ = ("_held", "__weakref__")

    def __init__(self, core: _core.KVCache) -> None:
        if not isinstance(core, _core.KVCache):
            raise TypeError("use gemmakv.create_kv_cache(model)")
        self._held: _core.KVCache | None = core

    @property
    def _core(self) -> _core.KVCache:
        core = self._held
        if core is None:
            raise ValueError(
                "cache: closed; make a new one with create_kv_cache"
            )
        return core

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of keys and values; also done by `with` and garbage
        collection.

        Blocks that forks share stay with them; a call that still runs keeps
        its blocks until it ends. Any later use is a ValueError.
        """
        self._held = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._held is None

    def _become(self, other: KVCache) -> None:
        """Takes the content of `other`, sharing its blocks. One that was closed
        stays closed.
        """
        if not self.closed:
            self._held = other._core

    def __len__(self) -> int:
        return len(self._core)

    def __bool__(self) -> bool:
        """True: an empty conversation is a conversation."""
        return True

    def __repr__(self) -> str:
        if self.closed:
            return "<KVCache, closed>"
        return (
            f"<KVCache {self.model_type or 'custom'}: {len(self)} of "
            f"{self.capacity_tokens} tokens, {self.kv_dtype}, "
            f"{self.nbytes + self.shared_nbytes} bytes>"
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the conversation may hold. Memory grows as needed."""
        return self._core.capacity_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that this conversation alone holds.

        Those that its checkpoints keep are among them.
        """
        return self._core.nbytes

    @property
    def shared_nbytes(self) -> int:
        """Bytes of keys and values that others (forks) hold as well."""
        return self._core.shared_nbytes

    @property
    def mapped_nbytes(self) -> int:
        """Bytes of keys and values that lie in mapped files.

        Not among `nbytes` and `shared_nbytes`, which are memory of the heap.
        """
        return self._core.mapped_nbytes

    @property
    def model_type(self) -> ModelType | None:
        """The model it was made for; None for a custom configuration."""
        name = self._core.model_type
        return ModelType(name) if name else None

    @property
    def kv_dtype(self) -> KvDtype:
        """How keys and values are stored: "f32", "bf16" or "int8"."""
        return self._core.kv_dtype

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Copy of the token ids, int32 [len(cache)]."""
        return self._core.tokens

    @property
    def layers(self) -> list[LayerView]:
        """Read-only views of the model's layers, first layer first."""
        return [LayerView(self, i) for i in range(self._core.num_layers)]

    def fork(self) -> KVCache:
        """Makes an independent conversation with the same content.

        Shares the blocks: no key or value is copied. `copy.copy` and
        `copy.deepcopy` do the same; pickling uses `to_bytes`.
        """
        return KVCache(self._core.fork())

    def __copy__(self) -> KVCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.fork()

    def __reduce__(self) -> tuple[Any, ...]:
        return KVCache.from_bytes, (self.to_bytes(checkpoints=True),)

    def truncate(self, length: int) -> Truncation:
        """Keeps the first `length` tokens.

        Always exact; `replay_tokens` of the result says what it costs: the
        tokens that the next use computes again. 0 at a checkpoint, and as
        long as the window of the new end is still held. Checkpoints after
        the new end are dropped. Raises ValueError if `length` is negative or
        exceeds len(cache).
        """
        count = integer("length", length)
        if not 0 <= count <= len(self):
            raise unexpected(
                "length", f"0 to {len(self)} (the tokens held)", count
            )
        return self._core.truncate(count)

    def reset(self) -> None:
        """Forgets everything, also which weights it was used with."""
        self._core.reset()

    def checkpoint(self) -> bool:
        """Marks the present, so that truncating to len(cache) is free.

        Costs no copy: what sliding-window layers hold now is kept instead of
        being dropped as the conversation grows. Checkpoints share what they
        have in common; all of them together stay within `checkpoint_bytes`,
        old ones are thinned out first.

        Returns True if `truncate` to this length will cost nothing; False if
        one checkpoint exceeds the budget, or if nothing is there to keep
        because a truncation has left tokens to be computed again.
        """
        return self._core.checkpoint()

    @property
    def checkpoints(self) -> list[int]:
        """Lengths to which `truncate` costs nothing, ascending.

        Empty for models of full-attention layers alone, which need none:
        every truncation is free.
        """
        return self._core.checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that all checkpoints together may refer to."""
        return self._core.checkpoint_bytes

    def to_bytes(self, checkpoints: bool = False) -> bytes:
        """Writes the conversation into bytes, for `from_bytes`.

        Going on from the restored conversation gives bit for bit what going
        on from this one gives. With `checkpoints`, they are kept too. The
        size is about that of the keys and values held.
        """
        return self._core.to_bytes(bool(checkpoints))

    @staticmethod
    def from_bytes(
        data: bytes | bytearray | memoryview,
        gemma: LoadedModel | None = None,
        *,
        pool: BlockPool | None = None,
    ) -> KVCache:
        """Reads the conversation that `to_bytes` wrote, in blocks of `pool`.

        If `gemma` is given, MismatchError is raised at once if the
        conversation belongs to other weights, or is an empty one for another
        shape; else its first use raises it. Raises CorruptFile if the data
        are not a whole, sound snapshot, CacheFullError if the pool has no room
        for it.
        """
        view = byte_view("data", data)
        if gemma is None:
            core = _core.KVCache.from_bytes(view, None, core_pool(pool))
        else:
            config, fingerprint = _config_of_loaded(gemma)
            core = _core.KVCache.from_bytes(view, fingerprint, core_pool(pool))
            if not core.fits(config):
                raise MismatchError(
                    f"the snapshot is of {core.model_type or 'custom'} "
                    f"({core.num_layers} layers), expected one of "
                    f"{config.name or 'a custom model'} ({config.num_layers} "
                    "layers) with heads and windows of the same shape"
                )
        return KVCache(core)

    def save(
        self, path_or_file: PathOrFile, checkpoints: bool = False
    ) -> None:
        """Writes `to_bytes()` to a path or to a binary file object, piece by
        piece: it takes no memory for a second copy of the keys and values.

        A path is replaced in one step, once everything is on disk: readers
        see the old file or the new one, also after a crash. What the file
        raises ends the call, and leaves the conversation as it is.
        """
        core = self._core
        with piecewise_writer(path_or_file) as write:
            core.save(write, bool(checkpoints))

    @staticmethod
    def load(
        path_or_file: PathOrFile,
        gemma: LoadedModel | None = None,
        *,
        pool: BlockPool | None = None,
    ) -> KVCache:
        """Reads what `save` wrote; see `from_bytes`.

        A file that does not begin as a snapshot is not read further.
        """
        data = read_all(path_or_file, _HEAD_BYTES, _snapshot_bytes)
        return KVCache.from_bytes(data, gemma, pool=pool)


def _snapshot_bytes(head: bytes) -> int:
    """Reads the size of a snapshot from its head; 0 for none or a newer one."""
    version = int.from_bytes(head[len(_MAGIC) : len(_MAGIC) + 4], "little")
    if not head.startswith(_MAGIC) or version > _NEWEST:
        return 0
    return int.from_bytes(head[_HEAD_BYTES - 8 :], "little")


def _config_of_loaded(gemma: LoadedModel) -> tuple[ModelConfig, str]:
    try:
        return gemma.config, gemma.fingerprint
    except AttributeError:
        raise unexpected("gemma", "a Gemma or None", gemma) from None


@dataclasses.dataclass(frozen=True)
class LayerView:
    """A view of one layer: what a conversation holds there now."""

    cache: KVCache
    index: int

    @property
    def kind(self) -> str:
        """"full", "sliding" (only a window of positions is kept) or
        "recurrent" (one state stands for all positions).
        """
        return self.cache._core.layer_kind(self.index)

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; None: all before it."""
        return self.cache._core.layer_window(self.index) or None

    @property
    def held_range(self) -> tuple[int, int]:
        """Positions [begin, end) whose keys and values are held.

        Of a recurrent layer: empty, where the state stands.
        """
        begin, end = self.cache._core.held_range(self.index)
        return begin, end

    @property
    def start(self) -> int:
        """First position whose keys and values are held."""
        return self.held_range[0]

    @property
    def length(self) -> int:
        """Positions whose keys and values are held, from `start` on."""
        begin, end = self.held_range
        return end - begin

    @property
    def dtype(self) -> KvDtype:
        """How keys and values are stored: "f32", "bf16" or "int8"."""
        return self.cache.kv_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's blocks, those shared with forks included."""
        return self.cache._core.layer_nbytes(self.index)

    @property
    def keys(self) -> npt.NDArray[np.float32]:
        """Copy of the held keys, float32 [length, kv_heads, head_dim].

        [0, 0, 0] in a recurrent layer, as `values`.
        """
        return self.cache._core.layer_array(self.index, False)

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """Copy of the held values, float32 [length, kv_heads, head_dim]."""
        return self.cache._core.layer_array(self.index, True)

    @property
    def state(self) -> npt.NDArray[np.float32]:
        """Copy of a recurrent layer's state after the token before `start`.

        float32 [conv_width, lru_width]: the state of the recurrence, then the
        last inputs of the convolution, oldest first. All zero before the
        first token; [0, 0] in attention layers.
        """
        return self.cache._core.layer_state(self.index)


def create_kv_cache(
    model: ModelType | str | ModelConfig | LoadedModel,
    capacity_tokens: int | None = None,
    kv_dtype: KvDtype = "bf16",
    *,
    block_tokens: int = 64,
    checkpoint_bytes: int | None = None,
    pool: BlockPool | None = None,
) -> KVCache:
    """Makes an empty conversation for a model; needs no weights.

    Args:
      model: a ModelType or its name, an alias that `Gemma.load` takes, a
        ModelConfig or a Gemma.
      capacity_tokens: limit of tokens; default: the model's context length.
        Memory is allocated as the conversation grows.
      kv_dtype: how keys and values are stored: "f32", "bf16" or "int8" (with
        a scale for every 32 values).
      block_tokens: tokens in a block of storage: 16, 32, 64 or 128. Changes no
        result.
      checkpoint_bytes: limit of what all checkpoints of the conversation hold
        together; 0: none are kept. Default: room for four that share nothing
        (docs/cache.md says what one costs for each model).
      pool: where the blocks come from; default: one without a limit.

    Raises ValueError naming the argument that is out of range.
    """
    capacity = 0
    if capacity_tokens is not None:
        capacity = integer("capacity_tokens", capacity_tokens, 1)
    checkpoints = None
    if checkpoint_bytes is not None:
        checkpoints = integer("checkpoint_bytes", checkpoint_bytes, 0)
    return KVCache(
        _core.create_kv_cache(
            config_of(model),
            capacity,
            choice("kv_dtype", kv_dtype, KV_DTYPES),
            integer("block_tokens", block_tokens, 16),
            checkpoints,
            core_pool(pool),
        )
    )
