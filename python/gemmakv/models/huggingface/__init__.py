"""Model directories in Hugging Face's form: config.json and safetensors."""

from gemmakv.models.huggingface._folder import ModelFolder

__all__ = ["ModelFolder"]
