"""How a conversation becomes the text that a model reads."""

from gemmakv.chat._templates import (
    Gemma4Template,
    GemmaTemplate,
    Message,
    PlainTemplate,
    Segment,
    Template,
    template_for,
)

__all__ = [
    "Gemma4Template",
    "GemmaTemplate",
    "Message",
    "PlainTemplate",
    "Segment",
    "Template",
    "template_for",
]
