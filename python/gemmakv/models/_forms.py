"""What a model on disk looks like."""

from __future__ import annotations

from pathlib import Path


def is_model_folder(path: str) -> bool:
    """Whether a directory holds a model in Hugging Face's form."""
    folder = Path(path)
    return (folder / "config.json").is_file() and any(
        folder.glob("*.safetensors*")
    )
