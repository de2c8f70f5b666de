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
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from itertools import accumulate, islice
from typing import Any

from f8emu.spec.chip import Chip
from f8emu.spec.chips import H100, HOPPER
from f8emu.spec.errors import SpecError
from f8emu.split_k.gemm import BLOCKWISE_GEMMS, UNKNOWN, PlannedGemm, Split, one_of
from f8emu.split_k.gemm import planned_gemm as planned_gemm
from f8emu.split_k.trees import LEAF, PLAIN_FEATURES, Feature, FittedTree, SplitPlan, Tree

LIBRARY = "cuBLAS 13.1.0.3"
CHIP = HOPPER.plan
# GPU -> the name of its file
PLANS = {HOPPER.plan: "h200_cublas_13_1_0_3_split_k", H100.plan: "h100_cublas_13_1_0_3_split_k"}


def split_k(gemm: PlannedGemm, *, library: str = LIBRARY, chip: str = CHIP) -> Split:
    """The number of slices S into which `library` cuts K on `chip`, and how well S is known.

    Exactness: recorded shapes as measured; the others as accurate as `reference/NUMERICS.md` 10 says.
    """
    return shipped_plan(chip).split_k(gemm) if library == LIBRARY and chip in PLANS else UNKNOWN


def plans_of(chips: Iterable[Chip]) -> str:
    """The plans of some chips, in words for a report."""
    return " and ".join(sorted({f"{LIBRARY} on {chip.plan}" for chip in chips if chip.plan})) or "none"


@cache
def shipped_plan(chip: str = CHIP) -> SplitPlan:
    """The plan for a chip that f8emu comes with, read once."""
    one_of("chip", chip, tuple(PLANS))
    return replace(_read(PLANS[chip]), more_rules=lambda: _read(f"{PLANS[chip]}_mm").rules)


@cache
def _read(name: str) -> SplitPlan:
    return plan_from_json((files("f8emu.split_k") / "data" / f"{name}.json").read_text(encoding="utf-8"), name)


SCHEMA = 2
_LONGEST = 1 << 22  # bytes of a tree
_REQUIRED = ("m", "n", "k", "gemm", "out_dtype")


def gemms_from_json(text: str, name: str) -> list[tuple[dict[str, Any], PlannedGemm]]:
    """Each object of a list with the GEMM that it describes.

    `accumulation` is left out, "" or null for bfloat16 and may be for block scales, which have one only; `layout` for
    float8, whose only one is tn.
    """
    data = _parsed(text, name)
    if not isinstance(data, list):
        raise SpecError(f"{name}: expected a list of objects; got {_kind(data)}")
    return [(item, _gemm(item, f"{name}: object {index}")) for index, item in enumerate(data)]


def weights_from_json(text: str, name: str) -> list[tuple[int, int]]:
    """(n, k) of each object of a list; other keys, such as `m`, are the objects' own."""
    data = _parsed(text, name)
    weights: list[tuple[int, int]] = []
    for index, entry in enumerate(data if isinstance(data, list) else [None]):
        n, k = (entry.get("n"), entry.get("k")) if isinstance(entry, dict) else (None, None)
        if type(n) is not int or type(k) is not int or min(n, k) < 1:
            raise SpecError(f"{name}: object {index}: expected integers n and k of at least 1; got {str(entry)[:60]}")
        weights.append((n, k))
    return weights


def _gemm(item: Any, place: str) -> PlannedGemm:
    if not isinstance(item, dict):
        raise SpecError(f"{place}: expected an object with {', '.join(_REQUIRED)}; got {_kind(item)}")
    # Unknown keys, then missing ones, then values: a misspelt key is reported as unknown, not as missing.
    known = (*_REQUIRED, "accumulation", "layout", "a_dtype", "b_dtype")
    for key in item:
        if key not in known:
            raise SpecError(f"{place}: unknown key {key!r}; known keys are {', '.join(known)}")
    words = {key: value for key, value in item.items() if value not in ("", None)}
    kind = words.get("gemm")
    choice = [] if kind in list(BLOCKWISE_GEMMS) else ["layout" if kind == "bfloat16" else "accumulation"]
    for key in (*_REQUIRED, *choice):
        if key not in words:
            needed = ", ".join((*_REQUIRED, *choice))
            raise SpecError(f"{place}: missing key {key!r}; a {item.get('gemm')!s} GEMM needs {needed}")
    try:
        return planned_gemm(**words)
    except SpecError as error:
        raise SpecError(f"{place}: {error}") from None


def with_splits(items: list[tuple[dict[str, Any], PlannedGemm]], splits: list[Split]) -> list[dict[str, Any]]:
    """The objects as they were given, each with `split_k` and `source`."""
    return [
        {**item, "split_k": split.split_k, "source": split.source.value}
        for (item, _), split in zip(items, splits, strict=True)
    ]


def plan_from_json(text: str, name: str) -> SplitPlan:
    """A plan file."""
    data = _parsed(text, name)
    # The schema first: another layout may mean something else by the same key.
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        remedy = "record it again, or read it with the f8emu that wrote it"
        raise SpecError(f"{name}: schema must be {SCHEMA}; got {schema!r}; {remedy}")
    with _whole(name):
        return SplitPlan(
            library=str(data["library"]),
            chip=str(data["chip"]),
            torch=str(data.get("torch", "")),
            recorded=dict(_recorded(data["recorded"])),
            rules=dict(_rules(data, name)),
            slice_bytes=None if data.get("slice_bytes") is None else _sizes([data["slice_bytes"]])[0],
        )


@contextmanager
def _whole(name: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise SpecError(
            f"{name}: expected a plan file with schema, library, chip and recorded; {type(error).__name__}: {error}; "
            "`f8emu record OUT --plans IN.json` writes one"
        ) from None


def _rules(data: Mapping[str, Any], file: str) -> Iterator[tuple[str, FittedTree]]:
    features = tuple(_feature(entry) for entry in data.get("features", []))
    if len(features) > LEAF:
        raise ValueError(f"at most {LEAF} features; got {len(features)}")
    for name, rule in data.get("rules", {}).items():
        slice_bytes, workspace_bytes = _sizes([data["slice_bytes"], rule["workspace_bytes"]])
        codes, limits = (str(rule["tree"][part]) for part in ("codes", "limits"))
        tree = cache(partial(_tree, codes, limits, len(features), file))
        yield name, FittedTree(tree, features, workspace_bytes, slice_bytes)


def _feature(entry: Any) -> Feature:
    """A name, [n, m], or [n, m, "at least" or "at most", blocks]."""
    if isinstance(entry, str):
        one_of("feature", entry, PLAIN_FEATURES)
        return entry
    n, m, *limit = entry
    if limit:
        kind, blocks = limit
        one_of("feature", kind, ("at least", "at most"))
        return (*_sizes([n, m]), kind, *_sizes([blocks]))
    return _sizes([n, m])


def _tree(codes: str, limits: str, features: int, file: str) -> Tree:
    """Both texts are base64 of zlib."""
    with _whole(file):
        # 1. Nodes in preorder: none is to come at the end, and not before.
        nodes, planes = _unpacked(codes), _unpacked(limits)
        to_come = bytes(accumulate(array("b", nodes.translate(_MORE_TO_COME)), initial=1))
        is_whole = to_come.find(0) == len(nodes) > 0
        is_known = not nodes.translate(None, delete=bytes([*range(features), *range(LEAF + 1, 256)]))
        # 2. The limits lie feature by feature, three bytes each: first the lowest bytes of all, then the middle, then
        #    the highest. In this order they compress best.
        inner, third = nodes.translate(None, delete=bytes(range(LEAF, 256))), len(nodes) // 2
        if not (is_whole and is_known and len(planes) == 3 * third):
            raise ValueError("a tree whose nodes do not fit together")
        low, middle, high = planes[:third], planes[third : 2 * third], planes[2 * third :]
        values_in_order = iter([x | y << 8 | z << 16 for x, y, z in zip(low, middle, high, strict=True)])
        by_feature = [iter(list(islice(values_in_order, inner.count(feature)))) for feature in range(features)]
        return Tree(nodes, to_come[:-1], array("i", map(next, map(by_feature.__getitem__, inner))))


# How many more nodes follow a node, by its code, as a signed byte: +1 for an inner node, -1 for a leaf
_MORE_TO_COME = bytes([1] * LEAF + [255] * (256 - LEAF))


def _unpacked(text: str) -> bytes:
    """A short text may stand for more bytes than there is memory."""
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(text, validate=True), _LONGEST)
    if not stream.eof or stream.unused_data:
        raise ValueError(f"a tree that does not end, or has more than {_LONGEST} bytes")
    return data


def _recorded(blocks: Any) -> Iterator[tuple[tuple[str, int, int, int], int]]:
    for block in blocks:
        tables = [str(table) for table in block["tables"]]
        for row in block["rows"]:
            m, n, k, *slices = _integers(row)
            if len(slices) != len(tables) or min(slices) < 0:
                raise ValueError(f"row {row} must hold m, n, k and S of {len(tables)} tables")
            # 0 stands for a table in which this shape was not recorded
            yield from (((table, m, n, k), s) for table, s in zip(tables, slices, strict=True) if s)


def plan_to_json(plan: SplitPlan) -> str:
    """The text of a plan without rules, one recorded shape a line."""
    rows: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for (table, *shape), slices in sorted(plan.recorded.items()):
        rows[table].append((*shape, slices))
    blocks = [{"tables": [table], "rows": shapes} for table, shapes in rows.items()]
    head = {"schema": SCHEMA, "library": plan.library, "chip": plan.chip, "torch": plan.torch}
    text = json.dumps({**head, "recorded": blocks})
    return text.replace("], [", "],\n [").replace("}, {", "},\n{") + "\n"


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{name}: not JSON: {error}") from None


def _sizes(values: Any) -> Any:
    sizes = _integers(values)
    if min(sizes) < 1:
        raise ValueError(f"expected positive sizes; got {sizes}")
    return sizes


def _integers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise ValueError(f"expected integers; got {str(values)[:60]}")
    return tuple(values)


def _kind(data: object) -> str:
    return "an object" if isinstance(data, dict) else "a list" if isinstance(data, list) else repr(data)[:60]
