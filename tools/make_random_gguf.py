"""Writes Gemma GGUF files with random weights: for benchmarks and tests.

    python tools/make_random_gguf.py --tokenizer-from DEMO.gguf OUT.gguf
    python tools/make_random_gguf.py --tiny --type Q4_K OUT.gguf

The first writes a Gemma 3 1B shape in Q4_0 (Q8_0 embedding, which is what
quantizers choose for a width that is no multiple of 256), or with
--architecture that of the 2B model of Gemma 1 or 2, of Gemma 3n's E2B, of
EmbeddingGemma, with "gemma4-e2b" of Gemma 4 E2B (4.1 GB), or with "gemma4-moe"
half the width of Gemma 4 26B-A4B, with as many experts (3.2 GB): speed does not
depend on the values, so a benchmark needs no download. The second writes a file
of some hundred KB that runs in milliseconds. Same arguments, same bytes.

Weights are drawn as *stored* blocks, not quantized from numbers, so every
type is as good as another and what a reader dequantizes is the truth. Scales
keep activations near 1, attention neither flat nor saturated, and logits
spread enough that a wrong mask or position changes them.

Needs numpy and, when called, the package `gguf`. Tests import it through
tests/python/support/tiny_models.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Gemma model; the defaults are a tiny Gemma 3."""

    architecture: str = "gemma3"
    hidden: int = 64
    layers: int = 7  # layer 5 attends fully, the others slide
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 96
    vocab: int = 512
    window: int = 32  # as files have it; 0: not stated
    context: int = 2048
    attention_cap: float = 0  # 0: not stated
    final_cap: float = 0
    # Gemma 4: of full layers, whose keys are the values; one in `period`.
    full_kv_heads: int = 0
    full_head_dim: int = 0
    period: int = 6
    experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0
    dense: int = 0  # behind the mean of EmbeddingGemma
    # Of Gemma 3n.
    streams: int = 0
    ple: int = 0
    laurel: int = 0
    shared: int = 0  # last layers without keys and values of their own
    shared_ffn: int = 0  # of these layers; 0: as of the others
    sparse: int = 0  # first layers of which 5% of the gates count

    @property
    def gemma4(self) -> bool:
        return self.architecture == "gemma4"

    @property
    def qk_norm(self) -> bool:
        return self.architecture in (
            "gemma3", "gemma3n", "gemma4", "gemma-embedding")

    def slides(self, layer: int) -> bool:
        """Of a Gemma 4."""
        return (layer + 1) % self.period != 0

    def ffn_of(self, layer: int) -> int:
        shares = layer >= self.layers - self.shared
        return self.shared_ffn if shares and self.shared_ffn else self.ffn

    @property
    def post_norms(self) -> bool:
        return self.architecture != "gemma"


# K-quants store 256 values a block, so every width is a multiple of that.
WIDE = Shape(hidden=256, layers=2, heads=4, kv_heads=1, head_dim=64, ffn=512)
GEMMA3_1B = Shape(hidden=1152, layers=26, heads=4, kv_heads=1, head_dim=256,
                  ffn=6912, vocab=262144, window=512, context=32768)
GEMMA3_4B = Shape(hidden=2560, layers=34, heads=8, kv_heads=4, head_dim=256,
                  ffn=10240, vocab=262144, window=1024, context=131072)
GEMMA_2B = Shape("gemma", hidden=2048, layers=18, heads=8, kv_heads=1,
                 head_dim=256, ffn=16384, vocab=256000, window=0, context=8192)
GEMMA2_2B = Shape("gemma2", hidden=2304, layers=26, heads=8, kv_heads=4,
                  head_dim=256, ffn=9216, vocab=256000, window=4096,
                  context=8192, attention_cap=50, final_cap=30)
GEMMA4_MOE = Shape("gemma4", hidden=1408, layers=24, heads=8, kv_heads=4,
                   head_dim=256, ffn=1056, vocab=262144, window=1024,
                   context=262144, final_cap=30, full_kv_heads=1,
                   full_head_dim=512, experts=128, experts_used=8,
                   expert_ffn=352)
GEMMA4_E2B = Shape("gemma4", hidden=1536, layers=35, heads=8, kv_heads=1,
                   head_dim=256, ffn=6144, vocab=262144, window=512,
                   context=131072, final_cap=30, full_kv_heads=1,
                   full_head_dim=512, period=5, ple=256, shared=20,
                   shared_ffn=12288)
TINY_MOE = Shape("gemma4", window=16, final_cap=30, full_kv_heads=1,
                 full_head_dim=64, period=3, layers=6, experts=8,
                 experts_used=3, expert_ffn=32)
WIDE_MOE = dataclasses.replace(
    TINY_MOE, hidden=256, layers=3, heads=4, head_dim=64, full_head_dim=128,
    ffn=512, expert_ffn=256)
EMBEDDING_300M = Shape("gemma-embedding", hidden=768, layers=24, heads=3,
                       kv_heads=1, head_dim=256, ffn=1152, vocab=262144,
                       window=512, context=2048, dense=3072)
GEMMA3N_E2B = Shape("gemma3n", hidden=2048, layers=30, heads=8, kv_heads=2,
                    head_dim=256, ffn=8192, vocab=262144, window=512,
                    context=32768, final_cap=30, streams=4, ple=256, laurel=64,
                    shared=10, sparse=10)
LARGE = {"gemma3-4b": GEMMA3_4B, "gemma4-moe": GEMMA4_MOE,
         "gemma4-e2b": GEMMA4_E2B}
LARGE.update((shape.architecture, shape)
             for shape in (GEMMA_2B, GEMMA2_2B, GEMMA3_1B, GEMMA3N_E2B,
                           EMBEDDING_300M))


def of_family(shape: Shape, architecture: str) -> Shape:
    """The same sizes as a model of another family; those of experts are their
    own.
    """
    if architecture == "gemma4-moe":
        return WIDE_MOE if shape == WIDE else TINY_MOE
    if architecture == "gemma4-e2b":
        shape = WIDE_MOE if shape == WIDE else TINY_MOE
        return dataclasses.replace(
            shape, layers=4, period=2, experts=0, ple=256, shared=2,
            shared_ffn=2 * shape.ffn)
    window = 0 if architecture == "gemma" else shape.window
    if architecture == "gemma3n":
        # A layer of each kind is its own.
        few = shape.layers < 7
        shape = dataclasses.replace(
            shape, streams=4, ple=128 if few else shape.head_dim, laurel=32,
            shared=0 if few else 2, sparse=1)
    dense = 2 * shape.hidden if architecture == "gemma-embedding" else 0
    return dataclasses.replace(shape, architecture=architecture, window=window,
                               dense=dense)


# Standard deviation of a stored block's values where its scale d is 1, and
# the factor dmin / d that gives K-quants a mean of zero.
_SPREAD = {"Q4_0": 4.6, "Q5_0": 9.2, "Q8_0": 74.0, "Q4_K": 258.0,
           "Q5_K": 534.0, "Q6_K": 342.0}
_MIN_RATIO = {"Q4_K": 7.5, "Q5_K": 15.5}


def _floats_to_stored(values: np.ndarray, name: str) -> np.ndarray:
    if name == "F32":
        return values.astype(np.float32)
    if name == "F16":
        return values.astype(np.float16)
    # Truncation is as good a rounding as any for random numbers.
    bits = values.astype(np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16).view(np.uint8)


def random_matrix(rng: np.random.Generator, name: str, rows: int, cols: int,
                  deviation: float) -> np.ndarray:
    """A matrix as stored: floats [rows, cols] or bytes [rows, row bytes].

    Raises ValueError if `cols` is not a whole number of blocks.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    if values == 1:
        matrix = rng.standard_normal((rows, cols), np.float32) * deviation
        return _floats_to_stored(matrix.astype(np.float32), name)
    if cols % values:
        raise ValueError(f"{cols} columns are no multiple of {values} ({name})")
    count = rows * (cols // values)
    blocks = np.frombuffer(rng.bytes(count * size), np.uint8)
    blocks = blocks.reshape(count, size).copy()
    scale = rng.uniform(0.7, 1.3, count) * deviation / _SPREAD[name]
    offset = 208 if name == "Q6_K" else 0
    blocks[:, offset:offset + 2] = scale.astype("<f2").view(np.uint8).reshape(
        count, 2)
    if name in _MIN_RATIO:
        minimum = (scale * _MIN_RATIO[name]).astype("<f2")
        blocks[:, 2:4] = minimum.view(np.uint8).reshape(count, 2)
    if name == "Q6_K":
        # Small sub-scales keep d a normal half-precision number.
        scales = rng.integers(-32, 32, (count, 16), dtype=np.int8)
        blocks[:, 192:208] = scales.view(np.uint8)
    return blocks.reshape(rows, cols // values * size)


def tiny_vocabulary(size: int) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types with Gemma's special ids and byte fallback.

    Raises ValueError if `size` is below 361 (specials, bytes, ASCII).
    """
    control, unknown, normal, byte = 3, 2, 1, 6
    entries = [("<pad>", control), ("<eos>", control), ("<bos>", control),
               ("<unk>", unknown)]
    bytes_left = [(f"<0x{b:02X}>", byte) for b in range(256)]
    entries += bytes_left[:101]
    entries += [("<start_of_turn>", control), ("<end_of_turn>", control)]
    entries += bytes_left[101:]
    letters = [chr(c) for c in range(33, 127)] + ["\n", "\u2581"]
    if size < len(entries) + len(letters):
        raise ValueError(f"a vocabulary of {size} has no room for the bytes")
    common = "etaoinshrdlu"
    pairs = ["\u2581" + a for a in common] + [a + b for a in common
                                              for b in common]
    pieces = (pairs + letters)[-(size - len(entries)):] if (
        size - len(entries) < len(pairs) + len(letters)) else pairs + letters
    entries += [(piece, normal) for piece in pieces]
    entries += [(f"<unused{i}>", 5) for i in range(size - len(entries))]
    # The better a merge, the higher its score; byte pieces are never merged.
    scores = [0.0] * 262 + [-float(i) for i in range(size - 262)]
    return ([e[0] for e in entries], scores, [e[1] for e in entries])


def copied_vocabulary(path: str | pathlib.Path):
    """Tokens, scores and types of another GGUF file."""
    import gguf

    fields = gguf.GGUFReader(str(path)).fields
    return tuple(fields[f"tokenizer.ggml.{key}"].contents()
                 for key in ("tokens", "scores", "token_type"))


def _write_metadata(writer, shape: Shape, vocabulary) -> None:
    writer.add_name("random weights")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(
        [shape.ffn_of(i) for i in range(shape.layers)]
        if shape.shared_ffn else shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.gemma4:
        _write_gemma4_metadata(writer, shape)
    else:
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    if shape.qk_norm and not shape.gemma4:
        writer.add_rope_freq_base(1e6)
    if shape.streams:
        writer.add_altup_active_idx(0)
        writer.add_altup_num_inputs(shape.streams)
        writer.add_embedding_length_per_layer_input(shape.ple)
        writer.add_shared_kv_layers(shape.shared)
        writer.add_activation_sparsity_scale(
            [1.6448535 if i < shape.sparse else -math.inf
             for i in range(shape.layers)])
        writer.add_sliding_window_pattern(
            [i % 5 != 4 for i in range(shape.layers)])
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.attention_cap:
        writer.add_attn_logit_softcapping(shape.attention_cap)
    if shape.dense:
        mean = 1
        name = shape.architecture
        writer.add_uint32(f"{name}.pooling_type", mean)
        writer.add_uint32(f"{name}.dense_2_feat_in", shape.hidden)
        writer.add_uint32(f"{name}.dense_2_feat_out", shape.dense)
        writer.add_uint32(f"{name}.dense_3_feat_in", shape.dense)
        writer.add_uint32(f"{name}.dense_3_feat_out", shape.hidden)
    if shape.final_cap:
        writer.add_final_logit_softcapping(shape.final_cap)
    tokens, scores, types = vocabulary
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(shape.dense > 0)
    writer.add_add_space_prefix(False)


def _write_gemma4_metadata(writer, shape: Shape) -> None:
    slides = [shape.slides(i) for i in range(shape.layers)]
    writer.add_head_count_kv([
        shape.kv_heads if s else shape.full_kv_heads for s in slides])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(shape.full_head_dim)
    writer.add_value_length(shape.full_head_dim)
    writer.add_key_length_swa(shape.head_dim)
    writer.add_value_length_swa(shape.head_dim)
    writer.add_rope_dimension_count(shape.full_head_dim)
    writer.add_rope_dimension_count_swa(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_shared_kv_layers(shape.shared)
    writer.add_embedding_length_per_layer_input(shape.ple)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.expert_ffn)


def rope_divisors(shape: Shape) -> np.ndarray:
    """A quarter of the pairs of full layers turn."""
    pairs = shape.full_head_dim // 2
    return np.where(np.arange(pairs) < pairs // 4, 1, 1e30).astype(np.float32)


def _expert_plan(shape: Shape):
    """(name, matrices, rows or None for a vector, cols, spread) of a layer."""
    h, ffn, count = shape.hidden, shape.expert_ffn, shape.experts
    # Scores far enough apart that one expert does not count as any other.
    yield "ffn_gate_inp.weight", 1, count, h, 2.0
    yield "ffn_gate_inp.scale", 1, None, h, 1.0
    yield "ffn_down_exps.scale", 1, None, count, 1.0
    for norm in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
        yield f"{norm}.weight", 1, None, h, 1.0
    yield "ffn_gate_up_exps.weight", count, 2 * ffn, h, h ** -0.5
    yield "ffn_down_exps.weight", count, h, ffn, ffn ** -0.5


def tensor_plan(shape: Shape, matrix_type, embedding_type: str):
    """Yields (name, type name, matrices, rows or None for a vector, cols,
    spread).
    """
    h = shape.hidden
    types = [matrix_type] if isinstance(matrix_type, str) else list(matrix_type)
    drawn = 0
    # Small embeddings and strong layers: else the tied head just repeats the
    # last token, and no error anywhere would change the most likely one.
    yield ("token_embd.weight", embedding_type, 1, shape.vocab, h,
           0.3 * h ** -0.5)
    if shape.ple:
        yield from _model_tensors(shape, embedding_type)
    for i in range(shape.layers):
        if shape.ple:
            yield from _stream_tensors(shape, f"blk.{i}.")
        full = shape.gemma4 and not shape.slides(i)
        head_dim = shape.full_head_dim if full else shape.head_dim
        q = shape.heads * head_dim
        kv = (shape.full_kv_heads if full else shape.kv_heads) * head_dim
        # A list of types goes round, so one file can hold them all.
        for name, rows, cols in (
            ("attn_q", q, h), ("attn_k", kv, h), ("attn_v", kv, h),
            ("attn_output", h, q), ("ffn_gate", shape.ffn_of(i), h),
            ("ffn_up", shape.ffn_of(i), h), ("ffn_down", h, shape.ffn_of(i)),
        ):
            if full and name == "attn_v" and not shape.ple:
                continue
            kind = types[drawn % len(types)]
            drawn += 1
            yield f"blk.{i}.{name}.weight", kind, 1, rows, cols, cols ** -0.5
        norms = [("attn_norm", h, 1.0)]
        if shape.qk_norm:
            # Gemma 3n and 4 do not scale their queries.
            unscaled = shape.gemma4 or shape.streams
            scale = head_dim ** -0.25 if unscaled else 1.0
            norms += [("attn_q_norm", head_dim, 1.5 * scale),
                      ("attn_k_norm", head_dim, 1.2 * scale)]
        norms += [("post_attention_norm", h, 1.2)] * shape.post_norms
        norms += [("ffn_norm", h, 1.0)]
        norms += [("post_ffw_norm", h, 1.2)] * shape.post_norms
        norms += [("layer_output_scale", 1, 1.0)] * shape.gemma4
        for name, width, mean in norms:
            yield f"blk.{i}.{name}.weight", "F32", 1, None, width, mean
        if not shape.experts:
            continue
        for name, count, rows, cols, spread in _expert_plan(shape):
            kind = "F32"
            if count > 1:
                kind = types[drawn % len(types)]
                drawn += 1
            yield f"blk.{i}.{name}", kind, count, rows, cols, spread
    yield "output_norm.weight", "F32", 1, None, h, 10.0
    if shape.dense:
        for name, rows, cols in (
            ("dense_2", shape.dense, h), ("dense_3", h, shape.dense),
        ):
            kind = types[drawn % len(types)]
            drawn += 1
            yield f"{name}.weight", kind, 1, rows, cols, cols ** -0.5


def _model_tensors(shape: Shape, embedding_type: str):
    """What Gemma 3n, or a Gemma 4 with a table, has beside its layers.
    Quantizers keep 16 bits of all but the table.
    """
    h, width = shape.hidden, shape.ple * shape.layers
    yield ("per_layer_token_embd.weight", embedding_type, 1, shape.vocab, width,
           0.5 * shape.ple ** -0.5)
    yield "per_layer_model_proj.weight", "F16", 1, width, h, h ** -0.5
    yield "per_layer_proj_norm.weight", "F32", 1, None, shape.ple, 1.0
    if not shape.streams:
        return
    for name in ("altup_proj", "altup_unembd_proj"):
        yield f"{name}.weight", "F16", shape.streams - 1, h, h, h ** -0.5


def _stream_tensors(shape: Shape, prefix: str):
    h, n = shape.hidden, shape.streams
    of_table = ("inp_gate", "proj", "post_norm")
    for name, kind, rows, cols, spread in (
        ("altup_router", "F32", n, h, h ** 0.5),
        ("altup_predict_coef", "F32", n * n, n, 0.1),
        ("altup_correct_coef", "F32", n, n, 0.1),
        ("laurel_l", "F16", shape.laurel, h, h ** -0.5),
        ("laurel_r", "F16", h, shape.laurel, (shape.laurel or 1) ** -0.5),
        ("inp_gate", "F16", shape.ple, h, h ** -0.5),
        ("proj", "F16", h, shape.ple, shape.ple ** -0.5),
        ("altup_router_norm", "F32", None, h, 1.0),
        ("altup_correct_scale", "F32", None, h, 1.0),
        ("laurel_post_norm", "F32", None, h, 0.6),
        ("post_norm", "F32", None, h, 0.5),
    ):
        if not shape.streams and name not in of_table:
            continue
        yield f"{prefix}{name}.weight", kind, 1, rows, cols, spread


def write_random_gguf(path, shape: Shape = Shape(), matrix_type="F32",
                      embedding_type: str = "F32", seed: int = 0,
                      vocabulary=None) -> pathlib.Path:
    """Writes a random model and returns its path.

    `matrix_type` is a GGUF type name ("Q4_0") or a sequence of them, given out
    in turn; `vocabulary` is (tokens, scores, types), by default a tiny one.
    """
    import gguf

    path = pathlib.Path(path)
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), shape.architecture)
    _write_metadata(writer, shape, vocabulary or tiny_vocabulary(shape.vocab))
    if shape.gemma4:
        writer.add_tensor("rope_freqs.weight", rope_divisors(shape))
    for name, kind, count, rows, cols, spread in tensor_plan(
            shape, matrix_type, embedding_type):
        if rows is None:
            noise = rng.standard_normal(cols, np.float32)
            vector = spread * np.maximum(1 + 0.15 * noise, 0.2)
            writer.add_tensor(name, vector.astype(np.float32))
            continue
        stored = random_matrix(rng, kind, count * rows, cols, spread)
        if kind == "BF16":
            stored = stored.reshape(count * rows, 2 * cols)
        if count > 1:
            stored = stored.reshape(count, rows, -1)
        writer.add_tensor(name, stored,
                          raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--architecture", choices=LARGE, default="gemma3")
    parser.add_argument("--tokenizer-from", metavar="GGUF")
    parser.add_argument("--type", action="append",
                        help="of matrices; repeatable, they take turns; Q4_0")
    parser.add_argument("--embedding-type", default="Q8_0")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    types = args.type or ["Q4_0"]
    if not args.tiny and not args.tokenizer_from:
        parser.error("--tokenizer-from is needed without --tiny")
    vocabulary, shape = None, LARGE[args.architecture]
    if args.tiny:
        wide = any(kind.endswith("_K") for kind in types)
        shape = of_family(WIDE if wide else Shape(), args.architecture)
    if args.tokenizer_from:
        vocabulary = copied_vocabulary(args.tokenizer_from)
        shape = dataclasses.replace(shape, vocab=len(vocabulary[0]))
    path = write_random_gguf(args.out, shape, types, args.embedding_type,
                             args.seed, vocabulary)
    print(f"{path}: {math.ceil(path.stat().st_size / 1e6)} MB")


if __name__ == "__main__":
    main()
