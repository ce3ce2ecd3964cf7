"""Random sequences of operations on conversations, against a trivial model."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_random_operations() -> None:
    # hypothesis takes a second to import, which collecting tests need not pay.
    from support import cache_machine

    cache_machine.run()
