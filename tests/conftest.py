"""What holds for every test: the run header, seeds, and which markers run where."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from hypothesis import settings

# The same examples in every run: a failure seen by one machine is seen by all. No deadline, since machines are shared.
settings.register_profile("f8emu", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("f8emu")

# torch reads this when it is first imported, also in processes that tests start. The tensors of tests are small, and
# pytest has a process for every core: threads would only spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# JAX reads this when it is first imported: broadcasting between ranks must be spelled out.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

# JAX takes three quarters of a GPU's memory when it starts, and pytest has a process for every core.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# XLA cuts a program in 32 parts, to compile them side by side: more work in all, where every core is busy already.
_ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_PART}".strip()

# The processes of a run compile many equal programs. JAX keeps each in a directory that they share, and that goes with
# the run: no program is older than the run itself.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="f8emu-tests-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# Inductor's pool of compilers is a process for each of ours that imports torch to wait for one compiler at a time. And
# after an installation it tries the compiler on all vector instructions that the CPU reports, before it uses any.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


# Python looks for garbage after every 700 new containers, and while torch and JAX trace and compile that is a tenth of
# all their time. Nothing here waits for it: who asks whether something is gone calls gc.collect().
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def only_this_module_is_searched_for_garbage() -> None:
    """Modules of torch and JAX and the programs that JAX keeps are millions of objects, seconds of every collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def assert_layers_equal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Sequence[Any]], None]:
    """The stage of layers with these cases alone: every code, scale, product and gradient of the subject."""
    from f8emu.conformance import load_subject, verify
    from f8emu.conformance.run import stages
    from f8emu.report.verify import mismatch_lines

    def check(subject: str, cases: Sequence[Any]) -> None:
        monkeypatch.setattr(stages, "layer_cases", lambda full_size: cases)
        result = verify([load_subject(subject)], stages=["layers"])
        assert result.is_equal, [mismatch_lines(subject, 5) for subject in result.subjects]
        assert result.subjects[0].stages[0].cases_total == len(cases)

    return check


def pytest_report_header() -> str:
    """The versions that the results belong to."""
    found: list[str] = []
    for name in ("numpy", "ml_dtypes", "torch", "triton", "jax", "jaxlib", "hypothesis"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what was not asked for (`exhaustive`) or cannot run here (`gpu`)."""
    if "exhaustive" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(pytest.mark.skip(reason="minutes to hours; ask for it with -m exhaustive"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_hopper_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device of compute capability 9.0"))


def _has_hopper_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
