"""The weights of a trainer beside those that a server holds: how many are equal, and what made the others."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from f8emu.audit.blocks import CODES, Weight, measured, weights_of
from f8emu.audit.checkpoint import DTYPES, FLOATS, Checkpoint, Joined, Tensor
from f8emu.audit.formats import Format, format_of
from f8emu.audit.pairs import paired
from f8emu.audit.source import compare
from f8emu.capture.explain import first_block, is_of_copy
from f8emu.conformance.compare import codes_of, counted, different, distances
from f8emu.dialects import Dialect, dialect_by_name, quantize
from f8emu.dialects.arithmetic import block_amax, factors_from_stored
from f8emu.dialects.matching import relation
from f8emu.rollout.certificate import Difference
from f8emu.rollout.checksums import Checksums, Outcome, TensorChecksum
from f8emu.spec.errors import SpecError

MOST = 20
"""Weights that differ and are explained; all are counted."""
DTYPE, FLOOR, STALE = "wrong source dtype", "another floor of the scale rule", "a stale shard"
Arrays = tuple[np.ndarray, np.ndarray]
"""Codes [rows, K], and their scales in the shape of their grid."""


@dataclass(slots=True, kw_only=True)
class Weights:
    """Tensors, counted, and what differs."""

    by: str
    """What was compared: bytes, or digests."""
    equal: int = 0
    rounded: int = 0
    """Of the equal: those in high precision that are the trainer's, rounded to the server's dtype."""
    lists: dict[str, list[str]] = field(
        default_factory=lambda: {name: [] for name in ("different", "missing", "extra")}
    )
    not_predicted: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Name, and why it was not compared."""
    differences: list[Difference] = field(default_factory=list[Difference])

    def add(self, place: str, cause: str, seen: str) -> None:
        """Keep a difference."""
        self.differences.append(Difference(part="weights", place=place, cause=cause, seen=seen))

    def to_json(self) -> dict[str, Any]:
        """Counts, and the first names of each kind."""
        compared = self.equal + sum(map(len, self.lists.values()))
        lists = self.lists | {"not_predicted": [f"{name} ({why})" for name, why in self.not_predicted]}
        counts = {name: len(kept) for name, kept in lists.items()}
        first = {name: kept[:MOST] for name, kept in lists.items() if kept}
        return {"by": self.by, "compared": compared, "equal": self.equal, "rounded": self.rounded, **counts} | {
            "first": first
        }

    def close(self) -> "Weights":
        """With a difference for tensors that one side alone has."""
        for name, text in (("missing", "the server does not have it"), ("extra", "the server alone has it")):
            if kept := self.lists[name]:
                self.add(kept[0], f"{name} at the server", f"{text}; {counted(len(kept), 'such tensor')}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    # A float8 weight as the trainer's side gives it, and as the server's side holds it.
    weight: Weight
    """The server's; with its origin, if the trainer's is in high precision."""
    names: frozenset[str]
    """The tensors of both that it consists of."""
    ours: Callable[[], Arrays]
    uncompared: str = ""
    """Why the trainer's is not known."""


def by_digest(expected: Checksums, shown: object) -> Weights:
    """A server's answer beside the digests that it must show. No byte of it is at hand, so that few causes are seen."""
    result, known = Weights(by=f"{expected.engine}, {expected.digests}"), expected.by_key
    kinds = {Outcome.DIFFERENT: "different", Outcome.MISSING: "missing", Outcome.UNEXPECTED: "extra"}
    wrong = expected.compare(shown)
    for mismatch in wrong:
        if mismatch.outcome in kinds:
            result.lists[kinds[mismatch.outcome]].append(mismatch.key)
        else:
            why = f" by {expected.engine}" if mismatch.outcome is Outcome.NOT_SHOWN else f": {mismatch.expected}"
            result.not_predicted.append((mismatch.key, f"{mismatch.outcome}{why}"))
    result.equal = len(known) - sum(mismatch.key in known for mismatch in wrong)
    owners = _owners(expected)
    unequal = [mismatch for mismatch in wrong if mismatch.outcome is Outcome.DIFFERENT]
    # 1. Every float8 weight of one rank, and nothing of the others.
    keys = {mismatch.key for mismatch in unequal if mismatch.shown not in owners}
    ranks = {known[key].rank for key in keys}
    of_rank = {tensor.key for tensor in expected.tensors if tensor.rank in ranks and "float8_e4m3" in tensor.dtype}
    if len(ranks) == 1 < expected.tensor_parallel and of_rank and of_rank <= keys:
        result.add(f"rank {min(ranks)}", STALE, "all of its float8 weights differ, and nothing of the other ranks")
        return result.close()
    # 2. Another tensor's bytes.
    for mismatch in unequal[:MOST]:
        owner = owners.get(mismatch.shown)
        cause = _of_other(owner.key) if owner is not None and owner.shape == known[mismatch.key].shape else ""
        result.add(mismatch.key, cause, f"digest {mismatch.shown}; expected {mismatch.expected}")
    return result.close()


def _owners(expected: Checksums) -> dict[str, TensorChecksum]:
    # Digest -> whose it is, if it is of one name alone. Scales are few numbers, and may be equal by chance.
    owners: dict[str, TensorChecksum] = {}
    shared = set[str]()
    for tensor in expected.tensors:
        if "scale" not in tensor.name and owners.setdefault(tensor.engine_digest, tensor).name != tensor.name:
            shared.add(tensor.engine_digest)
    return {digest: tensor for digest, tensor in owners.items() if digest not in shared}


def by_bytes(trainer: Checkpoint, server: Checkpoint, dialect: str) -> Weights:
    """Two checkpoints. A trainer's in high precision is cast by `dialect` first, one weight at a time."""
    has_codes = [any(tensor.dtype in CODES for tensor in side.tensors.values()) for side in (trainer, server)]
    is_cast = has_codes == [False, True]
    if is_cast and not dialect:
        raise SpecError(
            "certify: the trainer has weights in high precision, the server in float8; pass --dialect, which casts them"
        )
    if dialect and not is_cast:
        raise SpecError("certify: dialect casts a trainer in high precision for a server in float8; leave it out")
    result = Weights(by=f"bytes, the trainer's cast by {dialect}" if is_cast else "bytes")
    form = format_of(server if is_cast else trainer)
    used, owners, wrong, right = set[str](), dict[str, str](), list[_Pair](), set[object]()
    pairs = _cast(trainer, server, form, dialect_by_name(dialect)) if is_cast else _stored(trainer, server, form)
    # 1. Float8 weights with their scales.
    for pair in pairs:
        used |= pair.names
        if pair.uncompared:
            result.not_predicted.append((pair.weight.name, pair.uncompared))
            continue
        (codes, scale), (held, factors) = pair.ours(), _loaded(pair.weight)
        owners |= {digest: place for place, digest in _digests(pair.weight, codes)}
        if codes.tobytes() == held.tobytes() and scale.tobytes() == factors.tobytes():
            result.equal += 1
            right.add(pair.weight.codes.file)
        else:
            result.lists["different"].append(pair.weight.name)
            wrong.append(pair)
    # 2. The others by their names. A copy that is rounded to the server's dtype is what servers make.
    for name in sorted((trainer.tensors.keys() | server.tensors.keys()) - used):
        x, y = trainer.tensors.get(name), server.tensors.get(name)
        if x is None or y is None:
            result.lists["extra" if x is None else "missing"].append(name)
        elif (x.dtype, x.shape) == (y.dtype, y.shape) and x.sha256 == y.sha256:
            result.equal += 1
        elif (x.dtype, y.dtype) == ("F32", "BF16") and x.shape == y.shape and is_of_copy(x.read(), y.read()):
            result.equal, result.rounded = result.equal + 1, result.rounded + 1
        else:
            result.lists["different"].append(name)
            result.add(name, *_unlike(x, y))
    # 3. What made them: another's bytes, a rule, or all of a file.
    files = {pair.weight.codes.file for pair in wrong}
    for pair in wrong[:MOST]:
        cause, seen = _explained(pair, owners, form, dialect if is_cast else "")
        if not cause and len(files) == 1 and right and not files & right:
            file = pair.weight.codes.file.name
            result.add(file, STALE, f"all of its {counted(len(wrong), 'float8 weight')} differ, and no other; {seen}")
            break
        result.add(pair.weight.name, cause, seen)
    return result.close()


def _unlike(ours: Tensor, theirs: Tensor) -> tuple[str, str]:
    # Of two tensors of one name whether they are of one kind, and how many elements differ.
    kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (ours, theirs)]
    if kinds[0] == kinds[1] and ours.dtype in DTYPES:
        pairs = zip(ours.parts(), theirs.parts(), strict=True)
        count = sum(int(np.count_nonzero(codes_of(x) != codes_of(y))) for x, y in pairs)
        return "", f"{count} of {ours.size} values differ, {kinds[0]}"
    is_high = ours.dtype in CODES and theirs.dtype in FLOATS
    return "high precision at the server" if is_high else "", f"{kinds[1]}; the trainer has {kinds[0]}"


def _stored(trainer: Checkpoint, server: Checkpoint, form: Format) -> Iterator[_Pair]:
    # Codes and scales of the same names, shapes and dtypes.
    for weight in weights_of(trainer, form):
        parts = [part for part in (weight.codes, weight.scale) if part]
        held = [server.tensors.get(part.name) for part in parts]
        if weight.is_scaled and [(y.dtype, y.shape) for y in held if y] == [(x.dtype, x.shape) for x in parts]:
            there = replace(weight, codes=held[0], scale=held[1])
            names = frozenset(part.name for part in parts)
            yield _Pair(weight=there, names=names, ours=partial(_loaded, weight))


def _cast(trainer: Checkpoint, server: Checkpoint, form: Format, dialect: Dialect) -> Iterator[_Pair]:
    # The server's float8 weights, each with the weights in high precision that it is of.
    for whole in weights_of(server, form):
        for weight in paired(whole, trainer.tensors):
            origin, why = weight.origin, ""
            of = () if origin is None else origin.parts if isinstance(origin, Joined) else (origin,)
            names = frozenset(part.name for part in (whole.codes, whole.scale, *of) if part is not None)
            if origin is None or origin.dtype not in FLOATS or not weight.is_scaled:
                why = weight.uncompared or "it has no scale that can be read"
            elif weight.block not in dialect.blocks:
                why = f"{dialect.name} has no blocks of {weight.extent[0]} x {weight.extent[1]}"
            yield _Pair(weight=weight, names=names, ours=partial(_quantized, weight, dialect), uncompared=why)


def _loaded(weight: Weight) -> Arrays:
    assert weight.scale is not None and weight.block is not None, "a weight with a scale was requested"
    codes = weight.codes.read().reshape(-1, weight.codes.shape[-1])
    return codes, weight.scale.read().reshape(-1, weight.grid[-1])


def _quantized(weight: Weight, dialect: Dialect) -> Arrays:
    # A checkpoint has the scales that decode, also where the stack multiplies by the stored one.
    assert weight.origin is not None
    x = weight.origin.read(0, weight.codes.size).reshape(-1, weight.codes.shape[-1])
    codes, scale = quantize(x, dialect, block=weight.block)
    return codes, factors_from_stored(scale, dialect).scale if dialect.stored.is_multiplier else scale


def _digests(weight: Weight, codes: np.ndarray) -> Iterator[tuple[str, str]]:
    # Of every matrix; experts may be one tensor.
    matrices = codes.reshape(-1, *weight.codes.shape[-2:])
    for i, matrix in enumerate(matrices):
        place = f"{weight.name} expert {i}" if len(matrices) > 1 else weight.name
        yield place, hashlib.sha256(matrix.tobytes()).hexdigest()


def _of_other(owner: str) -> str:
    return f"{'swapped experts' if 'expert' in owner else 'swapped tensors'}: the bytes of {owner}"


def _explained(pair: _Pair, owners: dict[str, str], form: Format, dialect: str) -> tuple[str, str]:
    # 1. What differs, and where first.
    weight = pair.weight
    (codes, scale), (held, factors) = pair.ours(), _loaded(weight)
    s, t = scale.astype(np.float32), factors.astype(np.float32)
    wrong, moved = different(held, codes), different(t, s)
    place = first_block(moved if moved.any() else wrong, weight.extent, codes.shape)
    n = int(np.count_nonzero(moved))
    seen = f"{n} of {moved.size} scales and {np.count_nonzero(wrong)} of {wrong.size} codes differ"
    seen += f"; {place}" if place else ""
    # 2. The bytes of another weight.
    for name, digest in _digests(weight, held):
        if owners.get(digest, name) != name:
            return _of_other(owners[digest]), seen
    # 3. By the scales alone. 4. Of the source, by another dialect or in another dtype, as an audit says it.
    steps = distances(t[moved], s[moved])[0]
    if n and not wrong.any() and int(np.abs(steps).max()) == 1:
        cause = f"one ulp in {counted(n, 'scale')}"
    elif not wrong.any():
        cause = f"scales that are {of} the trainer's" if (of := relation(s, t)) else ""
    else:
        cause = _floored(weight, (codes, s), (held, t), moved)
    if dialect and weight.origin is not None:
        compare(weight, measured(weight), weight.origin, [], form)
        copies = (finding.found.partition("; ")[0] for finding in weight.findings if finding.check == "cast-from")
        dtype = next((f"{DTYPE}: {copy}" for copy in copies), "")
        cause = "; ".join(filter(None, (cause, dtype or _of_dialects(weight.dialects or (), dialect))))
    return cause, seen


def _of_dialects(names: tuple[str, ...], ours: str) -> str:
    # Floors alone, or another rule.
    mine = dialect_by_name(ours)
    if ours in names or not names:
        return "the signs of zeros" if names else ""
    for name in names:
        other = dialect_by_name(name)
        form = other.scale
        if form and mine.scale and mine.code == other.code:
            floors = {"amax_floor": form.amax_floor, "scale_floor": form.scale_floor}
            if replace(mine.scale, **floors) == form:
                return f"{FLOOR}: {name} instead of {ours}"
    return f"another dialect: {', '.join(names[:4])} instead of {ours}"


def _floored(weight: Weight, ours: Arrays, theirs: Arrays, moved: np.ndarray) -> str:
    # Where one side's scales are its smallest, all the same, with small codes, and the values are those of the other.
    for who, (a, s), (b, t) in (("the server's", ours, theirs), ("the trainer's", theirs, ours)):
        if not moved.any() or moved.all() or not np.all(t[moved] == t.min()) or np.any(s[moved] >= t[moved]):
            continue
        x, y = (block_amax(codes.astype(np.float32), weight.extent)[moved] for codes in (a, b))
        is_value = np.abs(x * s[moved] - y * t[moved]) <= np.maximum(x * s[moved] / 8, t[moved] / 512)
        is_rest = not (block_amax(different(a, b).astype(np.float32), weight.extent) > 0)[~moved].any()
        if is_rest and is_value.all() and (y < 448).all():
            return f"{FLOOR}: none of {who} scales is below {t.min():.6g}"
    return ""
