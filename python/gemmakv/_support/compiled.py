"""Says what to do where the package is not compiled: in a folder of sources, or
for another version of Python. Imported before all that needs the extension.
"""

from __future__ import annotations

import importlib

_NAME = "gemmakv._core"

try:
    importlib.import_module(_NAME)
except ModuleNotFoundError as error:
    if error.name != _NAME:
        raise
    raise ImportError(
        "gemmakv is not compiled here: pip install .", name=_NAME
    ) from None
