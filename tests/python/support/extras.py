"""Packages that tests need and the project does not."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """A mark that skips where a package is not installed. Imports none: tests
    do it where they use it, so that to collect them is cheap.
    """
    missing = [one for one in packages if not importlib.util.find_spec(one)]
    return pytest.mark.skipif(
        bool(missing), reason=f"not installed: {', '.join(missing)}"
    )
