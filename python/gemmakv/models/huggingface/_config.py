"""config.json to ModelConfig.

What a file omits is what transformers' configuration classes assume. What
the engine cannot honour is an error: never a model that computes something
else than its configuration says.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from gemmakv._core import ModelConfig
from gemmakv._support.documents import Section, read_object
from gemmakv.errors import CorruptFile, MismatchError, brief
from gemmakv.models.huggingface._drafter import (
    drafter_layers,
    drafter_values,
)
from gemmakv.models.huggingface._layer_sizes import (
    encoder_layers,
    experts,
    full_layer_sizes,
    per_layer_embeddings,
    rope_by_kind,
    shared_layers,
)
from gemmakv.models.huggingface._modules import (
    Modules,
    check_no_modules,
    longest_text,
    read_modules,
)
from gemmakv.models.huggingface._rope import rope_values
from gemmakv.models.huggingface._streams import (
    alternating_updates,
    sparse_layers,
    widths,
)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Defaults of one `model_type`, by the names of ModelConfig; 0 stands for
    a size that depends on others.
    """

    architecture: str
    hidden_size: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    sliding_window: int = 4096
    rms_epsilon: float = 1e-6
    # Of recurrent layers.
    lru_width: int = 0
    conv_width: int = 4


_KINDS = {
    "gemma": _Kind(
        "gemma", 3072, 24576, 28, 16, 16, 256, 256000, 8192
    ),
    "gemma2": _Kind(
        "gemma2", 2304, 9216, 26, 8, 4, 256, 256000, 8192
    ),
    "gemma3_text": _Kind(
        "gemma3", 2304, 9216, 26, 8, 4, 256, 262208, 131072
    ),
    "gemma3n_text": _Kind(
        "gemma3n", 2048, 16384, 35, 8, 2, 256, 262400, 32768, 512
    ),
    "gemma4_text": _Kind(
        "gemma4", 2304, 9216, 30, 8, 4, 256, 262144, 131072, 512
    ),
    "gemma4_unified_text": _Kind(
        "gemma4", 2304, 9216, 30, 8, 4, 256, 262144, 262144, 1024
    ),
    "embedding_gemma2_text": _Kind(
        "embeddinggemma2", 512, 2048, 24, 4, 2, 256, 262144, 262144, 512
    ),
    "vaultgemma": _Kind(
        "vaultgemma", 2304, 9216, 26, 8, 4, 256, 256000, 8192
    ),
    "recurrent_gemma": _Kind(
        "recurrentgemma", 2560, 7680, 26, 10, 0, 0, 256000, 8192, 2048
    ),
}  # fmt: skip
# The language model of a multimodal one is described in a section of its own.
_MULTIMODAL = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "embedding_gemma2": "embedding_gemma2_text",
}

# Drafters: their layers are described as those of the model that they guess
# for.
_DRAFTERS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}

_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}
_BLOCK_TYPES = {"attention": "sliding", "recurrent": "recurrent"}
_GELU_TANH = "gelu_pytorch_tanh"


@dataclasses.dataclass(frozen=True)
class FolderConfig:
    """What the configuration files of a directory say.

    tied_head: whether the embedding serves as the output head.
    names: what the model is called there.
    modules: what stands behind a model of embeddings.
    """

    config: ModelConfig
    tied_head: bool
    names: tuple[str, ...]
    modules: Modules = Modules()


def read_config(folder: Path) -> FolderConfig:
    """Reads config.json and generation_config.json of a directory.

    Raises OSError, CorruptFile for values that are wrong, MismatchError for
    models that are not supported.
    """
    path = folder / "config.json"
    top = Section(read_object(path), str(path))
    model_type = top.text("model_type", "")
    text = top
    drafter = model_type in _DRAFTERS
    if model_type in _MULTIMODAL or drafter:
        section = top.section("text_config")
        if section is None:
            raise top.wrong("text_config", "an object")
        text = section
        default = {**_MULTIMODAL, **_DRAFTERS}[model_type]
        model_type = text.text("model_type", default)
        if drafter and model_type not in _DRAFTERS.values():
            raise text.refusal("model_type", " or ".join(_DRAFTERS.values()))
    kind = _KINDS.get(model_type)
    if kind is None:
        known = ", ".join(sorted({*_KINDS, *_MULTIMODAL, *_DRAFTERS}))
        raise MismatchError(
            f"{path}: model_type is {brief(model_type)}, expected one of "
            + known
        )
    if "quantization_config" in top or "quantization_config" in text:
        raise MismatchError(
            f"{path}: the weights are quantized (quantization_config), "
            "expected F32, F16 or BF16 weights"
        )
    if model_type == "gemma3_text" and text is top and text.flag(
        "use_bidirectional_attention", False
    ):
        kind = dataclasses.replace(kind, architecture="gemma-embedding")
    has_table = model_type in ("gemma3n_text", "gemma4_text")
    if drafter:
        kind = dataclasses.replace(kind, architecture="gemma4-assistant")
    reader = _Reader(kind, text, has_table)
    values = reader.values()
    if drafter:
        values |= drafter_values(top, values["vocab_size"])
    values |= _token_ids(folder, [top, text])
    modules = Modules()
    if reader.embeds:
        size = values.get("embedding_dim") or values["hidden_size"]
        modules = read_modules(folder, size)
        values["dense_dim"] = modules.dense_dim
        values["context_length"] = min(
            values["context_length"], longest_text(folder)
        )
    else:
        check_no_modules(folder)
    try:
        config = ModelConfig(**values).named()
    except ValueError as error:
        raise CorruptFile(f"{path}: {error}") from None
    # The section of the text does not repeat what the model as a whole says.
    tied = top.flag("tie_word_embeddings", True)
    if text is not top and "tie_word_embeddings" in text:
        tied = text.flag("tie_word_embeddings", True)
    if drafter and not tied:
        raise top.refusal("tie_word_embeddings", "true for a drafter")
    name = top.text("_name_or_path", "")
    return FolderConfig(config, tied, (name,) if name else (), modules)


class _Reader:
    """Reads the section that describes a language model."""

    def __init__(self, kind: _Kind, text: Section, has_table: bool) -> None:
        self.kind = kind
        self.text = text
        self.has_table = has_table  # of per-layer embeddings, if it says so
        self.recurrent = kind.architecture == "recurrentgemma"
        # EmbeddingGemma is a Gemma 3 that looks both ways, the second one a
        # Gemma 4 that does.
        self.second = kind.architecture == "embeddinggemma2"
        self.embeds = self.second or kind.architecture == "gemma-embedding"
        self.drafts = kind.architecture == "gemma4-assistant"
        self.by_kind = (
            self.second or self.drafts or kind.architecture == "gemma4"
        )
        self.streams = kind.architecture == "gemma3n"

    def values(self) -> dict[str, Any]:
        """Arguments of ModelConfig."""
        self._check_supported()
        stated = self._stated()
        sizes = {key: stated[key] for key in _SIZES}
        if self.streams:  # that of a layer is in `stated`
            sizes["ffn_dim"] = max(sizes["ffn_dim"])
        base = ModelConfig.from_family(self.kind.architecture, **sizes)
        values = {**base.arguments(), **stated}
        values["layer_kinds"] = self._layer_kinds(base)
        values["sliding_window"] = (
            self._window() if "sliding" in values["layer_kinds"] else 0
        )
        if self.second:
            values |= encoder_layers(self.text, values["layer_kinds"], base)
        elif self.drafts:
            values |= drafter_layers(self.text, values["layer_kinds"], base)
        elif self.by_kind:
            values |= full_layer_sizes(
                self.text, values["layer_kinds"], base
            )
            values |= shared_layers(
                self.text, values["layer_kinds"], values["ffn_dim"]
            )
            values |= rope_by_kind(
                self.text, values["layer_kinds"], values["head_dim"]
            )
            values |= per_layer_embeddings(self.text, self.has_table)
            values |= experts(self.text)
        elif self.streams:
            values |= alternating_updates(self.text, values)
            values |= shared_layers(
                self.text, values["layer_kinds"], values["ffn_dim"], 15
            )
            values |= sparse_layers(self.text, base)
            values |= rope_values(self.text, base, values["layer_kinds"])
        else:
            values["query_scale"] = self._query_scale(base.head_dim)
            values |= rope_values(self.text, base, values["layer_kinds"])
        if not self.drafts:  # theirs are never capped, whatever a file says
            values |= self._soft_caps(base)
        if "recurrent" in values["layer_kinds"]:
            values["lru_blocks"] = stated["num_heads"]
        else:
            values["lru_width"] = values["conv_width"] = 0
        return values

    def _stated(self) -> dict[str, Any]:
        """What has a key of its own, or the defaults of its kind."""
        text = self.text
        values: dict[str, Any] = {}
        for name, key, is_size in ModelConfig.json_keys():
            default = getattr(self.kind, name, None)
            if name == "ffn_dim" and self.streams:
                count = values["num_layers"]
                values[name] = widths(text, key, self.kind.ffn_dim, count)
            elif default is not None or key in text:
                read = text.size if is_size else text.number
                values[name] = read(key, default or 0)
            if name == "num_layers" and values[name] > 4096:
                raise text.wrong(key, "at most 4096")
        hidden, heads = values["hidden_size"], values["num_heads"]
        values["kv_heads"] = values["kv_heads"] or heads
        values["head_dim"] = self._head_dim(hidden, heads)
        values["lru_width"] = values["lru_width"] or hidden
        if self.recurrent:  # counts both halves of its gated layer
            values["ffn_dim"] //= 2
        return values

    def _check_supported(self) -> None:
        text = self.text
        for key in ("hidden_activation", "hidden_act"):
            found = text.text(key, _GELU_TANH)
            # The first generation says "gelu" and means its approximation.
            legacy = found == "gelu" and (
                key == "hidden_act" or self.kind.architecture == "gemma"
            )
            if found != _GELU_TANH and not legacy:
                raise self.text.refusal(key, repr(_GELU_TANH))
        if text.flag("attention_bias", False):
            raise self.text.refusal("attention_bias", "false")
        if not text.flag("embeddings_scale_by_sqrt_dim", True):
            raise self.text.refusal("embeddings_scale_by_sqrt_dim", "true")
        if not (self.embeds or text.flag("is_causal", True)):
            raise self.text.refusal("is_causal", "true")
        both_ways = text.values.get("use_bidirectional_attention")
        # Of image tokens only: text is causal.
        vision = self.by_kind and both_ways == "vision"
        if both_ways and not (self.embeds or vision):
            raise self.text.refusal(
                "use_bidirectional_attention",
                "null or 'vision'" if self.by_kind else "false",
            )

    def _head_dim(self, hidden: int, heads: int) -> int:
        default = self.kind.head_dim or hidden // heads
        head_dim = self.text.size("head_dim", default or 1)
        if self.recurrent and head_dim != hidden // heads:
            raise self.text.refusal(
                "head_dim", f"hidden_size / num_attention_heads, {default}"
            )
        return head_dim

    def _layer_kinds(self, base: ModelConfig) -> list[str]:
        if self.recurrent:
            for key in ("block_types", "_block_types"):
                blocks = self.text.texts(key)
                if blocks is not None:
                    kinds = self._kinds_of(key, blocks, _BLOCK_TYPES)
                    count = len(kinds)
                    return [kinds[i % count] for i in range(base.num_layers)]
            return base.layer_kinds
        types = self.text.texts("layer_types")
        if types is not None:
            kinds = self._kinds_of("layer_types", types, _LAYER_TYPES)
            if len(kinds) != base.num_layers:
                raise self.text.wrong(
                    "layer_types",
                    f"{base.num_layers} entries, found {len(kinds)}",
                )
            if self.by_kind and kinds[-1] != "full":
                raise self.text.wrong(
                    "layer_types", "'full_attention' as the last one"
                )
            if "sliding" in kinds and "sliding" not in base.layer_kinds:
                raise self.text.refusal("layer_types", "'full_attention' alone")
            return kinds
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            if key in self.text and (
                self.embeds or self.kind.architecture == "gemma3"
            ):
                period = self.text.size(key, 6)
                kinds = [
                    "sliding" if (i + 1) % period else "full"
                    for i in range(base.num_layers)
                ]
                return [*kinds[:-1], "full"] if self.second else kinds
        if self.by_kind:
            return [*base.layer_kinds[:-1], "full"]
        return base.layer_kinds

    def _kinds_of(
        self, key: str, types: list[str], known: dict[str, str]
    ) -> list[str]:
        if not types:
            raise self.text.wrong(key, "at least one entry")
        for entry in types:
            if entry not in known:
                raise self.text.refusal(
                    key, f"{' or '.join(known)}, found {brief(entry)}"
                )
        return [known[entry] for entry in types]

    def _window(self) -> int:
        key = "sliding_window"
        if self.recurrent and key not in self.text:
            key = "attention_window_size"
        if key in self.text.values and key not in self.text:
            raise self.text.wrong(key, "a window of layers that slide")
        window = self.text.size(key, self.kind.sliding_window)
        if self.second:  # files state the distance that is seen
            return window + 1
        # Or twice that distance.
        return window // 2 + 1 if self.embeds else window

    def _query_scale(self, head_dim: int) -> float:
        known = ("gemma2", "gemma3", "vaultgemma")
        if self.embeds or self.kind.architecture in known:
            divisor = self.text.number("query_pre_attn_scalar", 256)
            if divisor <= 0:
                raise self.text.wrong(
                    "query_pre_attn_scalar", "a positive number"
                )
        else:
            divisor = head_dim
        return 1.0 / math.sqrt(divisor)

    def _soft_caps(self, base: ModelConfig) -> dict[str, float]:
        def cap(key: str, default: float) -> float:
            if key not in self.text:
                # null switches a cap off.
                return 0.0 if key in self.text.values else default
            value = self.text.number(key, default)
            if value <= 0:
                raise self.text.wrong(key, "a positive number or null")
            return value

        final = (
            "logits_soft_cap" if self.recurrent else "final_logit_softcapping"
        )
        caps = {}
        if self.kind.architecture != "gemma":
            caps["final_soft_cap"] = cap(
                final, 0.0 if self.by_kind else base.final_soft_cap
            )
        elif final in self.text:
            raise self.text.refusal(final, "null for this model_type")
        attn = "attn_logit_softcapping"
        if base.attn_soft_cap:
            caps["attn_soft_cap"] = cap(attn, base.attn_soft_cap)
        elif attn in self.text:
            # The reference has the key for Gemma 3, and ignores it.
            raise self.text.refusal(attn, "null for this model_type")
        return caps


# What a family's part depends on.
_SIZES = (
    "hidden_size", "num_layers", "num_heads", "kv_heads", "head_dim",
    "ffn_dim",
)  # fmt: skip


def _token_ids(folder: Path, sections: list[Section]) -> dict[str, Any]:
    """eos_ids and bos_id: generation_config.json before config.json."""
    generation = Section.of_file(folder / "generation_config.json")
    sections = [generation, *sections]
    found: dict[str, Any] = {"eos_ids": [1], "bos_id": 2}
    for section in reversed(sections):
        eos = section.token_ids("eos_token_id")
        bos = section.token_ids("bos_token_id")
        if eos:
            found["eos_ids"] = sorted(set(eos))
        if bos is not None:
            if len(bos) != 1:
                raise section.wrong("bos_token_id", "one token id")
            found["bos_id"] = bos[0]
    return found
