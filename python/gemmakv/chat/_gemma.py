"""A loaded model."""

from __future__ import annotations

from gemmakv.generation._model import Model


class Gemma(Model):
    """Weights of a model, their tokenizer and the engine that runs them.

    Made by `load` or `from_tensors`. Weights never change: any number of
    conversations and threads may use one Gemma at the same time, each with
    exactly the result that it would have alone; calls with the same cache
    wait for each other.
    """
