"""Fixtures of the torch tests."""

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from f8emu.native import library
from f8emu.torch import cpu_casts
from tests.torch_path.interpreter import Kernels


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """A test's compiled code counts toward no other's limit of recompilations."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    yield
    dist.destroy_process_group()


@pytest.fixture(params=(True, False), ids=("engine", "torch"))
def engine_and_torch(request, monkeypatch) -> None:
    """The engine's casts, and the operations of torch that run on GPUs, under compilers and without an engine."""
    if request.param and library.unavailable():
        pytest.skip(str(library.unavailable()))
    if not request.param:
        monkeypatch.setattr(cpu_casts, "takes", lambda x: False)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Calls operators with kernels or without."""
    return Kernels(monkeypatch)


_TORCHAO: dict[str, ModuleType] = {}
"""Its modules, which cannot be imported twice."""


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torchao.float8, which nobody finds afterwards: transformers and others would do otherwise than here."""
    monkeypatch.syspath_prepend(Path(sys.prefix, "stacks"))
    sys.modules.update(_TORCHAO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield importlib.import_module("torchao.float8")
        except ModuleNotFoundError as error:
            pytest.fail(f"{error}; `make install` brings the packages of other stacks")
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
                _TORCHAO[name] = sys.modules.pop(name)
