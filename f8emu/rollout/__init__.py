"""Trainer and server, certified: the exact bytes that a server must hold, and one verdict for a rollout.

from f8emu.rollout import expected_checksums

expected = expected_checksums("trained/", engine="vllm", dialect="vllm_weight_block", tensor_parallel=2)
for one in expected.compare(server_json):
    print(one.text)
"""

from f8emu.rollout.certificate import Certificate as Certificate
from f8emu.rollout.certificate import CertificateError as CertificateError
from f8emu.rollout.certificate import Checked as Checked
from f8emu.rollout.certificate import Difference as Difference
from f8emu.rollout.certificate import Named as Named
from f8emu.rollout.certificate import Unseen as Unseen
from f8emu.rollout.certificate import check as check
from f8emu.rollout.certify import certify as certify
from f8emu.rollout.checksums import Checksums as Checksums
from f8emu.rollout.checksums import Mismatch as Mismatch
from f8emu.rollout.checksums import Outcome as Outcome
from f8emu.rollout.checksums import Source as Source
from f8emu.rollout.checksums import TensorChecksum as TensorChecksum
from f8emu.rollout.expected import expected_checksums as expected_checksums
from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__)
