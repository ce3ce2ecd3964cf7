"""What a model on disk looks like."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gemmakv import _core
from gemmakv.errors import MismatchError

_ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.safetensors.index.json",
    "adapter_model.bin",
)
# Of parts beside a language model, those that hear; names of GGUF files and
# of Hugging Face's.
_SOUND = ("a.", "mm.a.", "audio_tower.", "embed_audio.")


def is_model_folder(path: str) -> bool:
    """Whether a directory holds a model in Hugging Face's form."""
    folder = Path(path)
    return (folder / "config.json").is_file() and any(
        folder.glob("*.safetensors*")
    )


def adapter_among(names: Iterable[str]) -> str | None:
    """The first of these file names that is one of an adapter's."""
    present = set(names)
    return next((name for name in _ADAPTER_FILES if name in present), None)


def check_no_adapter(where: str, names: Iterable[str]) -> None:
    """Raises MismatchError, beginning with `where`, if one of the files beside
    a model's weights is an adapter's: the weights alone are another model than
    the one that the folder holds.
    """
    found = adapter_among(names)
    if found is not None:
        raise MismatchError(
            f"{where}: found {found} beside the weights, expected none: "
            "adapters are not supported; merge it into the weights, or load "
            "the model that it was made for from a folder without it"
        )


def describe_parts(names: Iterable[str]) -> str:
    """Describes tensors of parts beside a language model, and what a model
    without them cannot do: "its image encoder (2 tensors: mm, v): images are
    not supported yet". Requires: at least one.
    """
    plain = [name.removeprefix("model.") for name in names]
    hears = any(name.startswith(_SOUND) for name in plain)
    sees = not all(name.startswith(_SOUND) for name in plain)
    parts = ", ".join(sorted({name.split(".", 1)[0] for name in plain}))
    if hears and sees:
        what, lost = "image and sound encoders", "images and sound are"
    elif hears:
        what, lost = "sound encoder", "sound is"
    else:
        what, lost = "image encoder", "images are"
    count = f"{len(plain)} tensor{'s' * (len(plain) != 1)}"
    return f"its {what} ({count}: {parts}): {lost} not supported yet"


def parts_beside(names: Iterable[str]) -> list[str]:
    """The tensors of parts beside a language model among these."""
    return _core.other_parts(list(names))
