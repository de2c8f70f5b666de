"""Float8 checkpoints of any stack, audited before they are served: names, scales, codes, and the rule that made them.

from f8emu.audit import audit

found = audit("model/", source="model-bf16/", consumer="vllm:h100")
for one in found.findings:
    print(one.severity, one.place, one.expected, one.found)
"""

from f8emu.audit.checkpoint import CheckpointError as CheckpointError
from f8emu.audit.findings import CHECKS as CHECKS
from f8emu.audit.findings import Audit as Audit
from f8emu.audit.findings import Check as Check
from f8emu.audit.findings import Finding as Finding
from f8emu.audit.findings import Severity as Severity
from f8emu.audit.run import audit as audit
from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__)
