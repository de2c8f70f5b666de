"""A certificate as data: its parts, their hashes, and the check that neither they nor the files it names were changed.

The hash of a part is the SHA-256 of its canonical JSON (sorted keys, no spaces, ASCII); that of the whole is over the
schema, the verdict and these hashes. Who can write the file can also hash it again: publish the `sha256` where only
you write. The verdict follows from the parts, and `check` derives it again.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from f8emu.conformance.compare import counted
from f8emu.shown import Shown
from f8emu.spec import F8Error
from f8emu.strict import Fault, faults_as, open_regular, parsed, part, read_regular, require
from f8emu.verdict import Exit, Verdict

SCHEMA = 1
"""Version of the layout; raised when its meaning changes."""
VERDICTS = {
    Exit.EQUAL: "certified",
    Exit.DIFFERENT: "different",
    Exit.UNVERIFIED: "nothing compared",
    Exit.INCOMPLETE: "not certified",
}


class CertificateError(F8Error, ValueError):
    """A certificate that is missing, malformed or of another version."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Named(Shown):
    """A file or a directory that was read."""

    role: str
    """trainer, server, captured trainer, captured server, or plan."""
    path: str
    kind: str
    sha256: str
    """Of the file; of a directory, over the names and the hashes of its files."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Shown):
    """One thing in which trainer and server differ."""

    part: str
    place: str
    cause: str
    """What made it; empty: nothing that is known here explains it."""
    seen: str

    def line(self) -> str:
        """One line."""
        return f"{self.part}: {self.place}: {self.cause or 'not explained'}; {self.seen}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Unseen(Shown):
    """What was not seen, which is not certified."""

    part: str
    what: str
    was_asked: bool
    """False: nobody asked for it, and it does not decide the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Certificate(Shown):
    """The result of `certify`; every field is a part."""

    _page: ClassVar[str] = "f8emu.rollout.page:certificate_page"
    files: tuple[Named, ...]
    setting: Mapping[str, Any]
    """Recipe and its hash, dtype of the source, dialects, versions, plans, chips, batch sizes, parallel layout."""
    weights: tuple[Mapping[str, Any], ...] = ()
    """Of each comparison, how many tensors are equal, different, missing, extra or not predicted."""
    invariance: tuple[Mapping[str, Any], ...] = ()
    """For each layer whether a row's bits depend on the batch, and how that is known."""
    captures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Stages that are equal, for each layer what differs, the replayed sample, and the trainer's GEMMs of the
    server's inputs."""
    decode: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The rows of one long pass of each rank of the server beside the same rows in shorter passes, counted."""
    differences: tuple[Difference, ...] = ()
    not_seen: tuple[Unseen, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Equal: every part that was asked for was seen, and nothing differs."""
        captures = self.captures
        has = [f"{weights['equal']} of {counted(weights['compared'], 'tensor')}" for weights in self.weights]
        known = sum(str(layer["verdict"]).startswith("invariant") for layer in self.invariance)
        has += [f"{known} of {counted(len(self.invariance), 'layer')} invariant"] if known else []
        has += [f"{captures['stages_equal']} of {captures['stages']} stages"] if captures else []
        served = captures.get("served", {})
        if served.get("outputs"):
            has.append(f"{served['equal']:,} of {counted(served['outputs'], 'output')} of the server's inputs")
        has += [f"{self.decode['rows_equal']:,} of {self.decode['rows']:,} rows decoded"] if self.decode else []
        of = ", ".join(has)
        if self.differences:
            return Verdict(Exit.DIFFERENT, f"DIFFERENT: {self.differences[0].line()}; equal: {of}")
        if not has:
            return Verdict(Exit.UNVERIFIED, "NOT CERTIFIED: nothing was compared")
        if lacking := [part for part in self.not_seen if part.was_asked]:
            more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
            why = f"{lacking[0].part}: {lacking[0].what}{more}"
            return Verdict(Exit.INCOMPLETE, f"NOT CERTIFIED: not seen: {why}; equal: {of}")
        return Verdict(Exit.EQUAL, f"CERTIFIED: {of}")

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the hash of every part and of the whole."""
        parts: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        head = {"schema": SCHEMA, "verdict": VERDICTS[self.verdict.status]}
        hashes = {name: _hash(content) for name, content in parts.items()}
        return {**head, **parts, "hashes": hashes, "sha256": _hash({**head, "hashes": hashes})}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The certificate; whatever is wrong is a Fault. Hashes are compared by `check` alone."""
        require(content.get("schema") == SCHEMA, f"schema {SCHEMA}", repr(content.get("schema")))
        names = {part.name for part in fields(cls)}
        unknown = [key for key in content if key not in {*names, "schema", "verdict", "hashes", "sha256"}]
        require(not unknown, "the keys of a certificate", repr(unknown[:1]))
        return part(cls, {name: value for name, value in content.items() if name in names})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Shown):
    """What `check` found of a certificate."""

    _page: ClassVar[str] = "f8emu.rollout.page:checked_page"
    path: str
    says: str
    """Its verdict."""
    changed: tuple[str, ...] = ()
    """Parts, or files that it names, that are not what they were."""
    not_at_hand: tuple[str, ...] = ()
    """Files that it names and that are not here."""
    same: int = 0
    """Files that it names and that are what they were."""

    @property
    def verdict(self) -> Verdict:
        """Whether it is as it was made: it may be so and say that bits differ."""
        if self.changed:
            return Verdict(Exit.DIFFERENT, f"CHANGED: {', '.join(self.changed)}")
        of = f'unchanged; it says "{self.says}"; {counted(self.same, "file")} the same'
        if self.not_at_hand:
            return Verdict(Exit.INCOMPLETE, f"INCOMPLETE: {of}; not at hand: {', '.join(self.not_at_hand)}")
        return Verdict(Exit.EQUAL, of)


def check(path: str | Path) -> Checked:
    """Whether a certificate was changed since it was made, and whether the files that it names are here, and the same.

    Nothing is computed again but hashes; no network is needed.

    Raises:
        CertificateError: it cannot be read, or is no certificate.
    """
    with faults_as(CertificateError, "certify", path, "make it again with f8emu certify --json"):
        content = parsed(read_regular(Path(path)), "a JSON object")
        require(isinstance(content, dict), "a JSON object", type(content).__name__)
        hashes = content.get("hashes")
        require(isinstance(hashes, dict), "hashes as a JSON object", type(hashes).__name__)
        certificate = Certificate.from_json(content)
        # 1. The parts, the verdict that follows from them, and the hash of the whole.
        try:
            made = certificate.to_json()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Fault(f"expected the parts of a certificate; found {error!r}") from None
    changed = [name for name in made["hashes"] if made["hashes"][name] != hashes.get(name)]
    changed += [name for name in ("verdict", "sha256") if made[name] != content.get(name)]
    # 2. The files.
    there = [file for file in certificate.files if Path(file.path).exists()]
    other = [f"{file.role} {file.path}" for file in there if content_hash(Path(file.path)) != file.sha256]
    return Checked(
        path=str(path),
        says=str(content.get("verdict")),
        changed=(*changed, *other),
        not_at_hand=tuple(file.path for file in certificate.files if file not in there),
        same=len(there) - len(other),
    )


def content_hash(path: Path) -> str:
    """SHA-256 of a file; of a directory, of its files' names and hashes, in the order of the names."""
    if not path.is_dir():
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    names = sorted(os.path.relpath(Path(at, name), path) for at, _, some in os.walk(path) for name in some)
    return _hash([[name, content_hash(path / name)] for name in names])


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
