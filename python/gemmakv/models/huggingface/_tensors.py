"""Names and shapes of a checkpoint's tensors, and what they are to the core."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from gemmakv._core import ModelConfig
from gemmakv.errors import CorruptFile, MismatchError, brief
from gemmakv.models._forms import parts_beside
from gemmakv.models.huggingface._safetensors import StoredTensor

# How a tensor becomes what the core takes (cpp/io/tensor_files.h).
_AS_STORED = "as stored"
_PLUS_ONE = "plus one"
_INTEGERS = "integers"
_TRANSPOSED = "blocks transposed"

# (name, file, offset, type, rows, columns, form, blocks)
Place = tuple[str, int, int, str, int, int, str, int]

_FLOAT_TYPES = ("F32", "F16", "BF16")

# In front of the language model's names, the longest first.
_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclasses.dataclass(frozen=True)
class _Want:
    """A tensor of the model: its name in the core and in the checkpoint, and
    the shape that it has there.
    """

    core: str
    name: str
    shape: tuple[int, ...]
    form: str = _AS_STORED

    def place(self, file: int, stored: StoredTensor) -> Place:
        blocks = 1
        if self.core.endswith("_exps.weight"):  # a matrix for each expert
            blocks, rows, cols = self.shape
            rows *= blocks
        elif len(self.shape) == 3 and self.form == _TRANSPOSED:
            blocks, cols, block_rows = self.shape
            rows = blocks * block_rows
        elif len(self.shape) == 3:  # a depthwise convolution: [width, 1, taps]
            rows, _, cols = self.shape
        elif len(self.shape) == 2 and self.core.endswith(".bias"):
            rows, cols = 1, self.shape[0] * self.shape[1]
        elif len(self.shape) == 2:
            rows, cols = self.shape
        else:
            rows, cols = 1, self.shape[0]
        dtype = "F32" if self.form == _INTEGERS else stored.dtype
        return (
            self.core, file, stored.offset, dtype, rows, cols,
            self.form, blocks,
        )  # fmt: skip


# Norms of a layer: the core's names and the checkpoint's. What is called
# post_attention_layernorm stands behind attention only where there are four.
_TWO_NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_VAULT_NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_RECURRENT_NORMS = {
    "attn_norm": "temporal_pre_norm",
    "ffn_norm": "channel_pre_norm",
}


_PLAIN_NORMS = ("gemma3n", "gemma4", "embeddinggemma2", "gemma4-assistant")


def _norm(config: ModelConfig, core: str, name: str, size: int) -> _Want:
    plain = config.architecture in _PLAIN_NORMS
    form = _AS_STORED if plain else _PLUS_ONE
    return _Want(core, name, (size,), form)


def _shares(config: ModelConfig, layer: int) -> bool:
    """Whether the layer reads the keys and values of another."""
    if config.target_hidden:
        return True
    owners = config.shares_kv
    return owners is not None and owners[layer] is not None


# What files may hold of such layers, for no use.
_UNREAD = ("k_proj.weight", "v_proj.weight", "k_norm.weight")


def _at(value: int, layer: int) -> int:
    """Of a layer: fields are lists where layers differ."""
    return value[layer] if isinstance(value, list) else value


def _linear(
    core: str, name: str, shape: tuple[int, ...], bias: bool = True
) -> Iterator[_Want]:
    yield _Want(f"{core}.weight", f"{name}.weight", shape)
    if bias:
        yield _Want(f"{core}.bias", f"{name}.bias", shape[:1])


def _layer(config: ModelConfig, i: int) -> Iterator[_Want]:
    hidden, ffn = config.hidden_size, _at(config.ffn_dim, i)
    core, name = f"blk.{i}.", f"layers.{i}."
    recurrent_family = config.architecture == "recurrentgemma"
    if recurrent_family:
        norms = _RECURRENT_NORMS
    else:
        norms = _FOUR_NORMS if config.post_norms else _TWO_NORMS
        if config.architecture == "vaultgemma":
            norms = _VAULT_NORMS
    for core_norm, norm in norms.items():
        yield _norm(
            config, f"{core}{core_norm}.weight", f"{name}{norm}.weight", hidden
        )
    if config.ple_dim:
        ple = name if config.ple_vocab else f"{name}ple_block."
        for part, other, shape in (
            ("inp_gate", "per_layer_input_gate", (config.ple_dim, hidden)),
            ("proj", "per_layer_projection", (hidden, config.ple_dim)),
            ("post_norm", "post_per_layer_input_norm", (hidden,)),
        ):
            yield _Want(
                f"{core}{part}.weight", f"{ple}{other}.weight", shape
            )
    if config.num_experts:
        yield from _experts(config, core, name)
    if config.layer_scales:
        yield _Want(
            core + "layer_output_scale.weight", name + "layer_scalar", (1,)
        )
    if config.altup_inputs:
        yield from _altup(config, core, f"{name}altup.")
    if config.laurel_rank:
        yield from _laurel(config, core, f"{name}laurel.")
    block = name + ("temporal_block." if recurrent_family else "self_attn.")
    if config.layer_kinds[i] == "recurrent":
        yield from _recurrent(config, core, block)
    else:
        yield from _attention(config, i, core, block)
    mlp = name + ("mlp_block." if recurrent_family else "mlp.")
    for part, rows, cols in (
        ("gate", ffn, hidden),
        ("up", ffn, hidden),
        ("down", hidden, ffn),
    ):
        yield from _linear(
            f"{core}ffn_{part}",
            f"{mlp}{part}_proj",
            (rows, cols),
            config.biases,
        )


def _experts(config: ModelConfig, core: str, name: str) -> Iterator[_Want]:
    """What stands beside the feed-forward of a layer."""
    hidden, ffn = config.hidden_size, config.expert_ffn_dim
    count = config.num_experts
    for part, other, shape in (
        ("ffn_gate_inp.weight", "router.proj.weight", (count, hidden)),
        ("ffn_gate_inp.scale", "router.scale", (hidden,)),
        ("ffn_down_exps.scale", "router.per_expert_scale", (count,)),
        ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight",
         (hidden,)),
        ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight",
         (hidden,)),
        ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight",
         (hidden,)),
        ("ffn_gate_up_exps.weight", "experts.gate_up_proj",
         (count, 2 * ffn, hidden)),
        ("ffn_down_exps.weight", "experts.down_proj", (count, hidden, ffn)),
    ):
        yield _Want(core + part, name + other, shape)


def _altup(config: ModelConfig, core: str, name: str) -> Iterator[_Want]:
    hidden, inputs = config.hidden_size, config.altup_inputs
    core += "altup_"
    yield _norm(
        config, core + "router_norm.weight", name + "router_norm.weight", hidden
    )
    for part, other, shape in (
        ("router", "modality_router", (inputs, hidden)),
        ("predict_coef", "prediction_coefs", (inputs**2, inputs)),
        ("correct_coef", "correction_coefs", (inputs, inputs)),
    ):
        yield _Want(f"{core}{part}.weight", f"{name}{other}.weight", shape)
    if config.altup_correct_scale:
        yield _Want(
            core + "correct_scale.weight", name + _CORRECT_SCALE, (hidden,)
        )


_CORRECT_SCALE = "correct_output_scale"


def _laurel(config: ModelConfig, core: str, name: str) -> Iterator[_Want]:
    hidden, rank = config.hidden_size, config.laurel_rank
    for part, other, shape in (
        ("laurel_l", "linear_left", (rank, hidden)),
        ("laurel_r", "linear_right", (hidden, rank)),
        ("laurel_post_norm", "post_laurel_norm", (hidden,)),
    ):
        yield _Want(f"{core}{part}.weight", f"{name}{other}.weight", shape)


def _attention(
    config: ModelConfig, i: int, core: str, block: str
) -> Iterator[_Want]:
    hidden, head_dim = config.hidden_size, _at(config.head_dim, i)
    num_heads = _at(config.num_heads, i)
    kv_heads = _at(config.kv_heads, i)
    keys_are_values = (
        config.keys_are_values and config.layer_kinds[i] == "full"
    )
    for part, heads in (("q", num_heads), ("k", kv_heads), ("v", kv_heads)):
        if part == "v" and keys_are_values:
            continue
        if part != "q" and _shares(config, i):
            continue
        yield _Want(
            f"{core}attn_{part}.weight",
            f"{block}{part}_proj.weight",
            (heads * head_dim, hidden),
        )
        if config.qk_norm and part != "v":
            yield _norm(
                config,
                f"{core}attn_{part}_norm.weight",
                f"{block}{part}_norm.weight",
                head_dim,
            )
    yield from _linear(
        core + "attn_output",
        block + "o_proj",
        (hidden, num_heads * head_dim),
        config.biases,
    )


def _recurrent(config: ModelConfig, core: str, block: str) -> Iterator[_Want]:
    hidden, width = config.hidden_size, config.lru_width
    blocks = config.lru_blocks
    size = width // blocks
    for part, name, rows, cols in (
        ("x", "x", width, hidden),
        ("y", "y", width, hidden),
        ("output", "out", hidden, width),
    ):
        yield from _linear(
            f"{core}rec_{part}", f"{block}linear_{name}", (rows, cols)
        )
    yield from _linear(
        core + "rec_conv", block + "conv_1d", (width, 1, config.conv_width)
    )
    for part, name in (
        ("input_gate", "input_gate"),
        ("a_gate", "recurrent_gate"),
    ):
        yield _Want(
            f"{core}rec_{part}.weight",
            f"{block}rg_lru.{name}_weight",
            (blocks, size, size),
            _TRANSPOSED,
        )
        yield _Want(
            f"{core}rec_{part}.bias",
            f"{block}rg_lru.{name}_bias",
            (blocks, size),
        )
    yield _Want(
        core + "rec_a_param", block + "rg_lru.recurrent_param", (width,)
    )


def _wanted(config: ModelConfig) -> Iterator[_Want]:
    """Everything but the output head, without the checkpoint's prefix."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield _Want("token_embd.weight", "embed_tokens.weight", (vocab, hidden))
    last = "final_norm" if config.architecture == "recurrentgemma" else "norm"
    yield _norm(config, "output_norm.weight", last + ".weight", hidden)
    if config.ple_dim:
        width = config.num_layers * config.ple_dim
        if config.ple_vocab:
            yield _Want(
                "per_layer_token_embd.weight",
                "embed_tokens_per_layer.weight",
                (config.ple_vocab, width),
            )
        ple = "" if config.ple_vocab else "ple."
        yield _Want(
            "per_layer_model_proj.weight",
            f"{ple}per_layer_model_projection.weight",
            (width, hidden),
        )
        yield _norm(
            config,
            "per_layer_proj_norm.weight",
            f"{ple}per_layer_projection_norm.weight",
            config.ple_dim,
        )
    if config.embedding_dim:
        yield _Want(
            "embedding_projection.weight",
            "embedding_projection.weight",
            (config.embedding_dim, hidden),
        )
    for i in range(max(0, config.altup_inputs - 1)):
        for part, other in (
            ("altup_proj", "altup_projections"),
            ("altup_unembd_proj", "altup_unembed_projections"),
        ):
            yield _Want(
                f"{part}.{i}.weight", f"{other}.{i}.weight", (hidden, hidden)
            )
    for i in range(config.num_layers):
        yield from _layer(config, i)


def _drafter(config: ModelConfig) -> Iterator[_Want]:
    """What stands beside a drafter's layers, without any prefix."""
    hidden, target = config.hidden_size, config.target_hidden
    for part, shape in (
        ("pre_projection", (hidden, 2 * target)),
        ("post_projection", (target, hidden)),
    ):
        yield _Want(f"nextn.{part}.weight", f"{part}.weight", shape)
    if config.num_centroids:
        yield _Want(
            "masked_embd_centroids.weight",
            "masked_embedding.centroids.weight",
            (config.num_centroids, hidden),
        )
        yield _Want(
            "masked_embd_ordering",
            "masked_embedding.token_ordering",
            (config.vocab_size,),
            _INTEGERS,
        )


def place_tensors(
    config: ModelConfig,
    *,
    tied_head: bool,
    stored: Mapping[str, StoredTensor],
    folder: Path,
    dense: Mapping[str, StoredTensor] | None = None,
) -> tuple[list[str], list[Place], list[str]]:
    """(files, places in them, names of tensors that were left out). `dense`:
    those of modules behind the model, by the core's names.

    Raises CorruptFile for tensors that are missing, unexpected or of a shape
    that contradicts the configuration; MismatchError for types that are not
    supported.
    """
    prefix = _prefix_of(stored, folder)
    wants = [
        dataclasses.replace(want, name=prefix + want.name)
        for want in _wanted(config)
    ]
    if config.target_hidden:
        wants += _drafter(config)
    if not tied_head:
        name = next((name for name in _HEADS if name in stored), _HEADS[0])
        shape = (config.vocab_size, config.hidden_size)
        wants.append(_Want("output.weight", name, shape))
    files: dict[str, int] = {}
    places = []
    for want in wants:
        tensor = _require(want, stored, folder)
        file = files.setdefault(tensor.path, len(files))
        places.append(want.place(file, tensor))
    outer, inner = config.hidden_size, config.dense_dim
    for core, tensor in (dense or {}).items():
        shape = (inner, outer) if core == "dense_2.weight" else (outer, inner)
        want = _Want(core, core, shape)
        found = _require(want, {core: tensor}, folder)
        file = files.setdefault(found.path, len(files))
        places.append(want.place(file, found))
    used = {want.name for want in wants} | set(_HEADS)
    used |= {
        f"{prefix}layers.{i}.self_attn.{name}"
        for i in range(config.num_layers)
        if _shares(config, i)
        for name in _UNREAD
    }
    if config.altup_inputs and not config.altup_correct_scale:
        used |= {
            f"{prefix}layers.{i}.altup.{_CORRECT_SCALE}"
            for i in range(config.num_layers)
        }
    return list(files), places, _left_out(stored, used, folder)


def tied_tensors(
    stored: Mapping[str, StoredTensor], folder: Path
) -> tuple[StoredTensor, StoredTensor] | None:
    """The embedding, and the output head that a file has in spite of it."""
    embedding = stored[_prefix_of(stored, folder) + "embed_tokens.weight"]
    heads = [stored[name] for name in _HEADS if name in stored]
    return (embedding, heads[0]) if heads else None


def _prefix_of(stored: Mapping[str, StoredTensor], folder: Path) -> str:
    for prefix in _PREFIXES:
        if prefix + "embed_tokens.weight" in stored:
            return prefix
    raise CorruptFile(
        f"{folder}: tensor model.embed_tokens.weight is missing among "
        f"{len(stored)} tensors"
    )


def _require(
    want: _Want, stored: Mapping[str, StoredTensor], folder: Path
) -> StoredTensor:
    tensor = stored.get(want.name)
    if tensor is None:
        raise CorruptFile(
            f"{folder}: tensor {want.name} is missing, expected shape "
            f"{list(want.shape)}"
        )
    if tensor.shape != want.shape:
        raise CorruptFile(
            f"{tensor.path}: tensor {want.name} has shape "
            f"{list(tensor.shape)}, expected {list(want.shape)} by config.json"
        )
    known = ("I64",) if want.form == _INTEGERS else _FLOAT_TYPES
    if tensor.dtype not in known:
        raise MismatchError(
            f"{tensor.path}: tensor {want.name} has type {tensor.dtype}, "
            f"expected {'one of ' * (len(known) > 1)}{', '.join(known)}"
        )
    return tensor


def _left_out(
    stored: Mapping[str, StoredTensor],
    used: set[str],
    folder: Path,
) -> list[str]:
    """Tensors of other parts; anything else that is not used is an error."""
    rest = [
        name
        for name in stored
        if name not in used and not name.endswith("rotary_emb.inv_freq")
    ]
    others = parts_beside(rest)
    unknown = sorted(set(rest) - set(others))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CorruptFile(
            f"{folder}: unexpected tensor {brief(unknown[0])}{more}: "
            "config.json describes no such part"
        )
    return others
