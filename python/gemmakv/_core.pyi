"""The compiled core, which checks its arguments. The Python modules over it
have the documentation.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Final, Literal, final

import numpy as np
import numpy.typing as npt

class GemmaKVError(Exception):
    """Base of this package's own errors."""

class CorruptFile(GemmaKVError):
    """Bytes that claim to be of a known format are not."""

class MismatchError(GemmaKVError):
    """Two sound things do not belong together."""

class CacheFullError(GemmaKVError):
    """A conversation is at its capacity, or memory for it is used up."""

@final
class ModelConfig:
    """The shape of a model. Immutable.

    Fields in which layers may differ take a number, or a list with an entry for
    each layer. The properties are lists if layers differ.
    """

    def __init__(
        self,
        *,
        name: str = "",
        architecture: str,
        layer_kinds: Sequence[str],
        eos_ids: Sequence[int] = ...,
        bos_id: int = 2,
        hidden_size: int,
        num_layers: int,
        num_heads: int | Sequence[int],
        kv_heads: int | Sequence[int] | None = None,
        head_dim: int | Sequence[int],
        ffn_dim: int | Sequence[int],
        vocab_size: int,
        context_length: int,
        sliding_window: int | Sequence[int] = 0,
        rms_epsilon: float = 1e-6,
        query_scale: float,
        attn_soft_cap: float = 0.0,
        final_soft_cap: float = 0.0,
        rope_base_full: float | Sequence[float] = 10000.0,
        rope_base_sliding: float | Sequence[float] = 10000.0,
        rope_factor_full: float | Sequence[float] = 1.0,
        qk_norm: bool,
        post_norms: bool,
        embedding_scale: float | None = None,
        rope_dim: int | Sequence[int] | None = None,
        biases: bool = False,
        lru_width: int = 0,
        lru_blocks: int = 0,
        conv_width: int = 0,
        shares_kv: Sequence[int | None] | None = None,
        rope_factor_sliding: float | Sequence[float] = 1.0,
        still_pairs: int | Sequence[int] = 0,
        value_norm: bool = False,
        keys_are_values: bool = False,
        layer_scales: bool = False,
        ple_dim: int = 0,
        ple_vocab: int = 0,
        num_experts: int = 0,
        experts_used: int = 0,
        expert_ffn_dim: int = 0,
        bidirectional: bool = False,
        dense_dim: int = 0,
        embedding_dim: int = 0,
        target_hidden: int = 0,
        num_centroids: int = 0,
        centroids_used: int = 0,
        altup_inputs: int = 0,
        altup_active: int = 0,
        altup_correct_scale: bool = False,
        laurel_rank: int = 0,
        sparsity_cutoff: float | Sequence[float | None] | None = None,
    ) -> None: ...
    @staticmethod
    def from_name(name: str) -> ModelConfig: ...
    @staticmethod
    def from_gguf(path: str | bytes | PathLike[str]) -> ModelConfig: ...
    @staticmethod
    def from_family(
        architecture: str,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        ffn_dim: int,
    ) -> ModelConfig: ...
    def named(self) -> ModelConfig: ...
    name: Final[str]
    architecture: Final[str]
    hidden_size: Final[int]
    num_layers: Final[int]
    num_heads: Final[int]
    kv_heads: Final[int]
    head_dim: Final[int]
    ffn_dim: Final[int]
    vocab_size: Final[int]
    context_length: Final[int]
    sliding_window: Final[int]
    layer_kinds: Final[list[str]]
    rms_epsilon: Final[float]
    query_scale: Final[float]
    attn_soft_cap: Final[float]
    final_soft_cap: Final[float]
    rope_base_full: Final[float]
    rope_base_sliding: Final[float]
    rope_factor_full: Final[float]
    qk_norm: Final[bool]
    post_norms: Final[bool]
    eos_ids: Final[list[int]]
    bos_id: Final[int]
    embedding_scale: Final[float]
    rope_dim: Final[int]
    biases: Final[bool]
    lru_width: Final[int]
    lru_blocks: Final[int]
    conv_width: Final[int]
    shares_kv: Final[list[int | None] | None]
    rope_factor_sliding: Final[float]
    still_pairs: Final[int]
    value_norm: Final[bool]
    keys_are_values: Final[bool]
    layer_scales: Final[bool]
    ple_dim: Final[int]
    ple_vocab: Final[int]
    num_experts: Final[int]
    experts_used: Final[int]
    expert_ffn_dim: Final[int]
    bidirectional: Final[bool]
    dense_dim: Final[int]
    embedding_dim: Final[int]
    target_hidden: Final[int]
    num_centroids: Final[int]
    centroids_used: Final[int]
    altup_inputs: Final[int]
    altup_active: Final[int]
    altup_correct_scale: Final[bool]
    laurel_rank: Final[int]
    sparsity_cutoff: Final[float | list[float | None] | None]
    def arguments(self) -> dict[str, Any]: ...
    @staticmethod
    def json_keys() -> list[tuple[str, str, bool]]: ...
    state_bytes: Final[int]
    def kv_bytes_per_token(self, dtype: str = "bf16") -> tuple[int, int]: ...
    def kv_bytes_at(self, tokens: int, dtype: str = "bf16") -> int: ...

@final
class Truncation:
    """The cost of `KVCache.truncate` at the next use."""

    replay_tokens: Final[int]

@final
class BlockPool:
    def __init__(self, bytes: int = 0) -> None: ...
    bytes: Final[int]
    used_bytes: Final[int]
    blocks_in_use: Final[int]

@final
class KVCache:
    def __len__(self) -> int: ...
    capacity_tokens: Final[int]
    nbytes: Final[int]
    shared_nbytes: Final[int]
    mapped_nbytes: Final[int]
    model_type: Final[str | None]
    fingerprint: Final[str | None]
    kv_dtype: Final[Literal["f32", "bf16", "int8"]]
    num_layers: Final[int]
    tokens: Final[npt.NDArray[np.int32]]
    for_one_request: bool
    def fork(self) -> KVCache: ...
    def append(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None: ...
    def truncate(self, n: int) -> Truncation: ...
    def reset(self) -> None: ...
    def checkpoint(self) -> bool: ...
    checkpoints: Final[list[int]]
    checkpoint_bytes: Final[int]
    def to_bytes(self, checkpoints: bool = False) -> bytes: ...
    def save(
        self, write: Callable[[bytes], None], checkpoints: bool = False
    ) -> None: ...
    @staticmethod
    def from_bytes(
        data: bytes | bytearray | memoryview,
        fingerprint: str | None = None,
        pool: BlockPool | None = None,
    ) -> KVCache: ...
    def fits(self, config: ModelConfig) -> bool: ...
    def layer_kind(self, layer: int) -> str: ...
    def layer_shape(self, layer: int) -> tuple[int, int]: ...
    def layer_window(self, layer: int) -> int: ...
    def layer_nbytes(self, layer: int) -> int: ...
    def held_range(self, layer: int) -> tuple[int, int]: ...
    def layer_array(
        self, layer: int, values: bool
    ) -> npt.NDArray[np.float32]: ...
    def layer_state(self, layer: int) -> npt.NDArray[np.float32]: ...

@final
class PaddedCache:
    def __init__(
        self,
        batch: int,
        capacity: int,
        window: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
    ) -> None: ...
    lengths: Final[npt.NDArray[np.int64]]
    positions: Final[npt.NDArray[np.int64]]
    nbytes: Final[int]
    def append(
        self,
        k: npt.NDArray[np.float32],
        v: npt.NDArray[np.float32],
        pads: Sequence[int],
    ) -> None: ...
    def reset(self) -> None: ...
    def copy(self, values: bool) -> npt.NDArray[np.float32]: ...
    def causal_mask(self, q_len: int) -> npt.NDArray[np.uint8]: ...
    def attend(
        self, q: npt.NDArray[np.float32], scale: float, soft_cap: float
    ) -> npt.NDArray[np.float32]: ...

@final
class GgufFile:
    def __init__(self, path: str | bytes) -> None: ...
    version: Final[int]
    def keys(self) -> list[str]: ...
    def get(self, key: str) -> Any: ...
    def read_tensor(self, name: str) -> npt.NDArray[np.float32]: ...
    def tensors(self) -> list[tuple[str, str, int, list[int], int]]: ...

@final
class GenerateOptions:
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[int, float]]
    seed: int | None
    stop: list[bytes]
    reply_stop: list[bytes]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    deadline: float | None
    logits_processor: Any
    prefix_cache: str
    speculate: str
    def __init__(self) -> None: ...
    def validate(self, vocab_size: int) -> None: ...

@final
class Result:
    token_ids: Final[list[int]]
    text_bytes: Final[bytes]
    logprobs: Final[npt.NDArray[np.float32] | None]
    top_logprobs: Final[
        tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None
    ]
    seed: Final[int]
    finish_reason: Final[
        Literal["stop", "length", "deadline", "cancelled"]
    ]
    prompt_tokens: Final[int]
    cached_tokens: Final[int]
    prefix_tokens: Final[dict[str, int]]
    miss_reason: Final[str]
    drafted: Final[int]
    accepted: Final[int]
    prefill_s: Final[float]
    decode_s: Final[float]

@final
class Event:
    token_id: Final[int]
    logprob: Final[float | None]
    top_logprobs: Final[
        tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None
    ]
    bytes: Final[bytes]
    finished: Final[bool]
    finish_reason: Final[
        Literal["stop", "length", "deadline", "cancelled"] | None
    ]

@final
class Waker:
    def __init__(self) -> None: ...
    fd: Final[int]
    def take(self) -> list[int]: ...

@final
class Bell:
    def __init__(self, waker: Waker) -> None: ...
    key: Final[int]
    def ring(self) -> None: ...

@final
class Call:
    def next(self, timeout_s: float = 0.0) -> Event | None: ...
    def take(
        self,
    ) -> tuple[
        list[
            tuple[
                bytes,
                int,
                float | None,
                Literal["stop", "length", "deadline", "cancelled"] | None,
                tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None,
            ]
        ],
        bool,
    ]: ...
    def cancel(self, read: int = ...) -> None: ...
    def abort(self) -> None: ...
    def prepare_to_wait(self) -> None: ...
    waits_for_reader: Final[bool]
    done: Final[bool]
    progress: Final[int]
    cached_tokens: Final[int]
    prompt_range: Final[tuple[int, int]]
    @staticmethod
    def wake(calls: Sequence[Call]) -> None: ...
    def watch(self, bell: Bell) -> None: ...
    def wait(
        self, progress: Callable[[int, bool], object] | None = None
    ) -> None: ...
    def result(self) -> Result: ...
    def results(self) -> list[Result]: ...

@final
class Engine:
    @staticmethod
    def load_gguf(
        path: str | bytes,
        threads: int = 0,
        progress: Callable[[int, int], object] | None = None,
        packed_folder: str | bytes = "",
        quantize: str = "",
        profile: bool = False,
        pin_threads: bool = False,
    ) -> Engine: ...
    @staticmethod
    def load_files(
        config: ModelConfig,
        description: str | bytes,
        paths: Sequence[str | bytes],
        places: Sequence[tuple[str, int, int, str, int, int, str, int]],
        threads: int = 0,
        progress: Callable[[int, int], object] | None = None,
        packed_folder: str | bytes = "",
        quantize: str = "",
        profile: bool = False,
        pin_threads: bool = False,
    ) -> Engine: ...
    @staticmethod
    def from_tensors(
        config: ModelConfig,
        source: Any,
        threads: int = 0,
        quantize: str = "",
        profile: bool = False,
        pin_threads: bool = False,
    ) -> Engine: ...
    config: Final[ModelConfig]
    fingerprint: Final[str]
    weights_fingerprint: Final[str]
    threads: Final[int]
    placement: Final[tuple[bool, list[tuple[int, int, int]]]]
    packed_report: Final[tuple[str, str, str]]
    def matrices(self) -> list[tuple[str, str, int, int, int]]: ...
    steps: Final[int]
    draft_rows: Final[int]
    def with_draft(self, draft: Engine | None) -> Engine: ...
    def check_fits(self, cache: KVCache) -> None: ...
    def draft_logits(
        self, tokens: Sequence[int] | npt.NDArray[np.int32], guesses: int
    ) -> npt.NDArray[np.float32]: ...
    parallel_loops: Final[int]
    preemptions: Final[int]
    looks: Final[int]
    def check_ahead(self, seconds: float) -> bool: ...
    profiled: Final[bool]
    def profile(
        self,
    ) -> dict[
        str, tuple[int, int, int, float, dict[str, tuple[float, float]]]
    ]: ...
    def set_token_bytes(self, token_bytes: list[bytes]) -> None: ...
    def start(
        self,
        caches: list[KVCache],
        prompts: Sequence[Sequence[int] | npt.NDArray[np.int32]],
        options: list[GenerateOptions],
        streamed: bool,
        bell: Bell | None = None,
        optional_bos: Sequence[bool] = ...,
        boundaries: Sequence[Sequence[int]] = ...,
        constraints: Sequence[Any] = ...,
        progress: Callable[[int, bool], object] | None = None,
    ) -> Call | None: ...
    embedding_dims: Final[list[int]]
    def embed(
        self,
        texts: Sequence[Sequence[int] | npt.NDArray[np.int32]],
        dim: int,
        pooling: str,
        progress: Callable[[], object] | None = None,
    ) -> npt.NDArray[np.float32]: ...
    def logits(
        self,
        cache: KVCache,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        all_positions: bool,
        progress: Callable[[], object] | None = None,
    ) -> npt.NDArray[np.float32]: ...

class BlockStore:
    @property
    def tier(self) -> str: ...
    def flush(self) -> None: ...
    def clear(self) -> bool: ...
    def stats(self) -> dict[str, int]: ...

class FolderStore(BlockStore):
    def __init__(
        self, path: str | bytes, *, tier: str, mapped: bool, budget_bytes: int
    ) -> None: ...
    @property
    def budget_bytes(self) -> int: ...
    def sweep(self) -> dict[str, int]: ...
    @staticmethod
    def describe(path: str | bytes) -> dict[str, Any]: ...

class RemoteStore(BlockStore):
    def __init__(
        self, client: Any, *, secret: bytes, timeout_s: float
    ) -> None: ...
    def call_stats(self) -> dict[str, Any]: ...

class PrefixCache:
    def __init__(
        self, ram_bytes: int, tiers: Sequence[BlockStore] = ...
    ) -> None: ...
    @property
    def ram_bytes(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def pinned_bytes(self, pin: int) -> int: ...
    def unpin(self, pin: int) -> None: ...
    def flush(self, timeout_s: float) -> bool: ...
    def close(self, timeout_s: float) -> int: ...
    def clear(self, tier: str | None, timeout_s: float) -> None: ...

def with_prefix_cache(
    engine: Engine, cache: PrefixCache | None, salt: bytes
) -> Engine: ...
def prefix_match(
    engine: Engine,
    cache: KVCache,
    tokens: Sequence[int] | npt.NDArray[np.int32],
) -> None: ...
def prefix_prefetch(
    engine: Engine,
    cache: KVCache,
    tokens: Sequence[int] | npt.NDArray[np.int32],
) -> int: ...
def prefix_remove(
    engine: Engine,
    cache: KVCache,
    tokens: Sequence[int] | npt.NDArray[np.int32],
    shared: int,
) -> int: ...
def prefix_pin(engine: Engine, cache: KVCache) -> int: ...
def prefix_publish(engine: Engine, cache: KVCache) -> None: ...
def compare_with_named(
    config: ModelConfig,
) -> tuple[str, list[tuple[str, int | None, str, str]]]: ...
def model_type_names() -> list[str]: ...
def check_snapshot(
    data: bytes,
) -> tuple[int, list[tuple[str, int, int, str]]]: ...
def create_kv_cache(
    config: ModelConfig,
    capacity_tokens: int = 0,
    kv_dtype: str = "bf16",
    block_tokens: int = 64,
    checkpoint_bytes: int | None = None,
    pool: BlockPool | None = None,
) -> KVCache: ...
def sentencepiece_model(file: GgufFile) -> bytes: ...
def has_merges(file: GgufFile) -> bool: ...
@final
class PieceEncoder:
    def __init__(self, file: GgufFile) -> None: ...
    def __len__(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def find(self, piece: str) -> int: ...
    def piece(self, id: int) -> str: ...
    def pieces(self) -> list[str]: ...
    def is_byte(self, id: int) -> bool: ...
    def silent(self) -> list[int]: ...

def is_control_name(piece: str) -> bool: ...
def other_parts(names: list[str]) -> list[str]: ...
def quantize_types() -> list[str]: ...
def tensor_types() -> list[str]: ...

@final
class MachineProbe:
    """Measures what the machine can do at most; each call measures again."""

    def __init__(self, threads: int) -> None: ...
    def read_bytes_per_s(self) -> float: ...
    def int8_ops_per_s(self) -> float: ...
    def float_ops_per_s(self) -> float: ...

def check_packed_file(path: bytes) -> None: ...
def cpu_info() -> dict[str, Any]: ...
def control_groups(root: str = ..., own: str = ...) -> list[str]: ...
def memory_limit(root: str = ..., own: str = ...) -> int: ...
def placement_order(
    ids: Sequence[int], folder: str = ""
) -> list[tuple[int, int, int]]: ...
def is_guest() -> bool: ...
def set_argument_error(make: Callable[[str], ValueError]) -> None: ...
def trim_heap() -> None: ...
def force_target(name: str) -> None: ...
def numerics_id() -> int: ...
def numerics_version() -> int: ...
