"""The layouts of src/xla.h against the header of the jaxlib that is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

SOURCES = Path(__file__).parents[2] / "f8emu" / "native" / "src"
COMPILER = shutil.which(os.environ.get("CC", "cc"))

ENUMS = {
    "XLA_MAJOR": "XLA_FFI_API_MAJOR",
    "XLA_IS_METADATA_QUERY": "XLA_FFI_Extension_Metadata",
    "XLA_IS_BUFFER": "XLA_FFI_ArgType_BUFFER",
    "XLA_IS_BUFFER + 0": "XLA_FFI_RetType_BUFFER",
    "XLA_IS_ARRAY": "XLA_FFI_AttrType_ARRAY",
    "XLA_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "XLA_INVALID_ARGUMENT": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "XLA_RESOURCE_EXHAUSTED": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "XLA_INT32": "XLA_FFI_DataType_S32",
    "XLA_UINT8": "XLA_FFI_DataType_U8",
    "XLA_FLOAT16": "XLA_FFI_DataType_F16",
    "XLA_FLOAT32": "XLA_FFI_DataType_F32",
    "XLA_BFLOAT16": "XLA_FFI_DataType_BF16",
    "XLA_E5M2": "XLA_FFI_DataType_F8E5M2",
    "XLA_E4M3FN": "XLA_FFI_DataType_F8E4M3FN",
    "XLA_E5M2FNUZ": "XLA_FFI_DataType_F8E5M2FNUZ",
    "XLA_E4M3FNUZ": "XLA_FFI_DataType_F8E4M3FNUZ",
    "XLA_E8M0FNU": "XLA_FFI_DataType_F8E8M0FNU",
}
FIELDS: dict[str, str] = {
    "xla_version XLA_FFI_Api_Version": (
        "size struct_size, extensions extension_start, major major_version, minor minor_version"
    ),
    "xla_metadata XLA_FFI_Metadata": "size struct_size, version api_version, traits traits, state_type state_type_id",
    "xla_metadata_query XLA_FFI_Metadata_Extension": (
        "base.size extension_base.struct_size, base.kind extension_base.type, base.next extension_base.next, "
        "answer metadata"
    ),
    "xla_buffer XLA_FFI_Buffer": (
        "size struct_size, extensions extension_start, dtype dtype, data data, rank rank, extents dims"
    ),
    "xla_values XLA_FFI_Args": "size struct_size, extensions extension_start, count size, kinds types, items args",
    "xla_values XLA_FFI_Rets": "size struct_size, extensions extension_start, count size, kinds types, items rets",
    "xla_name XLA_FFI_ByteSpan": "text ptr, length len",
    "xla_array XLA_FFI_Array": "dtype dtype, count size, data data",
    "xla_attributes XLA_FFI_Attrs": (
        "size struct_size, extensions extension_start, count size, kinds types, names names, items attrs"
    ),
    "xla_new_error XLA_FFI_Error_Create_Args": (
        "size struct_size, extensions extension_start, message message, kind errc"
    ),
    "xla_old_error XLA_FFI_Error_Destroy_Args": "size struct_size, extensions extension_start, error error",
    "xla_thread_count XLA_FFI_ThreadPool_NumThreads_Args": (
        "size struct_size, extensions extension_start, context ctx, threads num_threads"
    ),
    "xla_api XLA_FFI_Api": (
        "size struct_size, extensions extension_start, version api_version, internal internal_api, new_error "
        "XLA_FFI_Error_Create, free_error XLA_FFI_Error_Destroy, thread_count XLA_FFI_ThreadPool_NumThreads"
    ),
    "xla_call XLA_FFI_CallFrame": (
        "size struct_size, extensions extension_start, api api, context ctx, stage stage, operands args, results "
        "rets, attributes attrs"
    ),
}
"""Our type and XLA's: our field and XLA's, and so on."""
MAY_GROW = {"xla_api", "xla_call"}
"""Read through pointers, and XLA appends to them."""


def assertions() -> list[str]:
    equalities = [f"({ours}) == (int){theirs}" for ours, theirs in ENUMS.items()]
    equalities.append("XLA_OLDEST_MINOR <= XLA_FFI_API_MINOR")
    for types, fields in FIELDS.items():
        ours, theirs = types.split()
        comparison = "<=" if ours in MAY_GROW else "=="
        equalities.append(f"sizeof({ours}) {comparison} sizeof({theirs})")
        for mine, name in map(str.split, fields.split(", ")):
            equalities.append(f"offsetof({ours}, {mine}) == offsetof({theirs}, {name})")
            equalities.append(f"sizeof((({ours} *)0)->{mine}) == sizeof((({theirs} *)0)->{name})")
    return equalities


def compiled(conditions: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla.h"']
    lines += [f'_Static_assert({condition}, "{condition}");' for condition in conditions]
    (folder / "layouts.c").write_text("\n".join(lines) + "\n")
    assert COMPILER is not None
    command = [COMPILER, "-std=gnu11", "-fsyntax-only", "-I", str(SOURCES), "-I", jax.ffi.include_dir(), "layouts.c"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_layouts_are_xlas(tmp_path: Path) -> None:
    result = compiled(assertions(), tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(
    "wrong",
    ["XLA_EXECUTE == (int)XLA_FFI_ExecutionStage_PREPARE", "offsetof(xla_api, hole) == offsetof(xla_api, size)"],
)
def test_a_difference_is_found(tmp_path: Path, wrong: str) -> None:
    result = compiled([wrong], tmp_path)
    assert result.returncode != 0 and "static assertion failed" in result.stderr.lower(), result.stderr
