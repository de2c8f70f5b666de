"""The records of a captured step as data, to JSON and back.

A step of a rank is a directory: `index.json` and one safetensors file a record. A record is a GEMM (`a.codes`,
`a.scale`, `b.codes`, `b.scale`, `product`), the same of another stack's layer as far as the layer shows it, or a tensor
before its casts (`value`). Its text is in the metadata of its file too: the files of a step that was never finished can
still be read.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from f8emu.spec.errors import F8Error, SpecError
from f8emu.spec.formats import FORMATS
from f8emu.spec.recipe import GEMM_NAMES, Recipe
from f8emu.spec.scaling import TENSORS, Granularity
from f8emu.spec.serialize import recipe_from_dict
from f8emu.split_k.gemm import Source
from f8emu.strict import choice, part, require

SCHEMA = 1
"""Version of the layout; raised when its meaning changes."""
INDEX = "index.json"
UNFINISHED = ".partial"
"""Ends the name of a step that is still written, or never was finished."""
FILE_NAME = re.compile(r"[0-9]{6,}\.safetensors")
STEP_NAME = re.compile(r"step-[0-9]{8,}-rank-[0-9]{5,}")
"""The name of a finished step's directory; until then `UNFINISHED` follows."""
_TENSOR_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of tensors before their casts."""
_LARGEST = 2**31
"""The largest size or count: a plain bound that no GEMM reaches."""


class CaptureError(F8Error, ValueError):
    """A capture that is missing, cut short, foreign, inconsistent, of another version, or that cannot be begun."""


def _size(value: Any, place: str) -> int:
    is_size = type(value) is int and 0 <= value < _LARGEST
    require(is_size, f"{place} to be an integer of at least 0 and below 2^31", repr(value))
    return value


class _Record:
    layer: str
    turn: int

    @property
    def what(self) -> str:
        """The GEMM, or the tensor."""
        return getattr(self, "gemm", "") or getattr(self, "tensor", "")

    @property
    def key(self) -> tuple[str, str, int]:
        """Layer, GEMM or tensor, and turn, which match the same one in another capture of the step."""
        return self.layer, self.what, self.turn

    @property
    def place(self) -> str:
        """`layers.0.w1 grad_input`, with the number of the call from the second on."""
        return f"{self.layer} {self.what}" + (f" (call {self.turn})" if self.turn > 1 else "")

    def _require(self, known: Collection[str], *names: str) -> None:
        for name in names:
            if getattr(self, name) not in known:
                raise SpecError(f"{name!r} must be one of {', '.join(known)}; found {getattr(self, name)!r}")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": _KINDS[type(self)], **asdict(self)}  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRecord(_Record):
    """One GEMM `product = a @ b^T` as a layer ran it; operands are [rows, summed dimension], without padding."""

    order: int
    """The number of the record in its step."""
    layer: str
    gemm: str
    turn: int
    """The number of this call of the layer's GEMM within the step, from 1."""
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    granularity_a: str
    granularity_b: str
    """The granularities of the casts. Beside rowwise, a tensorwise operand has one scale for every row."""
    out_dtype: str
    use_fast_accum: bool
    engine: str
    """The engine that computed it: `hardware` or `emulated`."""
    chip: str
    """The chip whose bits it has."""
    split_k: int
    """S as planned [CHAIN-3]."""
    split_k_source: str
    """How well S is known: a value of `Source`."""
    recipe: str
    """The content hash of the recipe."""
    is_sharded: bool
    """Whether operands are parts of tensors whose other parts, on other ranks, count for the amax too."""

    def __post_init__(self) -> None:
        self._require(GEMM_NAMES, "gemm")
        self._require(FORMATS, "a_format", "b_format", "out_dtype")
        self._require([granularity.value for granularity in Granularity], "granularity_a", "granularity_b")
        self._require([source.value for source in Source], "split_k_source")
        self._require(("hardware", "emulated"), "engine")
        if self.split_k < 1:
            raise SpecError(f"'split_k' must be at least 1; found {self.split_k}")

    def block(self, side: str) -> tuple[int, int]:
        """Rows and columns that share a scale of `a` or `b`."""
        rows, columns = Granularity(getattr(self, f"granularity_{side}")).block
        return rows or (self.m if side == "a" else self.n), columns or self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord(_Record):
    """One tensor in high precision, [rows, columns], as it was before its casts."""

    order: int
    layer: str
    tensor: str
    turn: int
    dtype: str

    def __post_init__(self) -> None:
        self._require(TENSORS, "tensor")
        self._require(_TENSOR_DTYPES, "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRecord(_Record):
    """One GEMM `output = input @ weight^T` of another stack's layer, as far as the layer shows it.

    What the layer does not show has the format "", and is not in the file: nothing is computed in its place. Scales are
    the factors that decode, one for each block of the codes, [ceil(rows / block rows), ceil(k / block columns)].
    """

    order: int
    layer: str
    gemm: str
    turn: int
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    """Formats of the codes, or ""."""
    a_scale: str
    b_scale: str
    """Formats of the scales, or ""."""
    a_block_rows: int
    a_block_columns: int
    b_block_rows: int
    b_block_columns: int
    """The blocks of codes that share a scale; 0 without scales."""
    out_dtype: str
    has_bias: bool
    """Whether the product has a bias added to it, which a GemmRecord's never has."""
    module: str
    """The class of the layer, with its package and its version."""

    def __post_init__(self) -> None:
        self._require(GEMM_NAMES, "gemm")
        self._require(FORMATS, "out_dtype")
        self._require(("", *FORMATS), "a_format", "b_format", "a_scale", "b_scale")
        for side in "ab":
            if getattr(self, f"{side}_scale") and 0 in self.block(side):
                raise SpecError(f"the blocks of {side} must have 1 row and 1 column at least; found {self.block(side)}")

    def block(self, side: str) -> tuple[int, int]:
        """Rows and columns that share a scale of `a` or `b`."""
        return getattr(self, f"{side}_block_rows"), getattr(self, f"{side}_block_columns")

    @property
    def not_shown(self) -> tuple[str, ...]:
        """The arrays that the layer did not show: `a.codes`, ..."""
        shown = {"a.codes": self.a_format, "a.scale": self.a_scale, "b.codes": self.b_format, "b.scale": self.b_scale}
        return tuple(part for part, name in shown.items() if not name)


Record = GemmRecord | ForeignRecord | TensorRecord
_KINDS: dict[type[Record], str] = {GemmRecord: "gemm", ForeignRecord: "foreign gemm", TensorRecord: "tensor"}


def record_from_json(entry: Any) -> Record:
    """A record of any kind; whatever is wrong is a Fault."""
    require(isinstance(entry, dict), "a record of type object", repr(entry))
    fields_of = dict(entry)
    kind: type[Record] = choice(fields_of.pop("kind", None), {name: kind for kind, name in _KINDS.items()}, "kind")
    return part(kind, fields_of, readers={int: _size})


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A record that was not written, and why."""

    place: str
    size: int
    """The size of its arrays in bytes."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """The data that all records of one step and rank share."""

    step: int
    rank: int
    world_size: int
    framework: str
    device: str
    versions: Mapping[str, str | None]
    plan: str
    """The library and the chip of the split-K plan."""
    recipes: Mapping[str, Recipe]
    """Content hash -> recipe."""
    reason: str = ""
    """Why a ring step was written, or the exception that ended the step."""

    @property
    def name(self) -> str:
        """The name of the step's directory."""
        return f"step-{self.step:08d}-rank-{self.rank:05d}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the version of the layout."""
        shared = {field.name: getattr(self, field.name) for field in fields(self)}
        recipes = {key: recipe.to_dict() for key, recipe in self.recipes.items()}
        return {"schema": SCHEMA, **shared, "versions": dict(self.versions), "recipes": recipes}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """The header; other keys are left to the caller, and whatever is wrong is a Fault."""
        header = part(cls, entry, readers={Recipe: _recipe}, knows_all=False)
        for key, recipe in header.recipes.items():
            require(key == recipe.content_hash, f"the hash {recipe.content_hash} as the key of a recipe", repr(key))
        return header


def _recipe(value: Any, place: str) -> Recipe:
    return recipe_from_dict(value)
