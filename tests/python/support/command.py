"""The command line as a test sees it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

RunCli = Callable[..., "subprocess.CompletedProcess[bytes]"]
