"""A weight of every class answers what libraries ask of a parameter as the parameter of an `nn.Linear` does.

The questions are those of accelerate, DeepSpeed, PEFT, safetensors, transformers, torch's optimizers and averages.
"""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8emu.torch as f8
from f8emu.spec import UnsupportedError
from f8emu.torch.weights.coded_weight import CodedWeight
from f8emu.torch.weights.float8_weight import Float8Weight
from f8emu.torch.weights.sharded_weight import ShardedWeight
from tests.torch_path.states import through_file

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
Question = Callable[[Any, Any], Any]
GATHER: dict[str, Any] = {"enable_fsdp_float8_all_gather": True}
REST: dict[str, Any] = {"float8_primary_weights": True}
KINDS = {"plain": nn.Parameter, "gather": ShardedWeight, "rest": Float8Weight}
SHARDS = {"plain shard": torch.Tensor, "gather shard": ShardedWeight, "rest shard": ShardedWeight}


def model_of(kind: str) -> Any:
    """Two layers, float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    if "plain" not in kind:
        f8.convert_to_float8_training(model, config="rowwise", **(REST if "rest" in kind else GATHER))
    return fully_shard(model, reshard_after_forward=False) if "shard" in kind else model


def weights(model: Any) -> list[Any]:
    """Or a rank's parts of them."""
    return [getattr(x, "_local_tensor", x) for x in model.parameters()]


def values(x: Any) -> Any:
    x = getattr(x, "_local_tensor", x)
    return getattr(x, "plain", x).detach()


def same(weight: Any, new: Any, *, is_copy: bool = True) -> Any:
    """The facts in which a copy of a weight equals it."""
    facts = type(new) is type(weight), isinstance(new, nn.Parameter), new.requires_grad, new.dtype
    return facts, (new.data_ptr() != weight.data_ptr()) is is_copy, torch.equal(new, weight)


# Of a weight and its model.
OF_ANY: dict[str, Question] = {
    "address": lambda w, m: (w.data_ptr() > 0, w.data_ptr() == w.detach().data_ptr() == w.data.data_ptr()),
    "addresses differ": lambda w, m: len({x.data_ptr() for x in weights(m)}),
    "storage": lambda w, m: (w.untyped_storage().data_ptr() == w.data_ptr(), w.untyped_storage().nbytes()),
    "typed storage": lambda w, m: (w.storage().data_ptr() == w.data_ptr(), w.storage_offset(), w.storage().size()),
    "sizes": lambda w, m: (w.shape, w.numel(), w.nbytes, w.element_size(), w.stride(), w.is_contiguous(), w.ndim),
    "kind": lambda w, m: (w.dtype, w.device, w.layout, w.is_meta, w.is_cuda, w.is_leaf, w.type(), w.is_sparse),
    "identity": lambda w, m: (hash(w) == id(w), {w: 1}[w], w in {w}, weakref.ref(w)() is w),
    "no copy": lambda w, m: (w.to(w.dtype) is w, w.cpu() is w, w.contiguous() is w, w.float() is w),
    "pinned": lambda w, m: w.is_pinned(),
    "moved": lambda w, m: (w.to("meta").device, w.bfloat16().dtype, w.detach().bfloat16().data_ptr() > 0),
    "like": lambda w, m: [(x.shape, x.dtype) for x in (torch.zeros_like(w), torch.empty_like(w), w.new_zeros(3))],
    "number": lambda w, m: (type(w.new_empty([])), w.new_zeros(()).item()),
    "equal": lambda w, m: (torch.equal(w, w.detach().clone()), bool((w == w).all()), w.isnan().any().item()),
    "values": lambda w, m: (w.detach().norm().item(), w.data.float().sum().item(), torch.no_grad()(w.max)().item()),
    "not shared": lambda w, m: w.is_shared(),
}
OF_PARAMETER: dict[str, Question] = {
    "frozen": lambda w, m: (w.requires_grad_(False).requires_grad, w.requires_grad_().requires_grad),
    "found": lambda w, m: w is next(m.parameters()),
    "copy": lambda w, m: same(w, copy.copy(w), is_copy=False),
    "deep copy": lambda w, m: same(w, copy.deepcopy(w)),
    "pickle": lambda w, m: same(w, pickle.loads(pickle.dumps(w))),
    "file": lambda w, m: same(w, through_file(w, weights_only=False)),
    # As DeepSpeed and Megatron find what accumulates gradients.
    "accumulation": lambda w, m: w.expand_as(w).grad_fn.next_functions[0][0].variable is w,
    "swapped": lambda w, m: torch.utils.swap_tensors(w, copy.deepcopy(w)),
    "memory": lambda w, m: (m.share_memory() is m, w.is_shared(), m(torch.ones(16, 32)).shape),
    "shared": lambda w, m: same(next(m.parameters()), pickle.loads(pickle.dumps(next(m.parameters())))),
    "loaded": lambda w, m: (
        m.load_state_dict(model_of("plain").state_dict(), assign=True),
        type(m[0].weight) is type(w),
    ),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda w: w.mul_(0.5).add_(torch.ones_like(w)),
    "data in place": lambda w: w.data.mul_(0.5),
    "data": lambda w: setattr(w, "data", torch.full((48, 32), 2.0)),
    "data of its own": lambda w: setattr(w, "data", w.data + 1),
    "copy": lambda w: w.copy_(torch.eye(48, 32)),
    "list": lambda w: torch._foreach_mul_([w], 0.5),  # pyright: ignore[reportPrivateImportUsage]
    "initialization": lambda w: nn.init.trunc_normal_(w, generator=torch.Generator().manual_seed(1)),
    "other dtype": lambda w: setattr(w, "data", w.data.to(torch.bfloat16)),  # as accelerate, the other way
}


def after(write: Callable[[Any], Any], kind: str) -> Any:
    model = model_of(kind)
    with torch.no_grad():
        write(weights(model)[0])
    return model


@pytest.mark.parametrize("kind", [*KINDS, *SHARDS])
def test_a_weight_answers_as_a_parameter_does(kind: str) -> None:
    is_shard = kind in SHARDS
    mine, expected = model_of(kind), model_of("plain shard" if is_shard else "plain")
    assert type(weights(mine)[0]) is (KINDS | SHARDS)[kind]
    for name, question in (OF_ANY if is_shard else OF_ANY | OF_PARAMETER).items():
        assert question(weights(mine)[0], mine) == question(weights(expected)[0], expected), name


@pytest.mark.parametrize("kind", ["gather", "rest", "gather shard", "rest shard"])
def test_a_layer_multiplies_what_was_written(kind: str) -> None:
    x = torch.ones(16, 32)
    for name, write in WRITES.items():
        model, expected = after(write, kind), after(write, "plain shard" if "shard" in kind else "plain")
        written, wanted = (one.state_dict()["0.weight"] for one in (model, expected))
        assert torch.equal(values(written).float(), values(wanted).float()), name
        fresh = model_of("gather")
        fresh[0].weight.data = values(wanted)
        assert torch.equal(model(x), fresh(x)), name


@pytest.mark.parametrize("kind", ["gather", "rest"])
def test_a_library_cannot_make_one_from_a_tensor(kind: str) -> None:
    """accelerate's `cpu_offload` tries it: `type(parameter)(value, requires_grad=...)`."""
    weight = weights(model_of(kind))[0]
    with pytest.raises(UnsupportedError, match=rf"makes a {type(weight).__name__} from a tensor, .* offload the model"):
        type(weight)(torch.ones(48, 32), requires_grad=True)


def test_a_gathered_weight_has_no_values() -> None:
    """It has no address either; who reads it says so."""
    model = model_of("gather shard")
    model(torch.ones(16, 32))
    weight: Any = model[0].weight
    assert type(weight) is CodedWeight and weight.data_ptr() == 0 and not weight.is_shared()
    for call in (weight.share_memory_, weight.isnan, lambda: setattr(weight, "data", torch.ones(48, 32))):
        with pytest.raises(UnsupportedError, match="gathered as float8 codes"):
            call()


def test_a_weight_of_another_library_is_refused() -> None:
    """Such as torchao's `quantize_` puts into every `nn.Linear`."""

    class Quantized(nn.Parameter):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    quantized = torch.Tensor._make_subclass(Quantized, torch.ones(48, 32))
    with pytest.raises(UnsupportedError, match="quantize the model after dequantize_float8_training"):
        model_of("gather")[0].weight = quantized
