"""The data of checksums: written, read, put in an engine's form, and compared with what a server answers."""

import hashlib
import json
from typing import Any

import pytest

from f8emu.rollout import Checksums, Outcome, Source, TensorChecksum
from f8emu.spec.errors import OperandError

SHA = {name: hashlib.sha256(name.encode()).hexdigest() for name in "abc"}


def checksums(engine: str, ranks: int = 2) -> Checksums:
    prefix = "dp0:pp0:pcp0:tp{}:" if engine == "vllm" else "tp{}:"
    tensors = [
        TensorChecksum(
            key=prefix.format(rank) + name,
            rank=rank,
            name=name,
            shape=(2, 3),
            dtype="float8_e4m3fn",
            sha256=SHA[name],
            engine_digest=SHA[name][: 64 if engine == "vllm" else 16],
        )
        for rank in range(ranks)
        for name in ("a", "b")
    ]
    return Checksums(
        engine=engine,
        engine_versions="1.0",
        dialect="vllm_weight_block",
        kernel="triton",
        digests="SHA-256",
        tensor_parallel=ranks,
        source=Source(path="model", dtype="BF16", sha256=SHA["c"], hashed="headers"),
        tensors=tuple(tensors),
        not_predicted=(("moved", "a kernel repacks it"),),
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_they_are_read_as_they_were_written(engine: str) -> None:
    expected = checksums(engine)
    assert (
        Checksums.from_json(json.loads(json.dumps(expected.to_json())))
        == expected
        == Checksums.from_json(expected.to_json())
    )


@pytest.mark.parametrize("data", [[], {}, {"schema": 2}, {"schema": 1, "engine": "vllm"}])
def test_foreign_data_is_refused(data: object) -> None:
    with pytest.raises(OperandError, match=r"Checksums\.from_json.*f8emu checksums"):
        Checksums.from_json(data)


def test_an_answer_in_place_of_what_is_expected_is_named() -> None:
    for engine in ("vllm", "sglang"):
        with pytest.raises(
            OperandError, match="found an engine's answer; write them with `f8emu checksums --form f8emu`"
        ):
            Checksums.from_json(checksums(engine).engine_json())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_answer_of_another_number_of_ranks_is_not_compared(engine: str) -> None:
    """Its shards are others, so that every digest would differ."""
    with pytest.raises(OperandError, match=r"expected digests of 2 ranks; found those of 1; .*--tp"):
        checksums(engine).compare(checksums(engine, ranks=1).engine_json())
    with pytest.raises(OperandError, match=r"expected digests of 1 rank; found those of 2"):
        checksums(engine, ranks=1).compare(checksums(engine).engine_json())


def test_names_without_a_rank_are_not_compared() -> None:
    with pytest.raises(OperandError, match="found names without a rank"):
        checksums("vllm", ranks=1).compare({"a": SHA["a"]})


def test_a_reason_is_no_expected_digest() -> None:
    (mismatch,) = checksums("vllm").compare(checksums("vllm").engine_json())
    assert mismatch.text == "moved: not predicted: a kernel repacks it"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_own_form_differs_in_nothing_but_what_is_not_predicted(engine: str) -> None:
    expected = checksums(engine)
    assert [x.outcome for x in expected.compare(expected.engine_json())] == [Outcome.NOT_PREDICTED]


def test_the_workers_of_vllm_may_answer_apart() -> None:
    expected = checksums("vllm")
    workers: list[dict[str, str]] = [{}, {}]
    for tensor in expected.tensors:
        workers[tensor.rank][tensor.key] = tensor.engine_digest
    assert (
        expected.compare(workers)
        == expected.compare(expected.engine_json())
        == expected.compare(expected.engine_json()["checksums"])
    )
    with pytest.raises(OperandError, match="once"):
        expected.compare([workers[0], workers[0]])


def test_ranks_of_sglang_are_told_by_what_they_say() -> None:
    expected, answer = checksums("sglang"), checksums("sglang").engine_json()
    # 0.5.12 to 0.5.20 have one object, and an answer may have ranks in any order.
    answer["ranks"] = [{**x, "parallelism_info": x["parallelism_info"][0]} for x in reversed(answer["ranks"])]
    answer["ranks"][0]["checksums"]["a"] = "0" * 16
    assert [(x.key, x.outcome) for x in expected.compare(answer)] == [
        ("tp1:a", Outcome.DIFFERENT),
        ("moved", Outcome.NOT_PREDICTED),
    ]


def _changed(answer: dict[str, str], **changes: str | None) -> dict[str, Any]:
    keys = {name: f"dp0:pp0:pcp0:tp1:{name}" for name in changes}
    changed = answer | {keys[name]: digest for name, digest in changes.items() if digest is not None}
    return {
        key: digest for key, digest in changed.items() if key not in [keys[n] for n, d in changes.items() if d is None]
    }


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"b": SHA["c"]}, Outcome.DIFFERENT),
        ({"b": None}, Outcome.MISSING),
        ({"other": SHA["c"]}, Outcome.UNEXPECTED),
        ({"b": SHA["b"][:16]}, Outcome.OTHER_KIND),
        ({"b": SHA["b"].upper()}, Outcome.OTHER_KIND),
        ({"moved": SHA["c"]}, Outcome.NOT_PREDICTED),
    ],
)
def test_each_way_to_differ_is_named_with_its_key(change: dict[str, str | None], outcome: Outcome) -> None:
    expected = checksums("vllm")
    (key,) = change
    mismatches = [
        x for x in expected.compare(_changed(expected.engine_json()["checksums"], **change)) if x.key != "moved"
    ]
    assert [(x.key, x.outcome) for x in mismatches] == [(f"dp0:pp0:pcp0:tp1:{key}", outcome)]
    assert outcome.value in mismatches[0].text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "answer", [None, [], {}, {"checksums": {}}, {"ranks": []}, {"ranks": [1]}, {"a": 1}, [{"a": 1}]]
)
def test_an_answer_of_something_else_is_refused(engine: str, answer: object) -> None:
    with pytest.raises(OperandError, match=r"Checksums\.compare"):
        checksums(engine).compare(answer)
