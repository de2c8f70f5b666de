r"""torchtitan with f8emu's recipes. The installed version of torchtitan selects the adapter; torchtitan is not changed.

torchtitan 0.2 converts modules. The section [f8emu] has the keys of torchtitan's own float8 section:

    torchrun ... -m torchtitan.train --job.config_file FILE --model.converters f8emu \
        --job.custom_config_module f8emu.torch.integrations.torchtitan \
        --experimental.custom_import f8emu.torch.integrations.torchtitan \
        --f8emu.recipe_name rowwise --f8emu.filter_fqns output \
        --f8emu.enable_fsdp_float8_all_gather --f8emu.precompute_float8_dynamic_scale_for_fsdp

torchtitan 0.3 converts trees of configurations, in your function that returns a Trainer.Config:

    float8 = Float8Converter.Config(recipe_name="rowwise", filter_fqns=["lm_head"])
    config.model_spec = model_registry("8B", converters=[float8])

For precomputed scales, which have no key in 0.3, set `config.model_spec.post_optimizer_build_fn =
float8.build().post_optimizer_build`. Tested with `parallelism.spmd_backend` "partial_dtensor" and "full_dtensor"; the
default of 0.3.0, "spmd_types", needs a torch newer than 2.13, in bfloat16 too.

Per-op selective checkpointing needs no option: torchtitan's policies see f8emu's GEMMs and amaxes as `aten.mm` and
`aten.max`, and keep every second GEMM and all amaxes.

Under a delayed recipe, checkpoints hold the scales only after `checkpoint_delayed_scaling(trainer)`.
"""

from importlib.util import find_spec

from f8emu.torch.integrations.torchtitan.conversion import checkpoint_delayed_scaling as checkpoint_delayed_scaling

if find_spec("torchtitan.protocols.model_converter") is not None:
    from f8emu.torch.integrations.torchtitan.model_converter import Float8Converter as Float8Converter
    from f8emu.torch.integrations.torchtitan.model_converter import JobConfig as JobConfig
else:
    from f8emu.torch.integrations.torchtitan.config_converter import Float8Converter as Float8Converter
