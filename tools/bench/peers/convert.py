"""A Hugging Face directory as a model of another engine.

    python convert.py openvino int8 DIR OUT
    python convert.py openvino int4 DIR OUT
    python convert.py onnxruntime int4 DIR OUT
    python convert.py ctranslate2 int8 DIR OUT

Runs in the engine's own virtual environment, without the network, and asks the
engine's own converter with its defaults for that precision, but for what makes
prompts faster. fp32 (of CTranslate2: float32) instead shows whether a converter
is right.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def openvino(precision: str, source: str, out: str) -> None:
    # Required by optimum-intel, of no use here, and built for one build of
    # torch: where another one is installed, importing it fails.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    from optimum.commands.optimum_cli import main

    sys.argv = ["optimum-cli", "export", "openvino", "--model", source,
                "--task", "text-generation-with-past", "--weight-format",
                precision, out]
    main()


def onnxruntime(precision: str, source: str, out: str) -> None:
    import onnxruntime_genai
    import transformers

    # The builder reads the two rotations under the names of published files,
    # but needs a release of transformers which gives them others.
    plain = transformers.AutoConfig.from_pretrained

    def with_names(*args, **options):
        config = plain(*args, **options)
        rope = config.rope_parameters
        config.rope_theta = rope["full_attention"]["rope_theta"]
        config.rope_local_base_freq = rope["sliding_attention"]["rope_theta"]
        config.rope_parameters = {"rope_type": "default"}
        transformers.AutoConfig.from_pretrained = plain  # of the weights' load
        return config

    transformers.AutoConfig.from_pretrained = with_names
    folder = pathlib.Path(onnxruntime_genai.__file__).parent / "models"
    sys.path.insert(0, str(folder))
    sys.argv = ["builder", "--input", source, "--output", out, "--precision",
                precision, "--execution_provider", "cpu", "--cache_dir",
                f"{out}.cache", "--extra_options", "hf_token=false",
                # Or a prompt's every token is multiplied by the vocabulary.
                "prune_lm_head=true"]
    runpy.run_path(str(folder / "builder.py"), run_name="__main__")


def ctranslate2(precision: str, source: str, out: str) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(source).convert(out, quantization=precision)


def main() -> None:
    peer, precision, source, out = sys.argv[1:]
    {"openvino": openvino, "onnxruntime": onnxruntime,
     "ctranslate2": ctranslate2}[peer](precision, source, out)


if __name__ == "__main__":
    main()
