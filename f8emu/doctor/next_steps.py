"""What to do after a diagnosis: one to three lines, by what the machine has."""

from collections.abc import Iterator

from f8emu.doctor.diagnosis import Diagnosis


def next_steps(diagnosis: Diagnosis) -> Iterator[str]:
    """What this machine can do now, and what it lacks."""
    if diagnosis.faults:
        yield "A FAULT above changes bits on this machine: undo what it names before you trust a result."
    missing = [name for name in ("torch", "jax") if diagnosis.versions.get(name) == "not installed"]
    on_hardware = any(engine.startswith("hardware") for engine in diagnosis.engines.values())
    if len(missing) == 2:
        yield "f8emu.numpy works without more. `f8emu verify` proves its bits against recordings of an H200."
        yield "To train with torch: pip install 'f8emu[torch,jax]'. To train with JAX: pip install 'f8emu[jax]'."
        return
    if on_hardware:
        yield (
            "This GPU has the float8 tensor cores: f8emu.torch.convert_to_float8_training(model) trains on them. "
            "`f8emu verify torch` proves its bits."
        )
    elif missing == ["jax"]:
        yield "There is no float8 hardware here, and torch emulates GEMMs with JAX, which is missing:"
        yield "pip install 'f8emu[jax]'. f8emu.numpy works without it."
    else:
        yield (
            "GEMMs are emulated here, with the bits of an H200. `f8emu verify` proves it; "
            "`f8emu verify FILE.py:FUNCTION` checks a kernel of your own."
        )
    if missing == ["jax"] and on_hardware:
        yield "To emulate GEMMs too: pip install 'f8emu[jax]'."
    elif missing == ["torch"]:
        yield "f8emu.jax.dot_general(recipe) trains in JAX. For torch: pip install 'f8emu[torch]'."
