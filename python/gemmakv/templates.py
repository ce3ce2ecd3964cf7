"""How a conversation becomes the text that a model reads."""

from gemmakv.chat._templates import (
    GemmaTemplate,
    Message,
    PlainTemplate,
    Segment,
    Template,
    template_for,
)

__all__ = [
    "GemmaTemplate",
    "Message",
    "PlainTemplate",
    "Segment",
    "Template",
    "template_for",
]
