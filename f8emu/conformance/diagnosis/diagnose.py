"""What a kernel does instead: every alteration that the suite knows is tried on small telling GEMMs.

`diagnose` puts the probes of each kind of GEMM to a subject once, and then looks for the rules that give its bits:
single alterations first, all that explain every bit; where none does, a second and a third on top of the best.
"""

from collections.abc import Iterable
from dataclasses import replace

from f8emu.conformance.diagnosis.asked import NoAnswer, ask
from f8emu.conformance.diagnosis.hypotheses import Alteration
from f8emu.conformance.diagnosis.memory import Memory
from f8emu.conformance.diagnosis.probe import KINDS, Kind
from f8emu.conformance.diagnosis.search import Diagnosis, Search, failed
from f8emu.conformance.run.result import Progress
from f8emu.conformance.run.subject import Subject
from f8emu.spec import HOPPER, Chip


def diagnose(
    subject: Subject,
    *,
    kinds: Iterable[Kind] = KINDS,
    chip: Chip = HOPPER,
    progress: Progress | None = None,
    memory: Memory | None = None,
) -> tuple[Diagnosis, ...]:
    """One diagnosis for each kind of GEMM that the subject offers; of those that differ the rules that they follow.

    `memory` is shared by diagnoses of several subjects: the probes are the same.

    Exactness: an explanation that is complete gives every output of the probes of its kind, bit for bit.
    """
    memory = memory or Memory()
    found: list[Diagnosis] = []
    hints: dict[tuple[str, ...], tuple[Alteration, ...]] = {}
    for kind in kinds:
        answers = ask(subject, kind)
        if isinstance(answers, NoAnswer):
            if not answers.is_refusal:
                found.append(failed(kind.name, answers.reason))
        else:
            # Where a kind has no explanation, the next ones are not searched for three faults at once; but what
            # explains one kind is tried on the next.
            name = f"{subject.name}: {kind.name}"
            search = Search(answers.asked, chip, memory, progress, name, tuple(hints.values()))
            search.is_thorough = all(one.best is None or one.best.is_complete for one in found)
            one = replace(search.run(kind.name), left_out=answers.left_out)
            if one.left_out and one.is_right:
                one = failed(kind.name, f"no probe that is left differs; {one.left_out}")
            found.append(one)
            hints |= {tuple(step.name for step in steps): steps for steps in search.found if len(steps) > 1}
    return tuple(replace(one, engine=subject.engine) for one in found)
