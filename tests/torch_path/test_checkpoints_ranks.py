"""Checkpoints of sharded models (gloo): other numbers of ranks, a rank killed in the middle of a save, plain files."""

import functools
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

import f8emu.torch as f8
from f8emu.spec import MissingExtraError, recipe_by_name
from f8emu.torch.parallel.checkpoints import export_safetensors
from tests.torch_path import ranks
from tests.torch_path.beside import whole
from tests.torch_path.ranks import forked, run_cases
from tests.torch_path.states import assert_same_state

RANKS = (1, 2, 3, 4)
"""On three, shards are unequal."""
RECIPES = ("delayed", "rowwise", "delayed, at rest", "rowwise, at rest")
TO_EVERY_NUMBER = "delayed, at rest"
"""It has masters and states. The others resume on the next number alone: 2 after 1, and 1 after 4."""
TIMEOUT = 20
"""Seconds of a process group."""
TRAINER = Path(__file__).parents[2] / "examples" / "train_llama.py"


def build(case: str, mesh: DeviceMesh, seed: int) -> tuple[Any, Optimizer]:
    """An embedding tied to the head, and two converted layers whose weights are gathered as float8, or rest as it."""
    torch.manual_seed(seed)
    recipe, _, kind = case.partition(", ")
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 32, bias=False))
    model[3].weight = model[0].weight
    f8.convert_to_float8_training(
        model,
        config=recipe_by_name(recipe),
        module_filter_fn=lambda _, fqn: fqn != "3",
        float8_primary_weights=bool(kind),
        enable_fsdp_float8_all_gather=not kind,
    )
    for layer in (model[1], model[2], model):
        fully_shard(layer, mesh=mesh)
    masters = functools.partial(f8.MasterWeights, optimizer_class=AdamW) if kind else AdamW
    return model, masters(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Optimizer) -> None:
    """Leave what a step leaves, without its GEMMs, whose emulation takes longer than all else here."""
    for _ in range(2):
        for layer in (model[1], model[2]):
            layer.unshard()  # gathers the weight as float8
            layer.reshard()
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 3 + 1
        optimizer.step()
    # Last: the amax of a gather that no backward pass follows is that of the rank's own rows.
    states = f8.delayed_state_dict(model)
    for number, state in enumerate(states.values()):
        state.copy_(torch.arange(number, number + state.numel()).view(state.shape))
    f8.load_delayed_state_dict(model, states)


def entries(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "float8": f8.DelayedScalingState(model)}


def all_values(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights, moments, scales and histories, as plain tensors."""
    values: dict[str, Any] = {name: parameter for name, parameter in model.named_parameters()}
    for number, state in enumerate(optimizer.state.values()):
        values |= {f"{number}.{name}": value for name, value in state.items()}
    values |= f8.delayed_state_dict(model)
    return {name: whole(value).clone() for name, value in values.items()}


def save_and_resume(recipe: str) -> None:
    """On the first 1, 2, 3 and 4 of four ranks; resumed on these numbers, by models of other weights."""
    (directory,) = ranks.shared
    meshes = {count: DeviceMesh("cpu", list(range(count)), mesh_dim_names=("dp",)) for count in RANKS}
    for saving, mesh in meshes.items():
        folder, expected = directory / f"{recipe}-{saving}", directory / f"{recipe}-{saving}.pt"
        if dist.get_rank() < saving:
            model, optimizer = build(recipe, mesh, seed=0)
            train(model, optimizer)
            save(entries(model, optimizer), checkpoint_id=folder, process_group=mesh.get_group())
            saved = all_values(model, optimizer)
            assert ("1.amax_history" in saved and bool(saved["1.amax_history"].any())) == ("delayed" in recipe)
            if dist.get_rank() == 0:
                torch.save(saved, expected)
            if saving == max(RANKS):
                export_safetensors(model, directory / f"{recipe}.safetensors")
        dist.barrier()
        for resuming in RANKS if recipe == TO_EVERY_NUMBER else (saving % max(RANKS) + 1,):
            if dist.get_rank() < resuming:
                other = meshes[resuming]
                model, optimizer = build(recipe, other, seed=1)
                state = entries(model, optimizer)
                load(state, checkpoint_id=folder, process_group=other.get_group())
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
                assert_same_state(all_values(model, optimizer), torch.load(expected))
            dist.barrier()


CASES = {4: {recipe: functools.partial(save_and_resume, recipe) for recipe in RECIPES}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models were saved, and resumed on other numbers of ranks."""
    directory = tmp_path_factory.mktemp("checkpoints")
    run_cases(__name__, 4, directory)
    return directory


@pytest.mark.parametrize("recipe", RECIPES)
def test_exported_model(recipe: str, directory: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    exported = safetensors.load_file(directory / f"{recipe}.safetensors")
    saved = torch.load(directory / f"{recipe}-4.pt")
    assert exported.keys() == {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"}, "the tied weight once"
    assert_same_state(exported, {name: saved[name].bfloat16() for name in exported})
    plain = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 32, bias=False))
    plain[3].weight = plain[0].weight
    assert plain.bfloat16().load_state_dict(exported, strict=False).missing_keys == ["3.weight"]


def test_transformers_loads_an_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True, dtype="bfloat16"
    )
    model = transformers.LlamaForCausalLM(config).float()
    f8.convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn != "lm_head")
    assert export_safetensors(model, tmp_path / "model.safetensors") == tmp_path / "model.safetensors"
    config.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert_same_state(loaded, {name: x.bfloat16() for name, x in model.state_dict().items()})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match="export_safetensors needs the package 'safetensors'"):
        export_safetensors(model, tmp_path / "other.safetensors")


def train_llama(rank: int, count: int, port: int, directory: Path, steps: int, kill_at: int | None) -> None:
    """The trainer of the examples, in bfloat16; rank 1 dies when it has written its part of a checkpoint."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    write = FileSystemWriter.write_data

    def write_and_die(self: Any, *args: Any) -> Any:
        written = write(self, *args)
        if rank == 1 and self.path.name == f"unfinished-{kill_at}":
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    folder = ["--checkpoint.folder", str(directory), "--checkpoint.interval", "1", "--parallel.timeout", str(TIMEOUT)]
    sys.argv = ["train_llama", *folder, "--training.steps", str(steps), "--training.batch_size", str(4 // count)]
    sys.stdout = (directory.parent / f"ranks-{count}-{rank}.txt").open("w")
    with mock.patch.object(FileSystemWriter, "write_data", write_and_die):
        runpy.run_path(str(TRAINER), run_name="__main__")
    sys.stdout.close()


def run_trainer(
    count: int, directory: Path, steps: int, kill_at: int | None = None
) -> tuple[list[int | None], list[str]]:
    """The exit status of every rank, none of which is ended from outside, and what rank 0 printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with forked() as context:
        processes = [
            context.Process(target=train_llama, args=(rank, count, port, directory, steps, kill_at))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
    for process in processes:
        process.join(TIMEOUT + 40)  # torch alone takes seconds to import
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes, (directory.parent / f"ranks-{count}-0.txt").read_text().splitlines()


def test_a_kill_during_a_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    codes, before = run_trainer(2, folder, steps=3, kill_at=2)
    # Python's status of an error, or abort(): gloo's threads of a group whose peer died may outlive the interpreter
    assert codes[0] in (1, -signal.SIGABRT), "rank 0 ends by itself, with an error"
    assert codes[1] == -signal.SIGKILL
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "unfinished-2"]
    assert [line.split()[1] for line in before[1:]] == ["1/3", "2/3"]
    codes, after = run_trainer(1, folder, steps=2)
    assert codes == [0] and after[0].endswith("from step 1")
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]
    assert after[1].split()[:4] == ["step", "2/2", "loss", before[2].split()[3]], "the step that was not saved"
