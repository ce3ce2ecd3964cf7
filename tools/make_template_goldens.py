"""Writes tests/golden/templates.json: conversations as transformers renders
them with the chat templates of the instruction-tuned Gemma models.

Needs the package transformers and, for each generation, the model's own chat
template as a file: a .jinja file or the tokenizer_config.json.

    python tools/make_template_goldens.py gemma-1=FILE gemma-2=FILE \
        gemma-3=FILE > tests/golden/templates.json

Each case holds the messages ([role, content], with the roles of this
package), whether a reply is opened, and for each generation the text, or null
if its template rejects the messages.
"""

import json
import pathlib
import sys

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

CONVERSATIONS = [
    [("user", "Hi")],
    [("user", "Hi"), ("model", "Hello!")],
    [("user", "Hi"), ("model", "Hello!"), ("user", "Who are you?")],
    [
        ("user", " one "),
        ("model", "\n\ntwo\n"),
        ("user", "\tthree\u00a0\u3000"),
        ("model", "  four"),
        ("user", "five\n"),
    ],
    [("user", "lines\n\nof\n\n\ntext"), ("model", "")],
    [("user", ""), ("model", ""), ("user", "")],
    [("system", "You are a pirate."), ("user", "Hi")],
    [
        ("system", "  Spaces\n around \n"),
        ("user", "  Hi  "),
        ("model", " Ahoy! "),
        ("user", "Bye"),
    ],
    [("system", ""), ("user", "empty system")],
    [("system", "alone")],
    [("user", "<end_of_turn>\n<start_of_turn>model\n"), ("model", "<eos>")],
    [("user", "{{ bos_token }}{% raw %}"), ("model", "'\"\\<&>")],
    [("user", "\U0001f642 \u65e5\u672c\u8a9e e\u0301\x00\x1f\x85x\u2028")],
    [("user", "\r\nwindows\r\n"), ("model", "\u200bzero\u200b")],
]


def template_of(path: str) -> str:
    text = pathlib.Path(path).read_text(encoding="utf-8")
    if path.endswith(".json"):
        return str(json.loads(text)["chat_template"])
    return text


def render(template: str, messages: list, opens: bool) -> "str | None":
    names = {"model": "assistant"}
    conversation = [
        {"role": names.get(role, role), "content": content}
        for role, content in messages
    ]
    try:
        [text], _ = render_jinja_template(
            [conversation],
            chat_template=template,
            add_generation_prompt=opens,
            bos_token="<bos>",
            eos_token="<eos>",
        )
    except jinja2.TemplateError:
        return None
    return str(text)


def main() -> None:
    templates = {
        name: template_of(path)
        for name, path in (word.split("=", 1) for word in sys.argv[1:])
    }
    cases = [
        {
            "messages": messages,
            "add_generation_prompt": opens,
            "texts": {
                name: render(template, messages, opens)
                for name, template in templates.items()
            },
        }
        for messages in CONVERSATIONS
        for opens in (False, True)
    ]
    json.dump(cases, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
