"""Writes tests/golden/messages.txt: digests of the conversations of
tests/python/support/chat_cases.py as transformers renders them.

    PYTHONPATH=tests/python python tools/make_message_goldens.py
"""

from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

from support.chat_cases import SOURCES, conversations, digest

GOLDEN = Path(__file__).resolve().parents[1] / "tests/golden/messages.txt"


def main() -> None:
    texts = []
    for case in conversations():
        keywords = dict(case)
        source = SOURCES[keywords.pop("template")]
        [text], _ = render_jinja_template(
            [keywords.pop("messages")],
            chat_template=source,
            bos_token="<bos>",
            eos_token="<eos>",
            **keywords,
        )
        texts.append(digest(text) + "\n")
    GOLDEN.write_text("".join(texts), "utf-8")


if __name__ == "__main__":
    main()
