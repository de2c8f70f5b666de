"""The split-K of a library, as data [PLAN-1..7]: the `split_k` that a GEMM's bits depend on.

cuBLAS chooses S from M, N, K, the layout and the types, by a heuristic that depends on its version and on the chip
[CHAIN-3]. Recorded shapes are looked up. For other shapes S is predicted by decision trees. The trees were fitted to
the heuristic's answers for other shapes, so that all recorded rows test them. Everything is in `data/`: for each chip
and library one file, and a second one that is read when it is needed, with the trees that only a bare bfloat16 `mm` in
tn, nn or tt asks.
"""

import base64
import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from itertools import accumulate, islice
from typing import Any

from f8emu.spec.chip import Chip
from f8emu.spec.chips import CHIPS, H100, HOPPER, chip_by_name
from f8emu.spec.errors import SpecError
from f8emu.split_k.gemm import LAYOUTS, UNKNOWN, PlannedGemm, Split
from f8emu.split_k.gemm import planned_gemm as planned_gemm
from f8emu.split_k.trees import LEAF, PLAIN_FEATURES, Feature, FittedTree, SplitPlan, Tree
from f8emu.strict import Fault, choice, faults_as, parsed, part, require

LIBRARY = "cuBLAS 13.1.0.3"
CHIP = HOPPER.plan
# GPU -> the name of its file
PLANS = {HOPPER.plan: "h200_cublas_13_1_0_3_split_k", H100.plan: "h100_cublas_13_1_0_3_split_k"}


def split_k(gemm: PlannedGemm, *, library: str = LIBRARY, chip: str = CHIP) -> Split:
    """The number of slices S into which `library` cuts K on `chip`, and how well S is known.

    Exactness: recorded shapes as measured; the others as accurate as `reference/EVIDENCE.md` says.
    """
    return shipped_plan(chip).split_k(gemm) if library == LIBRARY and chip in PLANS else UNKNOWN


def plans_of(chips: Iterable[Chip]) -> str:
    """The plans of some chips, in words for a report."""
    return " and ".join(sorted({f"{LIBRARY} on {chip.plan}" for chip in chips if chip.plan})) or "none"


@cache
def shipped_plan(chip: str = CHIP) -> SplitPlan:
    """The plan for a chip, by its name or its GPU's, that f8emu comes with, read once."""
    chip = chip if chip in PLANS else chip_by_name("split_k", chip).plan
    if not chip:
        planned = ", ".join(known.name for known in CHIPS.values() if known.plan)
        raise SpecError(f"split_k: this chip has no recorded split-K plan; the chips with one are {planned}")
    return replace(_read(PLANS[chip]), more_rules=lambda: _read(f"{PLANS[chip]}_mm").rules)


@cache
def _read(name: str) -> SplitPlan:
    return plan_from_json((files("f8emu.split_k") / "data" / f"{name}.json").read_text(encoding="utf-8"), name)


SCHEMA = 2
_REMEDY = "`f8emu record OUT --plans IN.json` writes a plan file"
_LONGEST = 1 << 22  # bytes of a tree


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    n: int
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    # The S of some shapes, [m, n, k, *S of every table] each.
    tables: tuple[str, ...]
    rows: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coded:
    # Base64 of zlib, both.
    codes: str
    limits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    workspace_bytes: int
    tree: _Coded


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile:
    library: str
    chip: str
    torch: str = ""
    recorded: tuple[_Recorded, ...]
    rules: Mapping[str, _Rule] = field(default_factory=dict[str, _Rule])
    features: tuple[Any, ...] = ()
    slice_bytes: int | None = None


def gemms_from_json(text: str, name: str) -> list[tuple[dict[str, Any], PlannedGemm]]:
    """Each object of a list with the GEMM that it describes.

    `accumulation` is left out, "" or null for bfloat16 and may be for block scales, which have one only; `layout` for
    float8, whose only one is tn.
    """
    with faults_as(SpecError, name):
        return [(item, _gemm(item, f"object {i}")) for i, item in enumerate(_list(text))]


def weights_from_json(text: str, name: str) -> list[tuple[int, int]]:
    """(n, k) of each object of a list; other keys, such as `m`, are the objects' own."""
    with faults_as(SpecError, name):
        readers = {int: _positive}
        weights = [part(_Weight, x, f"object {i}", readers, knows_all=False) for i, x in enumerate(_list(text))]
    return [(weight.n, weight.k) for weight in weights]


def _list(text: str) -> list[Any]:
    data = parsed(text, "a list of objects")
    require(isinstance(data, list), "a list of objects", type(data).__name__)
    return data


def _gemm(item: Any, place: str) -> PlannedGemm:
    values = {key: x for key, x in item.items() if x not in ("", None)} if isinstance(item, dict) else item
    gemm = part(planned_gemm, values, place)
    has_layout = gemm.gemm != "bfloat16" or "layout" in values
    require(has_layout, f"the key {place}.layout of a bfloat16 GEMM, one of {', '.join(LAYOUTS)}", "none")
    return gemm


def with_splits(items: list[tuple[dict[str, Any], PlannedGemm]], splits: list[Split]) -> list[dict[str, Any]]:
    """The objects as they were given, each with `split_k` and `source`."""
    return [
        {**item, "split_k": split.split_k, "source": split.source.value}
        for (item, _), split in zip(items, splits, strict=True)
    ]


def plan_from_json(text: str | bytes, name: str) -> SplitPlan:
    """A plan file."""
    with faults_as(SpecError, name, remedy=_REMEDY):
        data = parsed(text, "a plan file")
        # The schema first: another layout may mean something else by the same key.
        schema = data.pop("schema", None) if isinstance(data, dict) else None
        require(schema == SCHEMA, f"a plan file of schema {SCHEMA}", repr(schema))
        file = part(_PlanFile, data, readers={int: _positive})
        return SplitPlan(
            library=file.library,
            chip=file.chip,
            torch=file.torch,
            recorded=dict(_recorded(file.recorded)),
            rules=dict(_rules(file, name)),
            slice_bytes=file.slice_bytes,
        )


def _rules(file: _PlanFile, name: str) -> Iterator[tuple[str, FittedTree]]:
    features = tuple(map(_feature, file.features))
    require(len(features) <= LEAF, f"at most {LEAF} features", len(features))
    for table, rule in file.rules.items():
        slice_bytes = _positive(file.slice_bytes, "slice_bytes")
        tree = cache(partial(_tree, rule.tree, len(features), name))
        yield table, FittedTree(tree, features, rule.workspace_bytes, slice_bytes)


def _feature(entry: Any) -> Feature:
    """A name, [n, m], or [n, m, "at least" or "at most", blocks]."""
    match entry:
        case str():
            choice(entry, dict.fromkeys(PLAIN_FEATURES), "a feature")
            return entry
        case [n, m]:
            return _positive(n, "a feature"), _positive(m, "a feature")
        case [n, m, ("at least" | "at most") as kind, blocks]:
            n, m, blocks = (_positive(x, "a feature") for x in (n, m, blocks))
            return n, m, kind, blocks
        case _:
            raise Fault(f"expected a feature to be a name, or tiles; found {entry!r:.60}")


def _tree(text: _Coded, features: int, file: str) -> Tree:
    with faults_as(SpecError, file, remedy=_REMEDY):
        # 1. Nodes in preorder: none is to come at the end, and not before.
        nodes, planes = _unpacked(text.codes), _unpacked(text.limits)
        to_come = bytes(accumulate(array("b", nodes.translate(_MORE_TO_COME)), initial=1))
        is_whole = to_come.find(0) == len(nodes) > 0
        is_known = not nodes.translate(None, delete=bytes([*range(features), *range(LEAF + 1, 256)]))
        # 2. The limits lie feature by feature, three bytes each: first the lowest bytes of all, then the middle, then
        #    the highest. In this order they compress best.
        inner, third = nodes.translate(None, delete=bytes(range(LEAF, 256))), len(nodes) // 2
        fits = is_whole and is_known and len(planes) == 3 * third
        require(fits, "a tree", "nodes that do not fit together")
        low, middle, high = planes[:third], planes[third : 2 * third], planes[2 * third :]
        limits = iter([x | y << 8 | z << 16 for x, y, z in zip(low, middle, high, strict=True)])
        by_feature = [iter(list(islice(limits, inner.count(feature)))) for feature in range(features)]
        return Tree(nodes, to_come[:-1], array("i", map(next, map(by_feature.__getitem__, inner))))


# How many more nodes follow a node, by its code, as a signed byte: +1 for an inner node, -1 for a leaf
_MORE_TO_COME = bytes([1] * LEAF + [255] * (256 - LEAF))


def _unpacked(text: str) -> bytes:
    """A short text may stand for more bytes than there is memory."""
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(base64.b64decode(text, validate=True), _LONGEST)
    except (ValueError, zlib.error) as error:
        raise Fault(f"expected a tree in base64 of zlib; found {error}") from None
    is_whole = stream.eof and not stream.unused_data
    require(is_whole, "a tree", f"one that does not end, or has more than {_LONGEST} bytes")
    return unpacked


def _recorded(blocks: Iterable[_Recorded]) -> Iterator[tuple[tuple[str, int, int, int], int]]:
    for block in blocks:
        for row in block.rows:
            is_row = isinstance(row, list) and len(row) == 3 + len(block.tables)
            is_row = is_row and all(type(x) is int and x >= 0 for x in row)
            require(is_row, f"a row with m, n, k and S of {len(block.tables)} tables", row)
            m, n, k, *slices = row
            # 0 stands for a table in which this shape was not recorded
            yield from (((table, m, n, k), s) for table, s in zip(block.tables, slices, strict=True) if s)


def _positive(value: Any, place: str) -> int:
    require(type(value) is int and value > 0, f"{place} to be an integer of at least 1", repr(value))
    return value


def plan_to_json(plan: SplitPlan) -> str:
    """The text of a plan without rules, one recorded shape a line."""
    rows: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for (table, *shape), slices in sorted(plan.recorded.items()):
        rows[table].append((*shape, slices))
    blocks = [{"tables": [table], "rows": shapes} for table, shapes in rows.items()]
    head = {"schema": SCHEMA, "library": plan.library, "chip": plan.chip, "torch": plan.torch}
    text = json.dumps({**head, "recorded": blocks})
    return text.replace("], [", "],\n [").replace("}, {", "},\n{") + "\n"
