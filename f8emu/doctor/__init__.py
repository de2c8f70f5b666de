"""`f8emu doctor`: how torch, JAX and the GPU of this machine behave on the known traps, and which engine would run."""

import json
import sys
from dataclasses import asdict
from typing import TextIO

from f8emu.doctor import diagnosis
from f8emu.doctor.diagnosis import Device as Device
from f8emu.doctor.diagnosis import Diagnosis as Diagnosis
from f8emu.doctor.probes import Probe as Probe


def run(*, as_json: bool = False, stream: TextIO | None = None) -> int:
    """Diagnose this machine and write the result to `stream` (standard output), as text or as JSON.

    Returns the exit status: 1 if something deviates that f8emu relies on, 0 if not.
    """
    out: TextIO = sys.stdout if stream is None else stream
    found = diagnosis.diagnose()
    if as_json:
        out.write(json.dumps(asdict(found), indent=1) + "\n")
    else:
        diagnosis.write(found, out)
    return 1 if found.faults else 0
