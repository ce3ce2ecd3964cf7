"""Programs of tools/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_TOOLS = Path(__file__).resolve().parents[3] / "tools"


def tool(name: str) -> Any:
    """The module of tools/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, _TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up by name while it is being defined.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
