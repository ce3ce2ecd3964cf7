"""The same tokens computed in many ways, compared bit by bit, or by a
reference.
"""

from gemmakv._support.public import publish as _publish
from gemmakv.diagnostics._reference import (
    Difference,
    ReferenceReport,
    against,
)
from gemmakv.diagnostics._verify import Check, Report, run

__all__ = [
    "Check",
    "Difference",
    "ReferenceReport",
    "Report",
    "against",
    "run",
]

_publish(globals())
del _publish
