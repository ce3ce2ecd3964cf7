"""How a conversation becomes the text that a model reads."""

from gemmakv._support.public import publish as _publish
from gemmakv.chat._gemma4_template import Gemma4Template
from gemmakv.chat._messages import Message, Segment, Template
from gemmakv.chat._templates import GemmaTemplate, PlainTemplate, template_for

__all__ = [
    "Gemma4Template",
    "GemmaTemplate",
    "Message",
    "PlainTemplate",
    "Segment",
    "Template",
    "template_for",
]

_publish(globals())
del _publish
