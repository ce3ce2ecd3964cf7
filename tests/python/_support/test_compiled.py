"""A package without its extension, as a folder of sources has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gemmakv


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with the package, but for what is compiled."""
    package = tmp_path / "gemmakv"
    package.mkdir()
    for path in Path(gemmakv.__file__).parent.iterdir():
        if not path.name.startswith("_core."):
            (package / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments", [("-c", "import gemmakv"), ("-m", "gemmakv")]
)
def test_what_is_not_compiled_says_so(
    sources: Path, arguments: tuple[str, str]
) -> None:
    """It was said to be a circular import."""
    # Without what is installed, which may have hooks that find the extension.
    result = subprocess.run(
        [sys.executable, "-S", *arguments],
        env={**os.environ, "PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    expected = "ImportError: gemmakv is not compiled here: pip install ."
    assert expected in result.stderr.splitlines()[-1]
    assert "_core" not in result.stderr.splitlines()[-1]
