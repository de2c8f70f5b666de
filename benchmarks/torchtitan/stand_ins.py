"""Stand-ins for what torchtitan asks for and a run of random tokens does not need. Call them before it is imported."""

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch._utils

from benchmarks.runner import say


def datasets_if_broken() -> None:
    """torchtitan imports `datasets` for its own data loader; an empty module will do where that fails."""
    try:
        importlib.import_module("datasets")
    except Exception as error:  # whatever a package does that does not fit the machine
        say(f"a stand-in for datasets: {type(error).__name__}: {error}")
        for name in [name for name in sys.modules if name.split(".")[0] == "datasets"]:
            del sys.modules[name]
        datasets: Any = ModuleType("datasets")
        distributed: Any = ModuleType("datasets.distributed")
        datasets.Dataset, datasets.load_dataset, datasets.distributed = object, None, distributed
        distributed.split_dataset_by_node = None
        sys.modules |= {"datasets": datasets, "datasets.distributed": distributed}


def tensorboard_if_missing() -> None:
    """torchtitan imports its writer, which nothing here uses."""
    if importlib.util.find_spec("tensorboard") is None:
        writer: Any = ModuleType("torch.utils.tensorboard")
        writer.SummaryWriter = None
        sys.modules["torch.utils.tensorboard"] = writer


def cpu_as_accelerator() -> None:
    """torchtitan runs on accelerators alone; for a test the CPU is made to look like one."""
    module = SimpleNamespace(
        set_device=lambda device: None,
        get_device_name=lambda device=None: "H100",  # its peak is known to torchtitan
        current_device=lambda: 0,
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=2**34),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device=None: {},
        synchronize=lambda: None,
    )
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda kind: module


def sums_that_gloo_has() -> None:
    """FSDP2 asks for PREMUL_SUM where gradients are not divided; gloo has none, and a plain sum is the same."""
    parallelize: Any = importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    fsdp: Any = importlib.import_module("torch.distributed.fsdp")

    def plain_sums(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                sharded: Any = module
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)

    parallelize.disable_fsdp_gradient_division = plain_sums
