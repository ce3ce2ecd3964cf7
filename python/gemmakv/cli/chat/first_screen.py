"""The first screen of a chat with a pretrained model: what to try.

Such a model continues texts and follows no instructions: what a person types
first often gets an odd answer. So the chat shows what the model is good at,
until it has replied once; then whoever comes back knows, and it is gone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import TYPE_CHECKING

from gemmakv._support.extras import install_command
from gemmakv.chat._templates import is_pretrained
from gemmakv.cli.arguments import TUNED_MODEL

if TYPE_CHECKING:
    from gemmakv.cli.chat.chat import Chat
    from gemmakv.cli.chat.view import View

# Gemma 3 270M does well with these, as tests hold. In the dialogue of a chat
# it knows capitals; examples it continues best with no dialogue around them.
QUESTIONS = ("What is the capital of France?", "What is the capital of Japan?")
STORY = "Once upon a time"
EXAMPLES = "big: small, old: new, up:"


def is_for(chat: Chat) -> bool:
    """Tells whether the model is one of Gemma's, pretrained, and has not
    replied here yet.
    """
    if not chat.gemma.config.name:  # it may not know what Gemma's know
        return False
    if chat.session().template.name != "plain":
        return False
    if any(entry.record.turns for entry in chat.book.entries):
        return False
    return is_pretrained(chat.gemma)


def show(
    view: View, model: str, program: str | None = None, pip: str | None = None
) -> None:
    """Shows what a pretrained model is good at, and how to get another one.

    Args:
      model: the --model of the chat.
      program: how the shell calls gemmakv; None: as it was called.
      pip: how the shell calls the pip that installed it; None: as it is found.
    """
    program = program or _program()
    command = f"{program} generate -m {shlex.quote(model)}"
    view.say(
        "This model is pretrained: it continues texts and follows no "
        "instructions. Try"
    )
    for question in QUESTIONS:
        view.show_input(question)
    view.say("and, in the shell, a text or examples for it to continue:")
    view.show_input(f'{command} --max-tokens 40 "{STORY}"')
    view.show_input(f'{command} --stop , "{EXAMPLES}"')
    view.say(
        'A model that follows instructions has "it" in its name. --model '
        f"FILE.gguf takes one that you have; {TUNED_MODEL} is 2 GB, after "
        "Google's licence and a token (docs/models.md):"
    )
    view.show_input(install_command("hub", pip))
    view.show_input(f"{program} chat --model {TUNED_MODEL}")


def _program() -> str:
    """Finds the words that call gemmakv in the person's shell."""
    if shutil.which("gemmakv") is not None:
        return "gemmakv"
    called = sys.argv[0]
    if os.path.basename(called) == "gemmakv":
        return shlex.quote(called)
    return f"{shlex.quote(sys.executable)} -m gemmakv"
