"""Test vectors as files, for simulators and hardware: `f8emu vectors`."""
