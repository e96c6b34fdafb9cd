"""Looking inside a model: `trace` returns everything about its streams on one text; figures and pages read that.
`audit` measures whether predictions depend on later tokens.
"""

from thoughtbubbles.analysis.audit import Audit, audit
from thoughtbubbles.analysis.trace import Trace, trace

__all__ = ["Audit", "Trace", "audit", "trace"]
