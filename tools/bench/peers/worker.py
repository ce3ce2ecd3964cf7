"""What vs_peers.py measures of another engine, in that engine's environment.

    python worker.py openvino|onnxruntime|ctranslate2 MODEL_DIR THREADS

The same works as gemmakv_worker.py, in the same protocol: a line of JSON in, a
line of JSON out, wall clock around the engine's public Python calls. "setting"
of a request is one of those that the first line lists.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import sys
import time


def prompt(tokens: int, row: int = 0) -> list[int]:
    """Speed does not depend on which tokens they are."""
    return [2, *(1000 + (97 * row + 7 * i) % 100_000
                 for i in range(tokens - 1))]


class Engine:
    """An engine: what it is asked, in terms of what it can."""

    packages: tuple[str, ...]
    settings = ("default",)

    def first(self, ids: list[int], setting: str) -> int:
        """The most likely token behind `ids`, of a new conversation."""
        raise NotImplementedError

    def steps(self, prompts: list[list[int]], tokens: int, setting: str
              ) -> float:
        """Seconds of `tokens` greedy steps of all rows behind prompts of the
        same length, without reading these.
        """
        raise NotImplementedError

    def prefill(self, tokens: int, setting: str) -> dict:
        ids = prompt(tokens)
        begin = time.perf_counter()
        self.first(ids, setting)
        return {"tokens_per_s": tokens / (time.perf_counter() - begin)}

    def decode(self, tokens: int, setting: str, context: int = 1,
               batch: int = 1) -> dict:
        rows = [prompt(context, row) for row in range(batch)]
        seconds = self.steps(rows, tokens, setting)
        return {"tokens_per_s": batch * tokens / seconds}

    def agree(self, prompts: list[list[int]], replies: list[list[int]],
              setting: str) -> dict:
        """How many of the tokens of replies are its own choice, too, each
        behind those before it.
        """
        choices = [
            self.first([*ids, *reply[:i]], setting) == reply[i]
            for ids, reply in zip(prompts, replies)
            for i in range(len(reply))]
        return {"equal": sum(choices), "of": len(choices)}


class OpenVINO(Engine):
    """Two of its pipelines: paged attention, which merges requests, and the
    plain one over a state inside the model.
    """

    packages = ("openvino-genai", "openvino", "optimum-intel", "nncf")
    settings = ("paged", "plain")

    def __init__(self, folder: str, threads: int) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.tensor = numpy, openvino.Tensor
        self.genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False  # the same prompts again
        scheduler.max_num_batched_tokens = 4096
        # Of activations 128 columns share a scale, by default 32: prompts are
        # read a quarter faster, and 2 to 3 more of 64 tokens differ.
        options = {"INFERENCE_NUM_THREADS": threads,
                   "DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"}
        self.paged = openvino_genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", options)
        self.plain = openvino_genai.LLMPipeline(
            folder, "CPU", ATTENTION_BACKEND="SDPA", **options)

    def _config(self, tokens: int):
        config = self.genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        return config

    def _ids(self, rows: list[list[int]]):
        return self.tensor(self.numpy.array(rows, self.numpy.int64))

    def first(self, ids: list[int], setting: str) -> int:
        if setting == "plain":
            return self.plain.generate(
                self._ids([ids]), self._config(1)).tokens[0][0]
        found = self.paged.generate([self._ids([ids])], [self._config(1)])
        return found[0].m_generation_ids[0][0]

    def steps(self, prompts, tokens, setting):
        config = self._config(tokens + 1)
        if setting == "plain":
            ids = self._ids(prompts)
            mask = self._ids([[1] * len(row) for row in prompts])
            found = self.plain.generate(
                self.genai.TokenizedInputs(ids, mask), config)
            if any(len(row) != tokens + 1 for row in found.tokens):
                raise RuntimeError("a row ended early")
            metrics = found.perf_metrics
            return (metrics.get_generate_duration().mean
                    - metrics.get_ttft().mean) / 1e3
        handles = [
            self.paged.add_request(i, self._ids([row]), config)
            for i, row in enumerate(prompts)]
        self.paged.step()  # all prompts at once
        for handle in handles:
            if not handle.can_read():
                raise RuntimeError("a prompt took more than one step")
        begin = time.perf_counter()
        while self.paged.has_non_finished_requests():
            self.paged.step()
        return time.perf_counter() - begin


class ONNXRuntime(Engine):
    packages = ("onnxruntime-genai", "onnxruntime")

    def __init__(self, folder: str, threads: int) -> None:
        import numpy
        import onnxruntime_genai

        self.numpy, self.genai = numpy, onnxruntime_genai
        config = onnxruntime_genai.Config(folder)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {
            "intra_op_num_threads": threads}}}}))
        self.model = onnxruntime_genai.Model(config)
        # Room for less than the window of a sliding layer is an error.
        decoder = json.loads(
            pathlib.Path(folder, "genai_config.json").read_text()
        )["model"]["decoder"]
        self.least = decoder.get("sliding_window", {}).get("window_size", 0)

    def _generator(self, rows: list[list[int]], tokens: int):
        length = max(len(rows[0]) + tokens, self.least)
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(
            batch_size=len(rows), max_length=length, min_length=length,
            do_sample=False)
        generator = self.genai.Generator(self.model, params)
        generator.append_tokens(self.numpy.array(rows, self.numpy.int32))
        generator.generate_next_token()
        return generator

    def first(self, ids, setting):
        return int(self._generator([ids], 1).get_next_tokens()[0])

    def steps(self, prompts, tokens, setting):
        generator = self._generator(prompts, tokens + 1)
        begin = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        seconds = time.perf_counter() - begin
        if generator.token_count() != len(prompts[0]) + tokens + 1:
            raise RuntimeError("a row ended early")
        return seconds


class CTranslate2(Engine):
    packages = ("ctranslate2",)

    def __init__(self, folder: str, threads: int) -> None:
        import ctranslate2

        # It takes and gives tokens by their text.
        self.texts = json.loads(
            pathlib.Path(folder, "vocabulary.json").read_text())
        self.generator = ctranslate2.Generator(
            folder, intra_threads=threads, inter_threads=1)
        self.settings = (self.generator.compute_type,)

    def _generate(self, rows: list[list[int]], tokens: int, **options):
        found = self.generator.generate_batch(
            [[self.texts[i] for i in row] for row in rows],
            max_length=tokens, min_length=tokens, beam_size=1, sampling_topk=1,
            include_prompt_in_result=False, **options)
        if any(len(row.sequences_ids[0]) != tokens for row in found):
            raise RuntimeError("a row ended early")
        return found

    def first(self, ids, setting):
        return self._generate([ids], 1)[0].sequences_ids[0][0]

    def steps(self, prompts, tokens, setting):
        begin = 0.0

        def step(result) -> bool:
            nonlocal begin
            if result.step == 0:
                begin = time.perf_counter()
            return False

        self._generate(prompts, tokens + 1, callback=step)
        return time.perf_counter() - begin


ENGINES = {"openvino": OpenVINO, "onnxruntime": ONNXRuntime,
           "ctranslate2": CTranslate2}


def main() -> None:
    name, folder, threads = sys.argv[1:]
    # What engines print goes elsewhere than answers do.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    engine = ENGINES[name](folder, int(threads))
    say({"settings": engine.settings,
         "versions": {package: importlib.metadata.version(package)
                      for package in engine.packages}})
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("kind")
        work = {"prefill": engine.prefill, "decode": engine.decode,
                "agree": engine.agree}[kind]
        try:
            say(work(**request))
        except Exception as error:  # the tool goes on with other works
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
