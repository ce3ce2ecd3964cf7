"""Streams of logits from the engines that compare.py judges.

Every function yields (first position, float32 logits [n, vocab]) in order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

Chunks = Iterator[tuple[int, np.ndarray]]


def gemmakv_logits(gemma, ids, kv_dtype: str = "bf16", chunk: int = 256
                   ) -> Chunks:
    """gemmakv, `chunk` tokens at a time into one cache."""
    import gemmakv

    cache = gemmakv.create_kv_cache(
        gemma.config, capacity_tokens=len(ids) + 1, kv_dtype=kv_dtype)
    for begin in range(0, len(ids), chunk):
        tokens = [int(t) for t in ids[begin:begin + chunk]]
        yield begin, gemma.logits(cache, tokens, all_positions=True)


def gemmakv_float32(gemma, path):
    """The model of `gemma` again, its weights dequantized to float32."""
    import gemmakv
    import gguf_reference

    _, tensors = gguf_reference.read_gguf(path)
    return gemmakv.Gemma.from_tensors(gemma.config, tensors)


class Llama:
    """llama.cpp through the low-level half of llama-cpp-python.

    Needs the package, or its source folder on PYTHONPATH with
    LLAMA_CPP_LIB_PATH naming the folder of a native libllama.
    """

    def __init__(self, path: str, threads: int = 2, context: int = 8192,
                 batch: int = 512, flash_attention: bool = True):
        import llama_cpp as api

        self.api, self.batch_tokens = api, batch
        # Its loader reports every tensor; only errors (level 4) matter here.
        self._log = api.llama_log_callback(
            lambda level, text, _: print(text.decode(errors="replace"), end="")
            if level == 4 else None)
        api.llama_log_set(self._log, ctypes.c_void_p(0))
        api.llama_backend_init()
        params = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise OSError(f"llama.cpp cannot load {path}")
        self.vocab = api.llama_model_get_vocab(self.model)
        self.vocab_size = api.llama_vocab_n_tokens(self.vocab)
        params = api.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = batch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash_attention else 0
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise MemoryError("llama.cpp cannot create a context")

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def clear(self) -> None:
        self.api.llama_memory_clear(
            self.api.llama_get_memory(self.context), True)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Token ids without a beginning-of-sequence id."""
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        count = self.api.llama_tokenize(
            self.vocab, data, len(data), out, len(out), False, special)
        return list(out[:count])

    def decode(self, tokens, position: int, all_positions: bool = True
               ) -> np.ndarray:
        """Appends tokens at `position`; [n, vocab], or [1, vocab] (last)."""
        api, count = self.api, len(tokens)
        batch = api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i] = int(token)
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_positions or i == count - 1
        status = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = count if all_positions else 1
        out = np.ctypeslib.as_array(
            api.llama_get_logits(self.context), (rows * self.vocab_size,))
        return out.reshape(rows, self.vocab_size).copy()

    def logits(self, ids) -> Chunks:
        self.clear()
        for begin in range(0, len(ids), self.batch_tokens):
            yield begin, self.decode(
                ids[begin:begin + self.batch_tokens], begin)
