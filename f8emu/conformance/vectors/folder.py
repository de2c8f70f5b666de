"""A folder of vectors: every table as text and as safetensors, a manifest, and SHA-256 sums of all."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from f8emu import __version__
from f8emu.conformance.cases.container import encode_container
from f8emu.conformance.run.result import Progress
from f8emu.conformance.vectors.gemms import GemmSet, GemmVectors
from f8emu.conformance.vectors.table import Summary, Table
from f8emu.conformance.vectors.values import cast_table, decode_table, scale_table
from f8emu.environment import whole_directory
from f8emu.spec.chip import Chip
from f8emu.spec.formats import FLOAT8, HIGH_PRECISION

SCHEMA = 1
Maker = Callable[[], Table]


def makers(
    chip: Chip, sets: Sequence[GemmSet], seed: int, casts: int, gemms: int
) -> tuple[list[Maker], list[Maker], list[Maker]]:
    """What makes the tables of casts, of scales, and of GEMMs."""
    vectors = GemmVectors(chip=chip, seed=seed, count=gemms)
    pairs = product(HIGH_PRECISION, FLOAT8)
    of_casts = [decode_table, *(partial(cast_table, *pair, seed, casts) for pair in pairs)]
    return of_casts, [scale_table], [partial(vectors.table, name) for name in sets]


def write_vectors(
    path: Path, asked: Sequence[Maker], chip: Chip, seed: int, command: Sequence[str], progress: Progress
) -> dict[str, Summary]:
    """Write the folder, whole or not at all, and summarize its files.

    Its bytes depend on the arguments and the version of f8emu alone.
    """
    origin = {
        "chip": chip.name,
        "evidence": chip.evidence.value,
        "seed": str(seed),
        "f8emu": __version__,
        "computed by": "f8emu.numpy, whose bits are those of f8ref.exact",
        "described in": "docs/guides/vectors.md and reference/NUMERICS.md of f8emu",
    }
    files: dict[str, Summary] = {}
    progress.begin("vectors", chip.name, len(asked))
    with whole_directory(path) as folder:
        for make in asked:
            table = make()
            (folder / f"{table.name}.txt").write_text(table.text(origin), encoding="ascii")
            (folder / f"{table.name}.safetensors").write_bytes(_container(table, origin))
            files[f"{table.name}.txt"] = table.summary()
            progress.advance()
        manifest = {"schema": SCHEMA, "command": list(command), **origin, "seed": seed}
        manifest["files"] = {name: summary._asdict() for name, summary in files.items()}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="ascii")
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
        (folder / "SHA256SUMS").write_text("".join(sums), encoding="ascii")
    return files


def _container(table: Table, origin: Mapping[str, str]) -> bytes:
    tensors, parameters, rules = table.tensors()
    lists = {"parameters of batches": json.dumps(parameters), "rules by index": json.dumps(rules)}
    return encode_container(tensors, {**table.described(origin), **lists})
