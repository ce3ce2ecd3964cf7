"""How the messages of a conversation become the text that a model reads."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gemmakv.errors import CorruptFile, GemmaKVError, brief

if TYPE_CHECKING:
    from gemmakv.gemma import Gemma

ROLES = ("system", "user", "model")


@dataclasses.dataclass(frozen=True)
class Message:
    """One message. `role` is "system", "user" or "model"."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(
                f"role: expected one of {', '.join(ROLES)}, found "
                + brief(self.role)
            )
        if not isinstance(self.content, str):
            raise ValueError(
                f"content: expected a str, found {brief(self.content)}"
            )


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of rendered text.

    `role` is None for text of the template, in which the strings of control
    tokens mean the tokens; else it is the role of the message whose content
    this is, in which they are ordinary text.
    """

    text: str
    role: str | None = None

    @property
    def special(self) -> bool:
        """Whether the strings of control tokens mean the tokens."""
        return self.role is None


class Template(Protocol):
    """Renders conversations.

    `name` identifies it in saved sessions. `stop` are texts that end a reply
    besides the model's own end tokens.
    """

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]: ...

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> list[Segment]:
        """The conversation's text, BOS included.

        Every message's content is in segments of its role, unless the
        template folds it into another message. With `add_generation_prompt`
        the text ends where the model's reply begins. Raises ValueError if the
        roles do not alternate as the template expects.
        """


class PlainTemplate:
    """A dialogue in plain text, for models that were not tuned for turns.

    A base model goes on with a dialogue in the style in which it begins, so
    this one begins with an introduction and a question that is answered.
    """

    name = "plain"
    stop = ("\nUser:", "\nAssistant:")

    _INTRODUCTION = (
        "This is a conversation between a User and an Assistant. The "
        "Assistant gives short, friendly and correct answers."
    )
    _EXAMPLE = (
        "\n\nUser: What is the largest planet?\n"
        "Assistant: The largest planet is Jupiter."
    )

    def __init__(self, bos: str) -> None:
        self._bos = bos

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> list[Segment]:
        system, turns = split_system(messages)
        segments = [Segment(self._bos)]
        if system is None:
            segments.append(Segment(self._INTRODUCTION))
        else:
            segments.append(Segment(system.strip(), "system"))
        segments.append(Segment(self._EXAMPLE))
        for message in turns:
            label = "User" if message.role == "user" else "Assistant"
            segments.append(Segment(f"\n{label}: "))
            segments.append(Segment(message.content.strip(), message.role))
        if add_generation_prompt:
            segments.append(Segment("\nAssistant:"))
        return segments


class GemmaTemplate:
    """The turns of Gemma's instruction-tuned models.

    The same text as the template that Gemma 3 is published with: contents
    are stripped, and system text stands before the first user message.
    """

    name = "gemma"
    stop = ()

    def __init__(self, bos: str) -> None:
        self._bos = bos

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> list[Segment]:
        system, turns = split_system(messages)
        segments = [Segment(self._bos)]
        for i, message in enumerate(turns):
            segments.append(Segment(f"<start_of_turn>{message.role}\n"))
            if i == 0 and system is not None:
                segments.append(Segment(system, "system"))
                segments.append(Segment("\n\n"))
            segments.append(Segment(message.content.strip(), message.role))
            segments.append(Segment("<end_of_turn>\n"))
        if add_generation_prompt:
            segments.append(Segment("<start_of_turn>model\n"))
        return segments


class FileTemplate:
    """A template in the Jinja language, as model files carry one.

    It runs in a sandbox, without access to anything but the messages.
    Contents pass through it between marks that no text can foresee, so that
    whatever a message says stays the content of a message.
    """

    name = "file"
    stop = ()

    def __init__(self, source: str, bos: str, eos: str) -> None:
        """Raises GemmaKVError if jinja2 is not installed, CorruptFile if
        `source` is not in its language.
        """
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise GemmaKVError(
                "the model's chat template needs jinja2: pip install "
                "'gemmakv[chat]', or choose template='gemma' or 'plain'"
            ) from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _raise_exception
        self._errors = jinja2.TemplateError
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CorruptFile(
                f"the model's chat template is damaged: {_line(error)}"
            ) from None
        self._bos = bos
        self._eos = eos

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> list[Segment]:
        split_system(messages)  # checks the roles
        nonce = secrets.token_hex(8)
        marked = [
            {
                "role": "assistant" if m.role == "model" else m.role,
                "content": _mark(m.content, f"{nonce}{i}"),
            }
            for i, m in enumerate(messages)
        ]
        text = self._run(marked, add_generation_prompt)
        return _unmark(text, messages, nonce)

    def _run(
        self, messages: Sequence[Mapping[str, str]], add_prompt: bool
    ) -> str:
        values: dict[str, Any] = {
            "messages": messages,
            "add_generation_prompt": add_prompt,
            "bos_token": self._bos,
            "eos_token": self._eos,
            "tools": None,
        }
        try:
            return self._template.render(values)
        except (self._errors, TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(
                "the model's chat template cannot render these messages: "
                + _line(error)
            ) from None


def split_system(
    messages: Sequence[Message],
) -> tuple[str | None, Sequence[Message]]:
    """The system text, and the turns.

    Raises ValueError unless user and model alternate, the user first.
    """
    system = None
    turns = messages
    if messages and messages[0].role == "system":
        system, turns = messages[0].content, messages[1:]
    for i, message in enumerate(turns):
        expected = "model" if i % 2 else "user"
        if message.role != expected:
            raise ValueError(
                f"messages: expected user and model to alternate, found "
                f"{message.role} where {expected} comes"
            )
    return system, turns


def choose_template(gemma: Gemma, name: str | None = None) -> Template:
    """A template for a model's conversations.

    `name` is "file" (the model file's own), "gemma" or "plain"; None takes
    the file's own if it has one, else Gemma's turns if the model's name says
    that it is tuned for them, else plain dialogue.
    """
    source = gemma.chat_template
    if name is None:
        if source is not None:
            name = "file"
        else:
            name = "gemma" if gemma.is_instruction_tuned else "plain"
    bos = _piece(gemma, gemma.config.bos_id)
    if name == "plain":
        return PlainTemplate(bos)
    if name == "gemma":
        return GemmaTemplate(bos)
    if name != "file":
        raise ValueError(
            "template: expected 'file', 'gemma', 'plain' or a Template, found "
            + brief(name)
        )
    if source is None:
        raise ValueError(
            "template: this model's file carries no chat template; expected "
            "'gemma' or 'plain'"
        )
    eos_ids = gemma.config.eos_ids
    return FileTemplate(
        source, bos, _piece(gemma, eos_ids[0] if eos_ids else -1)
    )


def _piece(gemma: Gemma, token: int) -> str:
    """The string of a control token; empty if there is none."""
    if gemma.tokenizer is None or token < 0:
        return ""
    return gemma.tokenizer.piece_of(token)


def _mark(content: str, nonce: str) -> str:
    """Marks just inside the white space, which templates strip."""
    core = content.strip()
    before, _, after = content.partition(core) if core else (content, "", "")
    return f"{before}\ue000{nonce}\ue001{core}\ue002{nonce}\ue003{after}"


def _unmark(
    text: str, messages: Sequence[Message], nonce: str
) -> list[Segment]:
    segments = []
    for i, message in enumerate(messages):
        core = message.content.strip()
        whole = f"\ue000{nonce}{i}\ue001{core}\ue002{nonce}{i}\ue003"
        before, found, text = text.partition(whole)
        if not found or nonce in before:
            raise ValueError(
                f"the model's chat template leaves out or changes the text of "
                f"message {i} ({message.role}); choose template='gemma' or "
                "'plain'"
            )
        segments += [Segment(before), Segment(core, message.role)]
    return [*segments, Segment(text)]


def _raise_exception(message: str) -> None:
    """What templates call when they refuse messages."""
    import jinja2

    raise jinja2.TemplateError(message)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
