"""What a server must hold, as hashes of bytes, ours and the engine's own; and how a server's answer differs."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from f8emu.conformance.compare import counted
from f8emu.shown import Shown
from f8emu.spec.errors import OperandError
from f8emu.strict import Fault, faults_as, part, require

VLLM, SGLANG = "vllm", "sglang"
_HEX = re.compile(r"[0-9a-f]+")
_RANK = re.compile(r"(?:^|:)tp(\d+):")


class Outcome(StrEnum):
    """How a server's tensor compares with the expected one. Only the first three are faults."""

    DIFFERENT = "differs"
    MISSING = "missing"
    UNEXPECTED = "unexpected"
    NOT_PREDICTED = "not predicted"
    NOT_SHOWN = "not shown"
    """The engine has no digest of it."""
    OTHER_KIND = "another kind of digest"

    @property
    def is_fault(self) -> bool:
        return self in (Outcome.DIFFERENT, Outcome.MISSING, Outcome.UNEXPECTED)

    @property
    def has_digest(self) -> bool:
        """Whether the engine must show a digest of it."""
        return self in (Outcome.DIFFERENT, Outcome.MISSING, Outcome.OTHER_KIND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A tensor of which a server does not show the expected bytes."""

    outcome: Outcome
    key: str
    expected: str = ""
    """The engine's digest; or why there is none."""
    shown: str = ""

    @property
    def text(self) -> str:
        """A line."""
        shown = f" {self.shown}" if self.shown else ""
        expected = f"{'; expected' if self.outcome.has_digest else ':'} {self.expected}" if self.expected else ""
        return f"{self.key}: {self.outcome}{shown}{expected}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The checkpoint that was read."""

    path: str
    dtype: str
    """Those of its matrices, as the files name them: BF16, F32, or F8_E4M3."""
    sha256: str
    """Of config.json and the headers and sizes of all shards, or of every byte: `hashed` says which."""
    hashed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChecksum:
    """One tensor of one rank."""

    key: str
    """As the engine names it, with the rank: `dp0:pp0:pcp0:tp0:NAME` of vLLM, `tp0:NAME` of SGLang."""
    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    """Of the bytes that the engine holds, contiguous in `shape`."""
    engine_digest: str
    """The engine's own: vLLM's SHA-256, SGLang's 16 digits; empty where the engine shows none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checksums(Shown):
    """Every tensor that an engine must hold, on every rank."""

    SCHEMA: ClassVar[int] = 1
    engine: str
    engine_versions: str
    """The packages in which the loading code was read."""
    dialect: str
    """What quantizes, or quantized, the weights; empty: nobody."""
    kernel: str
    """The setting of the engine that decides what is kept after loading."""
    digests: str
    """The kind of `engine_digest`."""
    tensor_parallel: int
    source: Source
    tensors: tuple[TensorChecksum, ...]
    not_predicted: tuple[tuple[str, str], ...] = ()
    """(name, reason), of tensors whose bytes nobody can tell from the checkpoint alone.

    A weight stands for all tensors of its module.
    """
    notes: tuple[str, ...] = ()
    """What the digests of this engine cannot show."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` reads."""
        return json.loads(json.dumps({"schema": self.SCHEMA, **asdict(self)}))

    @classmethod
    def from_json(cls, data: object) -> "Checksums":
        """The inverse of `to_json`.

        Raises:
            OperandError: foreign, cut short, or of another version.
        """
        with faults_as(OperandError, "Checksums.from_json", remedy="write them with `f8emu checksums --form f8emu`"):
            require(isinstance(data, dict), "a JSON object", type(data).__name__)
            assert isinstance(data, dict)
            schema = data.get("schema")
            is_answer = schema is None and not data.keys().isdisjoint(("checksums", "ranks"))
            shown = "an engine's answer" if is_answer else f"schema {schema!r}"
            require(schema == cls.SCHEMA, f"schema {cls.SCHEMA}", shown)
            return part(cls, {key: value for key, value in data.items() if key != "schema"})

    @property
    def by_key(self) -> dict[str, TensorChecksum]:
        return {tensor.key: tensor for tensor in self.tensors}

    def engine_json(self) -> dict[str, Any]:
        """What the engine's checker answers.

        vLLM's are `checksums`, which its action compare takes as `baseline`; SGLang's are `ranks`.

        Names that are not predicted are absent: vLLM's own `compare` calls them mismatches.
        """
        if self.engine == VLLM:
            return {"checksums": {tensor.key: tensor.engine_digest for tensor in self.tensors}}
        ranks: list[dict[str, Any]] = []
        for rank in range(self.tensor_parallel):
            mine = [tensor for tensor in self.tensors if tensor.rank == rank and tensor.engine_digest]
            shown = {tensor.name: tensor.engine_digest for tensor in mine}
            place = {"role": "target", "tp_rank": rank, "tp_size": self.tensor_parallel, "dp_rank": 0, "dp_size": 1}
            place |= {"pp_rank": 0, "pp_size": 1, "rank": rank, "size": self.tensor_parallel}
            whole = hashlib.sha256("".join(name + shown[name] for name in sorted(shown)).encode()).hexdigest()
            ranks.append({"checksums": shown, "per_gpu_checksum": whole, "parallelism_info": [place]})
        engine = hashlib.sha256("".join(rank["per_gpu_checksum"] for rank in ranks).encode()).hexdigest()
        return {"success": True, "message": "", "ranks": ranks, "per_engine_checksum": engine}

    def compare(self, server: object) -> tuple[Mismatch, ...]:
        """Where a server's answer differs; empty if every tensor is there with the expected digest, and no other.

        `server` is the answer of vLLM's `/weight_checker`, or its `checksums`, or the list that
        `collective_rpc("compute_weight_checksums")` returns; SGLang's answer of `/weights_checker`; or what
        `engine_json` gives.

        Raises:
            OperandError: no such answer, or one of another number of ranks.
        """
        with faults_as(OperandError, "Checksums.compare", self.engine, "give the JSON of the engine's checker"):
            shown = dict(_answer(self.engine, server))
        remedy = "compute what as many ranks must hold (--tp), or ask every rank"
        with faults_as(OperandError, "Checksums.compare", self.engine, remedy):
            ranks = {match[1] for key in shown if (match := _RANK.search(key))}
            is_right, of = len(ranks) == self.tensor_parallel, counted(self.tensor_parallel, "rank")
            require(is_right, f"digests of {of}", f"those of {len(ranks)}" if ranks else "names without a rank")
        reasons = dict(self.not_predicted)
        return tuple(self._mismatches(shown, reasons))

    def _mismatches(self, shown: Mapping[str, str], reasons: Mapping[str, str]) -> Iterator[Mismatch]:
        expected = self.by_key
        # Scales and biases of such a module are not told either.
        ends = (".weight", "_weight")
        modules = [(name.removesuffix("weight"), why) for name, why in reasons.items() if name.endswith(ends)]
        for key in sorted(expected.keys() | shown.keys()):
            tensor, digest = expected.get(key), shown.get(key, "")
            if tensor is None:
                name = key.rpartition(":")[2]
                of_module = next((why for stem, why in modules if name.startswith(stem)), None)
                reason = reasons.get(name, of_module)
                outcome = Outcome.UNEXPECTED if reason is None else Outcome.NOT_PREDICTED
                yield Mismatch(outcome=outcome, key=key, expected=reason or "", shown=digest)
            elif not tensor.engine_digest:
                yield Mismatch(outcome=Outcome.NOT_SHOWN, key=key, expected=f"SHA-256 {tensor.sha256}", shown=digest)
            elif not digest:
                yield Mismatch(outcome=Outcome.MISSING, key=key, expected=tensor.engine_digest)
            elif not (_HEX.fullmatch(digest) and len(digest) == len(tensor.engine_digest)):
                yield Mismatch(outcome=Outcome.OTHER_KIND, key=key, expected=tensor.engine_digest, shown=digest)
            elif digest != tensor.engine_digest:
                yield Mismatch(outcome=Outcome.DIFFERENT, key=key, expected=tensor.engine_digest, shown=digest)
        names = {key.rpartition(":")[2] for key in shown}
        for name, reason in self.not_predicted:
            if name not in names:
                yield Mismatch(outcome=Outcome.NOT_PREDICTED, key=name, expected=reason)


def _answer(engine: str, server: object) -> Iterator[tuple[str, str]]:
    # Key -> digest, of every rank. A key may not appear twice.
    match engine, server:
        case "vllm", {"checksums": dict(table)}:
            tables = [("", table)]
        case "vllm", [_, *_] as workers:
            tables = [("", worker) for worker in workers]
        case "sglang", {"ranks": [*ranks]}:
            tables = [(f"tp{_rank(rank, i)}:", rank.get("checksums")) for i, rank in enumerate(_objects(ranks))]
        case "vllm", dict(table):
            tables = [("", table)]
        case _:
            raise Fault(f"expected checksums of {engine}; found {str(server)[:60]!r}")
    keys: set[str] = set()
    for prefix, table in tables:
        require(isinstance(table, dict) and bool(table), "digests by name", repr(table)[:60])
        for name, digest in (table or {}).items():
            is_text = isinstance(name, str) and isinstance(digest, str)
            require(is_text, "names and digests as strings", f"{name!r}: {digest!r}")
            require(prefix + name not in keys, f"the key {prefix + name!r} once", "it twice")
            keys.add(prefix + name)
            yield prefix + name, digest


def _objects(ranks: Sequence[object]) -> list[dict[str, Any]]:
    objects = [rank for rank in ranks if isinstance(rank, dict)]
    require(len(objects) == len(ranks) > 0, "an object for each rank", repr(ranks)[:60])
    return objects


def _rank(rank: Mapping[str, Any], position: int) -> int:
    # Older versions have one object, newer ones a list with one of each role.
    place = rank.get("parallelism_info")
    place = place[0] if isinstance(place, list) and place else place
    return place.get("tp_rank", position) if isinstance(place, dict) else position
