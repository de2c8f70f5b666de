"""`f8emu doctor`: how torch, JAX and the GPU of this machine behave on the known traps, and which engine would run."""

from f8emu.doctor.diagnosis import Device as Device
from f8emu.doctor.diagnosis import Diagnosis as Diagnosis
from f8emu.doctor.diagnosis import run as run
from f8emu.doctor.probes import Probe as Probe
