"""The tests of kernels where there is no GPU: those of all files in one process, which loads torch once."""

from importlib.util import find_spec

import pytest

from tests.torch_path.interpreter import INTERPRETED, run_interpreted

FILES = [f"tests/torch_path/test_{name}.py" for name in ("kernels", "inspection_kernels", "feed_forward")]


@pytest.mark.skipif(INTERPRETED, reason="it is this process")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(*FILES)
