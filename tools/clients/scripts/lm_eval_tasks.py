"""lm-evaluation-harness: tasks of our own, over completions and chats."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from cases import KEY, MODEL, URL, case, expect

folder = Path(tempfile.mkdtemp())
(folder / "capitals.json").write_text("\n".join(
    json.dumps({"country": country, "capital": capital})
    for country, capital in {"France": "Paris", "Spain": "Madrid"}.items()
))  # fmt: skip
SHARED = f"""
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/capitals.json
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
"""
(folder / "written.yaml").write_text(f"""task: written
output_type: generate_until
{SHARED}
doc_to_target: "{{{{capital}}}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""")
(folder / "chosen.yaml").write_text(f"""task: chosen
output_type: multiple_choice
{SHARED}
doc_to_choice: [Paris, Madrid]
doc_to_target: "{{{{['Paris', 'Madrid'].index(capital)}}}}"
metric_list:
  - metric: acc
""")
os.environ["OPENAI_API_KEY"] = KEY
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"


def evaluate(kind, path, task, tokenizer, *more, **given):
    arguments = {"model": MODEL, "base_url": f"{URL}{path}", "max_retries": 1,
                 "tokenizer_backend": tokenizer, **given}  # fmt: skip
    done = subprocess.run(
        ["lm_eval", "--model", kind, "--tasks", task, "--include_path",
         str(folder), "--model_args",
         ",".join(f"{k}={v}" for k, v in arguments.items()), *more],
        capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    expect(done.returncode == 0, done.stderr[-300:])
    expect("|" in done.stdout, done.stdout)


with case("local-completions, text"):
    evaluate("local-completions", "/v1/completions", "written", "none")
with case("local-completions, texts at once"):
    evaluate("local-completions", "/v1/completions", "written", "none",
             "--batch_size", "2", num_concurrent=2)  # fmt: skip
with case("local-completions, likelihoods"):
    evaluate("local-completions", "/v1/completions", "chosen", "remote",
             auth_token=KEY)  # fmt: skip
with case("local-chat-completions"):
    evaluate("local-chat-completions", "/v1/chat/completions", "written",
             "none", "--apply_chat_template")  # fmt: skip
