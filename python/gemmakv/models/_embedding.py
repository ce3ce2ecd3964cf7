"""What a model's files say about embeddings, beside its shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# What EmbeddingGemma was trained with (its config_sentence_transformers.json);
# files of other formats do not say it.
PUBLISHED_PROMPTS: Mapping[str, str] = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "BitextMining": "task: search result | query: ",
    "Clustering": "task: clustering | query: ",
    "Classification": "task: classification | query: ",
    "InstructionRetrieval": "task: code retrieval | query: ",
    "MultilabelClassification": "task: classification | query: ",
    "PairClassification": "task: sentence similarity | query: ",
    "Reranking": "task: search result | query: ",
    "Retrieval": "task: search result | query: ",
    "Retrieval-query": "task: search result | query: ",
    "Retrieval-document": "title: none | text: ",
    "STS": "task: sentence similarity | query: ",
    "Summarization": "task: summarization | query: ",
}


@dataclasses.dataclass(frozen=True)
class EmbeddingInfo:
    """How texts are put before a model of embeddings.

    prompts: what stands in front of a text, by name.
    default_prompt: the name of the one that texts get unless a call says
      otherwise; None: none.
    adds_eos: whether <eos> stands behind a text.
    """

    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None
    adds_eos: bool = False
