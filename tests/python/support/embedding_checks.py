"""Goldens of embeddings as models."""

from __future__ import annotations

from typing import Any

import gemmakv
from support import golden_configs
from support.embedding_models import EmbeddingGolden


def fields(golden: EmbeddingGolden) -> dict[str, Any]:
    """Arguments of ModelConfig."""
    return {
        **golden_configs.fields(golden.model.config),
        "dense_dim": golden.dense_dim,
    }


def from_tensors(golden: EmbeddingGolden, **options: Any) -> gemmakv.Gemma:
    config = gemmakv.ModelConfig(**fields(golden))
    return gemmakv.Gemma.from_tensors(config, golden.core_tensors(), **options)
