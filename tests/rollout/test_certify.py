"""`f8emu certify`: seven planted faults are named, a sound pair is certified, and what was not seen is not."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from f8emu.capture.record import ForeignRecord, TensorRecord
from f8emu.dialects import dialect_by_name, quantize
from f8emu.dialects.rules import SQUARE
from f8emu.rollout import (
    Certificate,
    CertificateError,
    Checksums,
    Source,
    TensorChecksum,
    certify,
    check,
    expected_checksums,
)
from f8emu.rollout.batch import invariances
from f8emu.spec import F8Error, RecipeName
from f8emu.spec.errors import SpecError
from f8emu.spec.recipe import TENSORWISE
from f8emu.torch import capture, convert_to_float8_training, export_float8
from f8emu.verdict import Exit
from tests.audit.checkpoints import BF16, checkpoint, fp8, normal
from tests.conformance import captures as captured
from tests.conformance.command import invoke
from tests.rollout import models

DIALECT = "torchao_blockwise"
NAMES = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(4)]
SHARDS = {"model-1.safetensors": NAMES[:2], "model-2.safetensors": NAMES[2:]}
Arrays = dict[str, np.ndarray]


def source(seed: int = 0, dtype: Any = np.float32) -> Arrays:
    """Experts in high precision, with blocks of several magnitudes."""
    weights = {name: normal(256, 256, seed=seed + i).astype(np.float32) for i, name in enumerate(NAMES)}
    generator = np.random.default_rng(7)
    for weight in weights.values():
        weight += generator.standard_normal(weight.shape).astype(np.float32) * 1e-5  # no bfloat16
        weight[:128, 128:] *= 1e-4
    return {name: weight.astype(dtype) for name, weight in weights.items()}


def coded(weights: Mapping[str, np.ndarray], dialect: Any = DIALECT) -> Arrays:
    tensors: Arrays = {}
    for name, x in weights.items():
        codes, scale = quantize(x, dialect, block=SQUARE)
        tensors |= {
            name: codes,
            f"{name}_scale_inv": 1 / scale if dialect_by_name(DIALECT).stored.is_multiplier else scale,
        }
    return tensors


def written(folder: Path, tensors: Arrays) -> Path:
    """In two shards, if they are float8."""
    if not any(name.endswith("_scale_inv") for name in tensors):
        return checkpoint(folder, tensors)
    shards = {file: [full for name in names for full in (name, f"{name}_scale_inv")] for file, names in SHARDS.items()}
    return checkpoint(folder, tensors, fp8(), shards=shards)


def one_ulp(tensors: Arrays) -> Arrays:
    name = f"{NAMES[1]}_scale_inv"
    scale = tensors[name].copy()
    scale[1, 0] = np.nextafter(scale[1, 0], np.float32(1))
    return tensors | {name: scale}


def stale(tensors: Arrays) -> Arrays:
    old = coded(source(seed=100))
    return tensors | {name: old[name] for name in old if name.startswith(tuple(NAMES[2:]))}


def swapped(tensors: Arrays) -> Arrays:
    second, third = ({end: tensors[name + end] for end in ("", "_scale_inv")} for name in NAMES[1:3])
    return tensors | {NAMES[1] + end: third[end] for end in third} | {NAMES[2] + end: second[end] for end in second}


def floored(_: Arrays) -> Arrays:
    known = dialect_by_name(DIALECT)
    assert known.scale is not None
    return coded(source(), replace(known, scale=replace(known.scale, amax_floor=1e-3)))


PLANTED: dict[str, tuple[Callable[[Arrays], Arrays], str, str]] = {
    "one ulp in a scale": (one_ulp, NAMES[1], "one ulp in 1 scale"),
    "a stale shard": (stale, "model-2.safetensors", "a stale shard"),
    "another floor": (floored, NAMES[0], "another floor of the scale rule"),
    "swapped experts": (swapped, NAMES[1], f"swapped experts: the bytes of {NAMES[2]}"),
}


@pytest.mark.parametrize("of_source", [True, False], ids=["from the source", "from codes"])
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_weights_is_named(fault: str, of_source: bool, tmp_path: Path) -> None:
    plant, place, cause = PLANTED[fault]
    tensors = coded(source())
    trainer = written(tmp_path / "trainer", source() if of_source else tensors)
    server = written(tmp_path / "server", plant(tensors))
    result = certify(trainer, server, dialect=DIALECT if of_source else None)
    first = result.differences[0]
    assert (result.verdict.status, first.part, first.place) == (Exit.DIFFERENT, "weights", place), result
    assert first.cause.startswith(cause), first


def test_a_wrong_source_dtype_is_named(tmp_path: Path) -> None:
    trainer = written(tmp_path / "trainer", source())
    server = written(tmp_path / "server", coded(source(dtype=BF16)))
    first = certify(trainer, server, dialect=DIALECT).differences[0]
    assert first.cause == "wrong source dtype: its bfloat16 copy, cast so"
    # and the other way round
    trainer = written(tmp_path / "trainer-bf16", source(dtype=BF16))
    server = written(tmp_path / "server-f32", coded(source()))
    first = certify(trainer, server, dialect=DIALECT).differences[0]
    assert first.cause.startswith("wrong source dtype: a float32 master")


def test_another_dialect_is_named(tmp_path: Path) -> None:
    trainer, server = written(tmp_path / "a", source()), written(tmp_path / "b", coded(source(), "vllm_weight_block"))
    result = certify(trainer, server, dialect=DIALECT)
    assert "vllm_weight_block" in result.differences[0].cause and result.weights[0]["different"] == 4


class Block(nn.Module):
    """A block whose attention is other in short passes, as with a cache in float8."""

    def __init__(self, k: int, cache: float = 1.0) -> None:
        super().__init__()
        self.q_proj = nn.Linear(256, k, bias=False)
        self.o_proj = nn.Linear(k, 1024 if k > 1024 else 128, bias=False)
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x).relu() * (self.cache if len(x) < 16 else 1.0))


def model(k: int = 256, cache: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return convert_to_float8_training(Block(k, cache).bfloat16(), config="blockwise")


def rollout(folder: Path, *, k: int = 256, rows: int = 16, cache: float = 1.0) -> dict[str, Any]:
    """Exports and captures of both sides; the server's has a prefill of all, then of 12, then two decoded tokens."""
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for side, passes in (("trainer", [x]), ("server", [x, x[:12], x[12:13], x[13:14]])):
        trained = model(k, cache)
        export_float8(trained, folder / side, format="block")
        with torch.no_grad(), capture(trained, folder / f"captured-{side}"):
            for part in passes:
                trained(part)
    captures = folder / "captured-trainer", folder / "captured-server"
    return {"trainer": folder / "trainer", "server": folder / "server", "captures": captures}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rollout(tmp_path_factory.mktemp("sound"))


def test_a_sound_pair_is_certified(sound: dict[str, Any]) -> None:
    result = certify(**sound, batch=(1, 16))
    assert result.verdict.status is Exit.EQUAL, result
    assert result.verdict.line.startswith("CERTIFIED: 2 of 2 tensors, 2 of 2 layers invariant, 14 of 14 stages, 6,144")
    assert {layer["verdict"] for layer in result.invariance} == {"invariant by rule"}
    assert result.decode["rows"] == result.decode["rows_equal"] == 28
    assert result.captures["replayed"]["equal"] == result.captures["replayed"]["outputs"] > 0
    assert result.captures["served"]["equal"] == result.captures["served"]["outputs"] == 6144
    assert {part.what for part in result.not_seen if part.was_asked} == set()


def test_two_captures_alone_are_certified_and_weights_are_not_seen_apart(sound: dict[str, Any]) -> None:
    result = certify(*sound["captures"])
    assert result.verdict.status is Exit.EQUAL and not result.weights


@pytest.mark.parametrize("calls", [1, 2], ids=["one capture", "a folder for each call"])
def test_the_prefill_may_come_last(sound: dict[str, Any], calls: int, tmp_path: Path) -> None:
    """Every call shows its weight, and every folder begins with step 1."""
    trained, x = model(), torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for call, passes in enumerate([[x[:3], x]] if calls == 1 else [[x[:3]], [x]]):
        with torch.no_grad(), capture(trained, tmp_path / str(call)):
            for part in passes:
                trained(part)
    result = certify(sound["captures"][0], tmp_path)
    assert result.verdict.status is Exit.EQUAL and result.decode["rows_equal"] == 2 * 3, result


def test_the_longest_pass_of_either_side_is_compared(sound: dict[str, Any]) -> None:
    result = certify(*reversed(sound["captures"]))
    assert not result.differences and result.captures["stages"] == result.captures["stages_equal"] == 14
    assert [lone.what for lone in result.not_seen if lone.part == "decode"] == [
        "the server's capture has passes of one length only"
    ]


def test_records_of_one_side_are_one_difference(tmp_path: Path) -> None:
    trained, x = model(), torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for side, passes in (("a", 1), ("b", 3)):
        with torch.no_grad(), capture(trained, tmp_path / side):
            for _ in range(passes):
                trained(x)
    for pair, side in (("ab", "server"), ("ba", "trainer")):
        (difference,) = certify(*(tmp_path / name for name in pair)).differences
        assert difference.cause == f"in the {side}'s capture alone"
        assert difference.place.endswith("q_proj input (call 2)") and difference.seen.endswith("such records")


def test_what_was_asked_for_and_not_seen_is_not_certified(sound: dict[str, Any], tmp_path: Path) -> None:
    lacking = rollout(tmp_path / "short")
    (record,) = (path for path in (lacking["captures"][1]).rglob("index.json"))
    index = json.loads(record.read_text())
    gone = next(record for record in index["records"] if record["layer"] == "o_proj" and record["turn"] == 4)
    index["records"].remove(gone)
    index["left_out"].append({"place": "o_proj output (call 4)", "size": 1, "reason": "the disk is full"})
    record.write_text(json.dumps(index))
    result = certify(**lacking)
    assert result.verdict.status is Exit.INCOMPLETE, result
    assert result.verdict.line.startswith("NOT CERTIFIED: not seen")
    # a trainer's capture says nothing of a server's checkpoint
    result = certify(sound["captures"][0], sound["server"])
    assert result.verdict.status is Exit.UNVERIFIED


def test_a_split_that_depends_on_the_batch_is_named(tmp_path: Path) -> None:
    """Measured in captures, and by the plan."""
    pair = rollout(tmp_path, k=8192, rows=128)
    result = certify(**pair)
    decode, measured = (
        next(difference for difference in result.differences if difference.part == part)
        for part in ("decode", "invariance")
    )
    assert decode.cause == "decode other than prefill: a split that depends on the batch"
    assert (decode.place, measured.place) == ("o_proj", "o_proj")
    # What the server's kernels do outweighs what the plan says of the recipe's.
    (entry,) = [layer for layer in result.invariance if layer["layer"] == "o_proj"]
    assert (entry["verdict"], entry["evidence"]) == ("depends on the batch", "measured")
    by_plan = certify(pair["trainer"], pair["server"], batch=(1, 4096))
    (difference,) = by_plan.differences
    assert (difference.place, difference.cause) == (
        "o_proj",
        "a split that depends on the batch",
    ) and difference.seen == "S = 3 at M = 1, 1 at M = 4096"
    assert certify(pair["trainer"], pair["server"], batch=(4096,)).verdict.status is Exit.EQUAL


def test_a_scale_of_all_rows_is_no_split() -> None:
    (entry,), (difference,) = invariances([TENSORWISE], {"up": (256, 256)}, (1, 64), {}, None)
    assert entry["evidence"] == "by rule" and "share a scale" in difference.seen
    assert (difference.place, difference.cause) == ("up", "a scale that depends on the batch")


def test_decode_other_than_prefill_is_no_gemm(tmp_path: Path) -> None:
    result = certify(**rollout(tmp_path, cache=1.0625))
    (first,) = result.differences
    assert first.cause == "decode other than prefill: attention or the KV cache, not a GEMM"
    assert first.place == "before o_proj" and "row 0" in first.seen and result.verdict.status is Exit.DIFFERENT


def one_pass(folder: Path, recipe: RecipeName, attention: float, weight: float = 1.0) -> Path:
    """A capture of one pass of a block."""
    torch.manual_seed(0)
    block = Block(256).bfloat16()
    with torch.no_grad():
        block.o_proj.weight *= weight
    block.cache = attention
    trained = convert_to_float8_training(block, config=recipe)
    with torch.no_grad(), capture(trained, folder):
        trained(torch.randn(15, 256, generator=torch.Generator().manual_seed(1)).bfloat16())
    return folder


@pytest.mark.filterwarnings("ignore:f8emu.torch. there is no split-K plan for Blackwell")
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise_ue8m0", "mxfp8"])
def test_the_trainers_gemms_of_the_servers_inputs(recipe: RecipeName, tmp_path: Path) -> None:
    """Attention of another stack makes other inputs; the GEMMs are the trainer's, or are not."""
    trainer = one_pass(tmp_path / "trainer", recipe, 1.0)
    result = certify(trainer, one_pass(tmp_path / "server", recipe, 1.0625))
    (first,) = result.differences
    assert first.cause == "attention or the KV cache, not a GEMM" and "o_proj input value" in first.place
    served = result.captures["served"]
    assert served["equal"] == served["outputs"] == 15 * (256 + 128)
    # A weight that only a GEMM of the same input shows.
    result = certify(trainer, one_pass(tmp_path / "other", recipe, 1.0625, weight=1.25))
    assert [difference.place for difference in result.differences if difference.part == "served"] == ["o_proj"]
    assert result.captures["served"]["layers"]["q_proj"]["equal"] == 15 * 256


def test_a_server_that_casts_by_another_dialect_is_told_by_its_products(tmp_path: Path) -> None:
    result = certify(one_pass(tmp_path / "a", "blockwise", 1.0), one_pass(tmp_path / "b", "blockwise_ue8m0", 1.0))
    (served,) = [difference for difference in result.differences if difference.part == "served"]
    assert served.cause == "the trainer's GEMM gives other bits of the same input" and "vllm_group_ue8m0" in served.seen
    delayed = one_pass(tmp_path / "delayed", "delayed", 1.0)
    whys = [lone.what for lone in certify(delayed, delayed).not_seen if lone.part == "served"]
    assert len(whys) == 2 and "follows from earlier steps" in whys[0]


class OfLast(nn.Module):
    """A layer of all tokens, and a head of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[-1:])


def test_a_head_of_the_last_token_is_not_compared_with_that_of_another(tmp_path: Path) -> None:
    trained = convert_to_float8_training(OfLast().bfloat16(), config="rowwise")
    x = torch.randn(16, 64).bfloat16()
    for side, passes in (("trainer", [x]), ("server", [x, x[:4], x[8:9]])):
        with torch.no_grad(), capture(trained, tmp_path / side):
            for part in passes:
                trained(part)
    result = certify(tmp_path / "trainer", tmp_path / "server")
    assert not result.differences and (result.decode["rows"], result.decode["rows_equal"]) == (5, 5)
    assert [lone.what for lone in result.not_seen if lone.part == "decode"] == [
        "head, which has other rows than body"
    ] * 2


def test_captures_of_other_weights_than_the_checkpoints_are_no_certificate(
    sound: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    other = convert_to_float8_training(Block(256).bfloat16(), config="blockwise")
    for side in ("trainer", "server"):
        export_float8(other, tmp_path / side, format="block")
    result = certify(tmp_path / "trainer", tmp_path / "server", captures=sound["captures"])
    assert {difference.cause for difference in result.differences} == {"captured with other weights"}


def expected(**changed: Any) -> Checksums:
    keys = [(rank, name) for rank in range(2) for name in ("experts.0.weight", "experts.1.weight")]
    tensors = tuple(
        TensorChecksum(
            key=f"dp0:pp0:pcp0:tp{rank}:{name}",
            rank=rank,
            name=name,
            shape=(2, 2),
            dtype="float8_e4m3fn",
            sha256=f"{i:064x}",
            engine_digest=f"{i:064x}",
        )
        for i, (rank, name) in enumerate(keys)
    )
    facts: dict[str, Any] = {
        "engine": "vllm",
        "engine_versions": "0.33.0",
        "dialect": DIALECT,
        "kernel": "",
        "digests": "SHA-256",
    }
    of = Source(path="a", dtype="BF16", sha256="0", hashed="headers")
    return Checksums(**facts, tensor_parallel=2, source=of, tensors=tensors, **changed)


def test_digests_alone(tmp_path: Path) -> None:
    """A rank that was not updated, two experts in each other's place, a tensor that nobody predicted."""
    body = expected().engine_json()["checksums"]
    trainer, server = tmp_path / "expected.json", tmp_path / "served.json"
    trainer.write_text(json.dumps(expected().to_json()))
    keys = sorted(body)

    def verdict(changed: Mapping[str, str]) -> Certificate:
        server.write_text(json.dumps({"checksums": {**body, **changed}}))
        return certify(trainer, server)

    assert verdict({}).verdict.status is Exit.EQUAL
    assert verdict({key: "f" * 64 for key in keys[2:]}).differences[0].cause == "a stale shard"
    swap = verdict({keys[0]: body[keys[1]], keys[1]: body[keys[0]]}).differences[0]
    assert swap.cause == f"swapped experts: the bytes of {keys[1]}"
    lone = verdict({keys[0]: "f" * 64})
    assert lone.differences[0].cause == "" and lone.verdict.status is Exit.DIFFERENT
    trainer.write_text(json.dumps(expected(not_predicted=(("norm.weight", "DeepGEMM packs it"),)).to_json()))
    assert verdict({}).verdict.status is Exit.INCOMPLETE


def test_equal_scales_of_two_weights_are_no_swap(tmp_path: Path) -> None:
    """Nor is a digest that several tensors have, or one of another shape."""
    first, second, *others = expected().tensors
    paths = trainer, server = tmp_path / "expected.json", tmp_path / "served.json"

    def cause(tensors: Sequence[TensorChecksum]) -> str:
        of = replace(expected(), tensors=(*tensors, *others))
        body = of.engine_json()["checksums"] | {first.key: second.engine_digest}
        trainer.write_text(json.dumps(of.to_json()))
        server.write_text(json.dumps({"checksums": body}))
        return certify(*paths).differences[0].cause

    assert cause([first, second]).startswith("swapped experts")
    scales = replace(second, name="experts.1.weight_scale_inv", key=f"{second.key}_scale_inv")
    twin = replace(second, name="experts.2.weight", key=second.key.replace("1.weight", "2.weight"))
    for tensors in ([first, scales], [first, second, twin], [first, replace(second, shape=(4, 1))]):
        assert cause(tensors) == ""


def test_weights_in_high_precision_at_the_server_are_named(tmp_path: Path) -> None:
    trainer, server = written(tmp_path / "a", coded(source())), written(tmp_path / "b", source(dtype=BF16))
    result = certify(trainer, server)
    assert result.differences[0].cause == "high precision at the server" and result.weights[0]["different"] == 4


def test_elements_of_other_tensors_are_counted(tmp_path: Path) -> None:
    norm = np.ones(256, BF16)
    for folder in ("a", "b"):
        written(tmp_path / folder, {"norm.weight": norm})
        norm[:3] = 2
    (difference,) = certify(tmp_path / "a", tmp_path / "b").differences
    assert (difference.place, difference.seen) == ("norm.weight", "3 of 256 values differ, BF16 [256]")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_of_two_ranks(engine: Any, tmp_path: Path) -> None:
    """The digests of whole engines: all of them right, then a rank that has older weights."""
    old, new = models.weights(), models.weights()
    old |= {name: x * 3 for name, x in old.items() if models.linear(name)}
    answers: dict[str, Any] = {}
    for name, tensors in (("old", old), ("new", new)):
        coded = models.in_float8(tensors, "vllm_weight_block", "_scale_inv")
        models.write(tmp_path / name, coded, fp8())
        answers[name] = expected_checksums(tmp_path / name, engine=engine, tensor_parallel=2).engine_json()
    path = tmp_path / "served.json"
    path.write_text(json.dumps(answers["new"]))
    result = certify(tmp_path / "new", path, tensor_parallel=2)
    # SGLang shows products of codes and scales, and no scales: they may differ under one product.
    assert result.verdict.status is (Exit.EQUAL if engine == "vllm" else Exit.INCOMPLETE), result
    assert result.setting["engine"]["name"] == engine and not result.differences
    assert result.setting["source_dtype"] == "not shown by codes"
    # Tensors that lack for one reason are one line.
    lacking = [lone.what for lone in result.not_seen if lone.was_asked]
    assert len(lacking) == (engine == "sglang") and all("more (not shown by sglang)" in what for what in lacking)
    # The second rank was not updated.
    mixed = answers["new"]
    if engine == "vllm":
        mixed["checksums"] |= {key: digest for key, digest in answers["old"]["checksums"].items() if ":tp1:" in key}
    else:
        mixed["ranks"][1] = answers["old"]["ranks"][1]
    path.write_text(json.dumps(mixed))
    result = certify(tmp_path / "new", path, tensor_parallel=2)
    (first,) = result.differences
    assert (first.place, first.cause, result.verdict.status) == ("rank 1", "a stale shard", Exit.DIFFERENT)


def test_a_changed_certificate_is_told(sound: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    content = certify(**sound).to_json()
    path.write_text(json.dumps(content))
    assert check(path).verdict.status is Exit.EQUAL and check(path).same == 4
    for key in content["hashes"]:
        part = content[key]
        other = part | {"rows_equal": 27, "batch": [2], "stages": 15} if isinstance(part, dict) else [*part, *part[:1]]
        path.write_text(json.dumps(content | {key: other}))
        assert not part or key in check(path).changed
    for key, value in (("verdict", "different"), ("sha256", "0" * 64)):
        path.write_text(json.dumps(content | {key: value}))
        assert key in check(path).changed
    for key, value, match in (
        ("schema", 2, "schema 1"),
        ("captures", {"a": 1}, "the parts of a certificate"),
        ("captures", {"stages": 1, "stages_equal": 1, "served": [1]}, "the parts of a certificate"),
        ("hashes", [1], "hashes as a JSON object"),
    ):
        path.write_text(json.dumps(content | {key: value}))
        with pytest.raises(CertificateError, match=match):
            check(path)


def test_the_files_that_it_names(tmp_path: Path) -> None:
    trainer, server = written(tmp_path / "trainer", source()), written(tmp_path / "server", coded(source()))
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(certify(trainer, server, dialect=DIALECT).to_json()))
    checkpoint(server, one_ulp(coded(source())), fp8())
    assert check(path).changed == (f"server {server}",)
    trainer.rename(tmp_path / "elsewhere")
    server.rename(tmp_path / "gone")
    assert check(path).verdict.status is Exit.INCOMPLETE


def test_the_command(sound: dict[str, Any], tmp_path: Path) -> None:
    out, html = tmp_path / "certificate.json", tmp_path / "page.html"
    words = ["certify", sound["trainer"], sound["server"], "--captures", *sound["captures"], "--batch", "1"]
    status, text, _ = invoke(*words, "--json", out, "--html", html, COLUMNS="80")
    assert status == 0 and max(map(len, text.splitlines())) <= 80, text
    assert json.loads(out.read_text())["verdict"] == "certified" and "CERTIFIED" in html.read_text()
    assert invoke(*words, "--quiet", COLUMNS="200")[1].count("\n") == 1
    assert invoke("certify", "--check", out)[0] == 0
    out.write_text(out.read_text().replace('"certified"', '"different"'))
    assert invoke("certify", "--check", out)[0] == 1
    assert invoke("certify", sound["trainer"])[0] == 2
    for more in ((sound["trainer"],), ("--batch", "1")):  # nothing is compared with a certificate
        assert invoke("certify", "--check", out, *more)[0] == 2
    status, _, text = invoke("certify", sound["trainer"], tmp_path / "nothing")
    assert status == 2 and "certify: cannot read" in text
    inside = next(sound["captures"][0].rglob("*.safetensors"))
    assert invoke(*words, "--json", inside)[0] == 2 and inside.read_bytes()[:1] != b"{"


def test_weights_in_high_precision_on_both_sides_are_compared_as_they_are(tmp_path: Path) -> None:
    """Beside a server's in float8 they want the dialect that casts them."""
    trainer, server = (written(tmp_path / name, source(dtype=BF16)) for name in ("trainer", "server"))
    assert certify(trainer, server).verdict.status == Exit.EQUAL
    with pytest.raises(SpecError, match="pass --dialect"):
        certify(trainer, written(tmp_path / "served", coded(source())))


def ranks_of(folder: Path, *ranks: Sequence[Mapping[str, np.ndarray]]) -> Path:
    """A server's capture: of each pass of each rank the codes of every layer, with one scale for 128 rows of them."""
    for rank, passes in enumerate(ranks):
        value = TensorRecord(order=0, layer="up", tensor="input", turn=1, dtype="float32")
        records: captured.Records = [(value, {"value": np.ones((9, 16), np.float32)})]
        for turn, layers in enumerate(passes, 1):
            for layer, codes in layers.items():
                scale = np.maximum.reduceat(codes.max(1, keepdims=True), range(0, len(codes), 128)).astype(np.float32)
                record = ForeignRecord(
                    order=len(records),
                    layer=layer,
                    gemm="output",
                    turn=turn,
                    m=len(codes),
                    n=8,
                    k=16,
                    a_format="float8_e4m3fn",
                    a_scale="float32",
                    a_block_rows=128,
                    a_block_columns=16,
                    b_format="",
                    b_scale="",
                    b_block_rows=0,
                    b_block_columns=0,
                    out_dtype="float32",
                    has_bias=False,
                    module="Linear of a server 1",
                )
                product = codes[:, :8].astype(np.float32)
                records.append((record, {"a.codes": codes, "a.scale": scale, "product": product}))
        captured.written(folder, records, rank=rank, world_size=len(ranks))
    return folder


def test_decode_of_several_ranks_whose_rows_share_scales(tmp_path: Path) -> None:
    """Of 301 rows 128 share a scale; a layer that one pass alone has, and a rank without a GEMM, are named."""
    codes = np.random.default_rng(0).integers(0, 120, (301, 16), np.uint8)
    part = codes[128:256]
    passes = [{"up": codes, "down": codes}, {"up": part, "down": part, "extra": part}]
    server = ranks_of(tmp_path / "server", passes, [], passes)
    result = certify(server, server)
    lone = [unseen.what for unseen in result.not_seen if unseen.part == "decode"]
    assert lone == ["extra in a pass of 301 rows", "passes of several lengths of rank 1", "extra in a pass of 301 rows"]
    assert result.decode == {"prefill_rows": 602, "passes": 2, "rows": 512, "rows_equal": 512}
    assert [entry["measured"][:10] for entry in result.invariance] == ["256 of 256"] * 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no row": ({"batch": (0, 16)}, "batch and tensor_parallel must be integers of at least 1; got 0"),
    "a part of a row": ({"batch": (1.5,)}, "got 1.5"),
    "no rank": ({"tensor_parallel": 0}, "got 0"),
    "one capture": ({"captures": ("a",)}, "captures must be two paths"),
    "an engine in capitals": ({"engine": "vLLM"}, "engine must be one of vllm, sglang; got 'vLLM'"),
    "an engine that the file is not of": ({"engine": "sglang"}, "engine must be vllm, as .*; got 'sglang'"),
    "an unknown kernel": ({"kernel": "Cutlass"}, "kernel must be one of cutlass, .*; got 'Cutlass'"),
    "an unknown dialect": ({"dialect": "rows"}, "unknown dialect 'rows'"),
}


@pytest.mark.parametrize("arguments", BAD)
def test_an_argument_of_no_meaning_is_refused(arguments: str, tmp_path: Path) -> None:
    """Although these digests need none of them: the certificate would state what nobody compared."""
    trainer, server = tmp_path / "expected.json", tmp_path / "served.json"
    trainer.write_text(json.dumps(expected().to_json()))
    server.write_text(json.dumps(expected().engine_json()))
    result = certify(trainer, server, dialect="torchao_rowwise")
    assert result.setting["layout"]["tensor_parallel"] == 2 and result.setting["dialects"]["weights"] == DIALECT
    options, match = BAD[arguments]
    with pytest.raises(SpecError, match=match):
        certify(trainer, server, **options)


def test_files_that_cannot_be_of_a_comparison_are_refused(sound: dict[str, Any], tmp_path: Path) -> None:
    pair, plan = (sound["trainer"], sound["server"]), tmp_path / "plan.json"
    with pytest.raises(SpecError, match=r"dialect casts a trainer in high precision.*leave it out"):
        certify(*pair, dialect=DIALECT)
    with pytest.raises(SpecError, match="a file of JSON; got a checkpoint"):
        certify(*pair, checksums=tmp_path)
    of = {"schema": 2, "library": "cuBLAS 13", "torch": "", "recorded": []}
    plan.write_text(json.dumps({**of, "chip": "NVIDIA H100 80GB HBM3"}))
    with pytest.raises(SpecError, match="of NVIDIA H100 80GB HBM3, the recipe of Hopper"):
        certify(*pair, plan=plan)
    plan.write_text(json.dumps({**of, "chip": "NVIDIA H200"}))
    assert certify(*pair, plan=plan).setting["plans"] == "cuBLAS 13 on NVIDIA H200"
    # An answer may have any name; what is no answer is shown.
    answer = tmp_path / "answer"
    for content, match in (("no JSON", "found no JSON"), ('{"error": "busy"}', "no known form: .*busy.*--engine")):
        answer.write_text(content)
        with pytest.raises(F8Error, match=match):
            certify(sound["trainer"], answer)
    for swapped, remedy in (
        ((answer, pair[1]), "trainer comes first"),
        ((pair[0], sound["captures"][1]), "--captures"),
    ):
        result = certify(*swapped)
        assert result.verdict.status is Exit.UNVERIFIED and any(remedy in lone.what for lone in result.not_seen)
    plan.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="found no JSON"):
        certify(*pair, plan=plan)
