"""One verdict on a rollout: the weights of trainer and server, batch invariance, captures of one batch, and decode."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from f8emu import __version__
from f8emu.audit.blocks import CODES
from f8emu.audit.checkpoint import FLOATS, MANIFEST, Checkpoint, read_checkpoint
from f8emu.capture.read import CapturedStep, read_capture
from f8emu.capture.record import INDEX, TensorRecord
from f8emu.conformance.compare import counted
from f8emu.conformance.run.result import Progress, Silent
from f8emu.dialects import dialect_by_name
from f8emu.rollout.batch import UNKNOWN, invariances, shapes_of
from f8emu.rollout.captured import compare_captures
from f8emu.rollout.certificate import Certificate, CertificateError, Difference, Named, content_hash
from f8emu.rollout.checksums import SGLANG, VLLM, Checksums
from f8emu.rollout.expected import KERNELS, expected_checksums
from f8emu.rollout.seen import Seen
from f8emu.rollout.weights import by_bytes, by_digest
from f8emu.spec import Recipe, SpecError
from f8emu.spec.chips import CHIPS, named
from f8emu.spec.serialize import recipe_from_dict
from f8emu.split_k.plan import plan_from_json, plans_of, shipped_plan
from f8emu.split_k.trees import SplitPlan
from f8emu.strict import faults_as, parsed, read_regular, require

_STORED = ("export", "checkpoint")
_CAPTURED = "captured trainer", "captured server"


def certify(
    trainer: str | Path,
    server: str | Path,
    *,
    checksums: str | Path | None = None,
    captures: tuple[str | Path, str | Path] | None = None,
    plan: str | Path | None = None,
    batch: Sequence[int] = (),
    dialect: str | None = None,
    engine: str | None = None,
    kernel: str = "cutlass",
    tensor_parallel: int = 1,
    names: Sequence[str] = (),
    progress: Progress | None = None,
) -> Certificate:
    """Compare everything that is given of a trainer and its server, and say what was not seen.

    Args:
        trainer: a directory of `export_float8`, a checkpoint in high precision with the `dialect` that casts it,
            expected checksums as `f8emu checksums` writes them, or a capture.
        server: the answer of its weight checker as JSON, a checkpoint, or a capture.
        checksums: such an answer beside a `server` that is none.
        captures: of the trainer and of the server, of the same tokens.
        plan: shapes of `f8emu record --plans`, before those that f8emu has.
        batch: numbers of rows that GEMMs of trainer and server have.
        dialect: the quantizer that casts the weights of a trainer in high precision.
        engine: vllm or sglang, if the answer does not tell by its form.
        kernel: what the engine multiplies with, as for `expected_checksums`.
        tensor_parallel: the server's ranks.
        names: pairs `REGEX=REPLACEMENT` that make the trainer's names of layers the server's.
        progress: receives the progress.

    Exactness: bytes, digests and bits are compared; nothing has a tolerance. Invariance is as well known as its
    evidence says: by rule and by plan of the GEMMs of the recipe's library, measured of the server's own.

    Raises:
        SpecError: a trainer in high precision without a dialect, checksums without an engine; an argument of no
            meaning, or one that contradicts a file.
        CertificateError, CheckpointError, CaptureError: a file that cannot be read.
    """
    bar = progress or Silent()
    # 1. What is what.
    _require_arguments(captures, (*batch, tensor_parallel), dialect, engine, kernel)
    kinds = _kind(Path(trainer)), _kind(Path(server))
    paths = {"trainer": trainer, "server": server, "checksums": checksums, "plan": plan}
    paths |= dict(zip(_CAPTURED, captures or (), strict=False))
    if kinds == ("capture", "capture") and captures is None:
        captures = trainer, server
    sides = {role: Path(path) for role, path in paths.items() if path is not None}
    bar.begin("certify", "hashes of files", len(sides))
    files: list[Named] = []
    for role, path in sides.items():
        with faults_as(CertificateError, "certify", path):
            files.append(Named(role=role, path=str(path), kind=_kind(path), sha256=content_hash(path)))
        bar.advance()
    for file in files:
        if file.role == "checksums" and file.kind != "JSON":
            what = f"checksums must be a server's answer, a file of JSON; got a {file.kind}: {file.path}"
            raise SpecError(f"certify: {what}")
    # 2. Weights: two checkpoints, and every answer of a checker.
    bar.begin("certify", "weights, captures and invariance", 3)
    result = Seen()
    stored = {role: read_checkpoint(sides[role]) for role, kind in zip(sides, kinds, strict=False) if kind in _STORED}
    compared = [by_bytes(stored["trainer"], stored["server"], dialect or "")] if len(stored) == 2 else []
    expected = None
    for answer in [_json(file.path) for file in files if file.role in ("server", "checksums") and file.kind == "JSON"]:
        options: dict[str, Any] = {"dialect": dialect, "kernel": kernel, "tensor_parallel": tensor_parallel}
        expected = expected or _expected(sides["trainer"], kinds[0], answer, engine, options)
        compared.append(by_digest(expected, answer))
    for weights in compared:
        result.differences += weights.differences
        alike: dict[str, list[str]] = {}
        for name, why in weights.not_predicted:
            alike.setdefault(why, []).append(name)
        for why, alike_names in alike.items():
            more = f" and {len(alike_names) - 1} more" if alike_names[1:] else ""
            result.lacks("weights", f"{alike_names[0]}{more} ({why})")
    if not compared and kinds != ("capture", "capture"):
        remedy = "; pass both captures by --captures" if "capture" in kinds else "; the trainer comes first"
        result.lacks("weights", f"{kinds[0]} beside {kinds[1]}: these two are not compared{remedy}")
    bar.advance()
    # 3. Captures, in which operands are weights too.
    steps: tuple[Sequence[CapturedStep], ...] = tuple(_steps(Path(path)) for path in captures or ())
    if steps:
        compare_captures(steps[0], steps[1], names, result)
        for role, side in zip(("trainer", "server"), steps, strict=True):
            _bound(role, stored.get(role), side, result)
    else:
        result.lacks("captures", "captures of trainer and server (--captures)", was_asked=False)
    bar.advance()
    # 4. Batch invariance.
    recipes = _recipes(sides["trainer"], kinds[0], steps[0] if steps else ())
    shapes, over = shapes_of(stored.values(), [step for side in steps for step in side]), _plan(plan, recipes)
    entries, differences = invariances(recipes, shapes, batch, result.measured, over)
    result.differences += differences
    lone = [str(entry["layer"]) for entry in entries if entry["evidence"] == UNKNOWN]
    if not batch:
        result.lacks("invariance", "that of the recipe's GEMMs at numbers of rows (--batch)", was_asked=False)
    elif lone or not entries:
        result.lacks("invariance", f"{counted(len(lone), 'layer')} ({', '.join(lone[:3]) or 'no float8 layer'})")
    if not result.measured:
        text = "that of the server's own kernels: capture decode and prefill of the same tokens"
        result.lacks("invariance", text, was_asked=False)
    bar.advance()
    headers = [step.header for side in steps for step in side[:1]]
    setting = {
        "recipe": recipes[0].to_dict() if len(recipes) == 1 else None,
        "recipe_hash": recipes[0].content_hash if len(recipes) == 1 else None,
        "source_dtype": _source_dtype(stored.get("trainer"), steps[0] if steps else (), expected),
        "dialects": _dialects(recipes, expected.dialect if expected else dialect or ""),
        "versions": {"f8emu": __version__, "captures": [dict(header.versions) for header in headers]},
        "engine": _engine(expected) if expected else None,
        "plans": over.library + " on " + over.chip if over else plans_of(CHIPS[recipe.chip] for recipe in recipes),
        "chips": {"recipe": [recipe.chip for recipe in recipes], "captures": [header.device for header in headers]},
        "batch": list(batch),
        "layout": {
            "tensor_parallel": expected.tensor_parallel if expected else tensor_parallel,
            "captured_ranks": [header.world_size for header in headers],
        },
    }
    return Certificate(
        files=tuple(files),
        setting=setting,
        weights=tuple(weights.to_json() for weights in compared),
        invariance=tuple(entries),
        captures=result.captures,
        decode=result.decode,
        differences=tuple(result.differences),
        not_seen=tuple(result.not_seen),
    )


def _require_arguments(
    captures: object, counts: Sequence[int], dialect: str | None, engine: str | None, kernel: str
) -> None:
    # Of those too for which this comparison has no use: a certificate would state them.
    if captures is not None and not (isinstance(captures, list | tuple) and len(captures) == 2):
        raise SpecError(f"certify: captures must be two paths, of trainer and server; got {captures!r}")
    for count in counts:
        if type(count) is not int or count < 1:
            raise SpecError(f"certify: batch and tensor_parallel must be integers of at least 1; got {count!r}")
    for name, value, known in (("engine", engine, (None, VLLM, SGLANG)), ("kernel", kernel, KERNELS)):
        if value not in known:
            raise SpecError(f"certify: {name} must be one of {', '.join(filter(None, known))}; got {value!r}")
    if dialect is not None:
        dialect_by_name(dialect)


def _bound(role: str, checkpoint: Checkpoint | None, steps: Sequence[CapturedStep], result: Seen) -> None:
    # Whether the captured weights are those of the checkpoint: if not, two halves of a certificate are of two models.
    compared = 0
    for captured in (record for step in steps for record in step.records if record.record.what == "output"):
        tensor = checkpoint.tensors.get(f"{captured.record.layer}.weight") if checkpoint else None
        codes = captured.load().get("b.codes") if tensor is not None and tensor.dtype in CODES else None
        if tensor is not None and codes is not None and codes.shape == tensor.shape:
            compared += 1
            if tensor.read().tobytes() != codes.tobytes():
                cause, seen = (
                    "captured with other weights",
                    f"codes of the {role}'s capture are not those of its checkpoint",
                )
                result.differences.append(Difference(part="captures", place=tensor.name, cause=cause, seen=seen))
                return
    if checkpoint is not None and not compared:
        result.lacks("captures", f"that the {role}'s captured weights are those that were compared", was_asked=False)


def _calls(path: Path) -> list[Path]:
    # Captures in a folder: the plugins of servers write one for each call.
    return sorted({index.parents[1] for index in path.glob(f"*/step-*/{INDEX}")})


def _steps(path: Path) -> list[CapturedStep]:
    steps = [step for call in _calls(path) or [path] for step in read_capture(call)]
    return sorted(steps, key=lambda step: (step.header.step, step.header.rank))


def _kind(path: Path) -> str:
    if path.is_file() and path.suffix != ".safetensors":
        return "JSON"
    if (path / INDEX).exists() or any(path.glob(f"step-*/{INDEX}")) or _calls(path):
        return "capture"
    return "export" if (path / MANIFEST).exists() else "checkpoint"


def _json(path: str | Path) -> Any:
    with faults_as(CertificateError, "certify", path, "give the JSON of the server's checker"):
        return parsed(read_regular(Path(path)), "JSON")


def _expected(trainer: Path, kind: str, answer: object, engine: str | None, options: Mapping[str, Any]) -> Checksums:
    # Those of a file, or computed from the trainer's checkpoint for the engine that has answers of this form.
    if kind == "JSON":
        expected = Checksums.from_json(_json(trainer))
        if engine not in (None, expected.engine):
            raise SpecError(
                f"certify: engine must be {expected.engine}, as {trainer} says; got {engine!r}; leave it out"
            )
        return expected
    forms = {VLLM: isinstance(answer, list) or (isinstance(answer, dict) and "checksums" in answer)}
    forms |= {SGLANG: isinstance(answer, dict) and "ranks" in answer}
    name: Any = engine or next((name for name, fits in forms.items() if fits), None)
    if name is None:
        what = f"an answer of no known form: {str(answer)[:60]}"
        raise SpecError(f"certify: {what}; give the JSON of the server's checker, or pass --engine")
    if kind not in _STORED:
        raise SpecError(f"certify: checksums need a checkpoint of the trainer; got a {kind}; give it as TRAINER")
    return expected_checksums(trainer, engine=name, **options)


def _engine(expected: Checksums) -> dict[str, str]:
    return {"name": expected.engine, "versions": expected.engine_versions, "kernel": expected.kernel}


def _recipes(trainer: Path, kind: str, steps: Sequence[CapturedStep]) -> list[Recipe]:
    if kind == "export":
        with faults_as(CertificateError, "certify", trainer / MANIFEST, "export it again"):
            manifest = _json(trainer / MANIFEST)
            require(isinstance(manifest, dict) and "recipe" in manifest, "a recipe", "none")
            return [recipe_from_dict(manifest["recipe"])]
    return list(dict.fromkeys(recipe for step in steps for recipe in step.header.recipes.values()))


def _plan(path: str | Path | None, recipes: Sequence[Recipe]) -> SplitPlan | None:
    if path is None:
        return None
    with faults_as(CertificateError, "certify", path, "write it with f8emu record --plans"):
        recorded = plan_from_json(read_regular(Path(path)), str(path))
    if not recipes:
        return recorded
    chip = CHIPS[recipes[0].chip]
    if named(recorded.chip) not in (None, chip):
        raise SpecError(f"certify: {path} is of {recorded.chip}, the recipe of {chip.name}; record the plan there")
    return recorded.over(shipped_plan(chip.plan)) if chip.plan else recorded


def _source_dtype(trainer: Checkpoint | None, steps: Sequence[CapturedStep], expected: Checksums | None) -> str:
    # Of the weights before their casts, as far as a file shows them.
    shown = {
        captured.record.dtype
        for step in steps
        for captured in step.records
        if isinstance(captured.record, TensorRecord) and captured.record.what == "weight"
    }
    if shown:
        return ", ".join(sorted(shown))
    dtypes = {tensor.dtype for tensor in trainer.tensors.values() if tensor.is_matrix} if trainer else set[str]()
    dtypes |= {*expected.source.dtype.split(", ")} if expected else set[str]()
    return "not shown by codes" if dtypes & {*CODES} else ", ".join(sorted(dtypes & {*FLOATS}))


def _dialects(recipes: Sequence[Recipe], weights: str) -> Mapping[str, Any]:
    # The quantizer that was named, or the rule of the recipe.
    if len(recipes) != 1:
        return {"weights": weights, "activations": ""}
    rules: dict[str, Any] = {
        name: (cast.scale_rule or recipes[0].scale_rule).to_dict()
        for name, cast in (("activations", recipes[0].output.a), ("weights", recipes[0].output.b))
    }
    return rules | ({"weights": weights} if weights else {})
