"""The numerics suite as a product: its cases, subjects, oracles and reports.

`f8emu verify` is `verify` with a table; from Python:

    from f8emu.conformance import load_subject, verify

    result = verify([load_subject("f8ref.numpy")])
    assert result.is_equal
"""

from f8emu.conformance.cases.gemm import GemmCase as GemmCase
from f8emu.conformance.cases.golden import GoldenCase as GoldenCase
from f8emu.conformance.cases.golden import GoldenFile as GoldenFile
from f8emu.conformance.cases.golden import read_golden as read_golden
from f8emu.conformance.cases.golden import shipped_golden as shipped_golden
from f8emu.conformance.cases.golden import write_golden as write_golden
from f8emu.conformance.compare import Mismatch as Mismatch
from f8emu.conformance.diagnosis.fit import Fit as Fit
from f8emu.conformance.diagnosis.fit import fit as fit
from f8emu.conformance.kernels.kernel import BLOCKWISE_1X128_128X128 as BLOCKWISE_1X128_128X128
from f8emu.conformance.kernels.kernel import BLOCKWISE_128X128 as BLOCKWISE_128X128
from f8emu.conformance.kernels.kernel import K_BY_ROWS as K_BY_ROWS
from f8emu.conformance.kernels.kernel import K_BY_ROWS_ROW_MAJOR as K_BY_ROWS_ROW_MAJOR
from f8emu.conformance.kernels.kernel import MXFP8 as MXFP8
from f8emu.conformance.kernels.kernel import MXFP8_SWIZZLED as MXFP8_SWIZZLED
from f8emu.conformance.kernels.kernel import ROWS_BY_K as ROWS_BY_K
from f8emu.conformance.kernels.kernel import ROWWISE_MATRICES as ROWWISE_MATRICES
from f8emu.conformance.kernels.kernel import ROWWISE_VECTORS as ROWWISE_VECTORS
from f8emu.conformance.kernels.kernel import TENSORWISE_SCALARS as TENSORWISE_SCALARS
from f8emu.conformance.kernels.kernel import Accumulation as Accumulation
from f8emu.conformance.kernels.kernel import Arg as Arg
from f8emu.conformance.kernels.kernel import Kernel as Kernel
from f8emu.conformance.kernels.kernel import OperandLayout as OperandLayout
from f8emu.conformance.kernels.kernel import ScaleLayout as ScaleLayout
from f8emu.conformance.run.result import Result as Result
from f8emu.conformance.run.result import Status as Status
from f8emu.conformance.run.stages import STAGES as STAGES
from f8emu.conformance.run.subject import SUBJECTS as SUBJECTS
from f8emu.conformance.run.subject import NotOffered as NotOffered
from f8emu.conformance.run.subject import Subject as Subject
from f8emu.conformance.run.subject import load_subject as load_subject
from f8emu.conformance.run.verify import verify as verify
from f8emu.spec.exports import public as _public

__all__, __dir__ = _public(__name__)
