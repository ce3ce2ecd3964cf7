"""Model directories in Hugging Face's form: config.json and safetensors."""

from gemmakv.huggingface.folder import ModelFolder, is_model_folder

__all__ = ["ModelFolder", "is_model_folder"]
