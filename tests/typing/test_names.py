"""The names that are types are those that the code has; the files beside this one hold at run time too."""

from collections.abc import Callable, Collection
from dataclasses import fields
from enum import Enum
from typing import Any, get_args

import pytest

from f8emu import spec
from f8emu.capture.replaying import ORACLES, OracleName
from f8emu.conformance.arrays import FRAMEWORKS
from f8emu.conformance.run.stages import STAGES, StageName
from f8emu.dialects import DIALECTS, DialectName
from f8emu.spec.chips import GPUS


def values(kind: type[Enum]) -> list[Any]:
    return [member.value for member in kind]


NAMES: dict[str, tuple[Any, Collection[str]]] = {
    "recipe": (spec.RecipeName, spec.NAMED_RECIPES),
    "granularity": (spec.GranularityName, values(spec.Granularity)),
    "float8": (spec.Float8Name, [format.name for format in spec.FLOAT8]),
    "high precision": (spec.HighPrecisionName, [format.name for format in spec.HIGH_PRECISION]),
    "format": (spec.FormatName, spec.FORMATS),
    "overflow": (spec.OverflowName, values(spec.Overflow)),
    "cast from": (spec.CastFromName, values(spec.CastFrom)),
    "gemm": (spec.GemmName, spec.GEMM_NAMES),
    "tensor": (spec.TensorName, spec.TENSORS),
    "arrays": (spec.ArraysName, FRAMEWORKS),
    "stage": (StageName, STAGES),
    "dialect": (DialectName, DIALECTS),
    "oracle": (OracleName, ORACLES),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_names_are_those_of_the_code(names: tuple[Any, Collection[str]]) -> None:
    literal, known = names
    assert sorted(get_args(literal)) == sorted(known)


def test_names_of_chips() -> None:
    """Every name, and no other, but for the lower case of architectures."""
    names = get_args(spec.ChipName)
    assert {*names} - GPUS.keys() == {"hopper", "ada", "blackwell"} and GPUS.keys() <= {*names}
    assert all(spec.chip_by_name("a call", name).name in spec.CHIPS for name in names)


def test_names_of_torch() -> None:
    pytest.importorskip("torch")
    from f8emu.torch import InspectConfig, InspectOptions
    from f8emu.torch.gemm.engine import Engine
    from f8emu.torch.serving.formats import CHECKPOINT_FORMATS, CheckpointFormat

    assert [*get_args(spec.EngineName)] == values(Engine)
    assert sorted(get_args(CheckpointFormat)) == sorted(CHECKPOINT_FORMATS)
    assert [*InspectOptions.__annotations__] == [field.name for field in fields(InspectConfig)]


def test_names_of_jax() -> None:
    pytest.importorskip("jax")
    from f8emu.jax.gemm.call import WAYS, ShardedK
    from f8emu.jax.gemm.engine import ENGINES

    assert get_args(spec.EngineName) == ENGINES and get_args(ShardedK) == WAYS


def test_right_and_wrong_names_at_run_time() -> None:
    """`make types` reports an error on each wrong line, and none on the right ones."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    from tests.typing import right_uses, wrong_literals

    right_uses.of_names()
    right_uses.of_tables()
    with pytest.warns(DeprecationWarning, match="write 'rowwise'"):
        right_uses.of_text("all_axiswise", "H100")
    wrong: dict[str, Callable[[], object]] = wrong_literals.WRONG
    assert len(wrong) == 10
    for name, call in wrong.items():
        with pytest.raises(spec.F8Error, match=f"{name!r}|got {name}|named {name}"):
            call()
