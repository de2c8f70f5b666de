"""The numerics suite as a product: which cases, put to whom, judged by whom, reported how.

`f8emu verify` is `verify` with a table; from Python:

    from f8emu.conformance import load_subject, verify

    result = verify([load_subject("f8ref.numpy")])
    assert result.is_equal
"""

from f8emu.conformance.compare import Mismatch as Mismatch
from f8emu.conformance.gemm import GemmCase as GemmCase
from f8emu.conformance.golden import GoldenCase as GoldenCase
from f8emu.conformance.golden import GoldenFile as GoldenFile
from f8emu.conformance.golden import read_golden as read_golden
from f8emu.conformance.golden import shipped_golden as shipped_golden
from f8emu.conformance.golden import write_golden as write_golden
from f8emu.conformance.stages import STAGES as STAGES
from f8emu.conformance.subject import SUBJECTS as SUBJECTS
from f8emu.conformance.subject import NotOffered as NotOffered
from f8emu.conformance.subject import Subject as Subject
from f8emu.conformance.subject import load_subject as load_subject
from f8emu.conformance.verify import Result as Result
from f8emu.conformance.verify import Status as Status
from f8emu.conformance.verify import verify as verify
