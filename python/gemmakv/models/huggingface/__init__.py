"""Model directories in Hugging Face's form: config.json and safetensors."""

from gemmakv.models.huggingface._folder import ModelFolder, is_model_folder

__all__ = ["ModelFolder", "is_model_folder"]
