"""Assertions for test suites of float8 code: equal bits, kernels and casts against the suite, bounds of an error.

    from f8emu.testing import assert_bits_equal, check_gemm

    def test_kernel():
        check_gemm(my_scaled_mm)

They raise AssertionError, and are for every test runner. Importing this package loads neither torch nor JAX.
"""

from f8emu.spec.exports import public as _public
from f8emu.testing.bits import assert_bits_equal as assert_bits_equal
from f8emu.testing.checks import check_cast as check_cast
from f8emu.testing.checks import check_gemm as check_gemm
from f8emu.testing.checks import check_quantizer as check_quantizer
from f8emu.testing.tolerance import gemm_tolerance as gemm_tolerance
from f8emu.testing.tolerance import gemm_tolerance_from_maxima as gemm_tolerance_from_maxima

__all__, __dir__ = _public(__name__)
