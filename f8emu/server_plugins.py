"""The plugins of vLLM and SGLang, which every process of a server calls: they capture what it multiplies.

Without `F8EMU_CAPTURE` they load nothing. See `f8emu.torch.integrations.served`.
"""

import os


def vllm() -> None:
    """The entry point in the group `vllm.general_plugins`."""
    if os.environ.get("F8EMU_CAPTURE"):
        from f8emu.torch.integrations.vllm import register

        register()


def sglang() -> None:
    """The entry point in the group `sglang.srt.plugins`."""
    if os.environ.get("F8EMU_CAPTURE"):
        from f8emu.torch.integrations.sglang import register

        register()
