"""The report of infinite amaxes where the device is behind the host, as a GPU is; one is played on the CPU."""

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import f8emu.torch as f8
from f8emu.spec import DELAYED, Recipe, ScaleRule
from f8emu.torch.casts import delayed_state
from f8emu.torch.casts.delayed_state import DelayedBuffers, Report, report_of
from f8emu.torch.fused.delayed import STATE
from f8emu.torch.layer import delayed_update
from tests.torch_path.delayed import buffers_of

CUDA = torch.device("cuda", 0)
sync = f8.sync_float8_amax_and_scale_history


def make(recipe: Recipe = DELAYED) -> Any:
    model = nn.Sequential(*[nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(3)])
    return f8.convert_to_float8_training(model, config=recipe)


def call(model: nn.Sequential, infinite: int | None = None) -> None:
    """One pass, in which every layer has an input of its own, so that an infinity stays in one."""
    losses: list[Tensor] = []
    for i, layer in enumerate(model):
        x = torch.full((4, 16), float("inf") if i == infinite else 1.0, dtype=torch.bfloat16)
        losses.append(layer(x).nan_to_num(posinf=1.0, neginf=1.0).sum())
    torch.stack(losses).sum().backward()


def told(model: nn.Sequential, infinite: int | None = None) -> list[str]:
    """The layers and tensors that the update at the end of a pass names."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(model, infinite)
    texts = [str(warning.message) for warning in seen]
    assert all("the amax was infinite or NaN for: " in text for text in texts)
    return [name for text in texts for name in text.partition("NaN for: ")[2].partition(";")[0].split(", ")]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Report]:
    """The reports, none at first; those of a GPU lie in the memory of the CPU."""
    found: dict[Any, Report] = {}
    monkeypatch.setattr(delayed_state, "_reports", found)
    monkeypatch.setattr(delayed_state, "Report", lambda layers, is_pinned: Report(layers, False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Writes of reports that the device has not come to: those of the last update."""
    under_way: list[Callable[[], object]] = []
    update = delayed_update.update_delayed

    def behind(states: list[Tensor], report: Tensor, *args: Any) -> None:
        for write in under_way:
            write()
        own = torch.empty_like(report)
        update(states, own, *args)
        under_way[:] = [lambda: report.copy_(own)]

    monkeypatch.setattr(delayed_update, "update_delayed", behind)
    return under_way


def test_each_infinity_is_told_once_by_name_at_a_later_update(late) -> None:
    model = make()
    names: list[list[str]] = []
    for infinite in (None, 1, None, 1, 2, None, 2, None):
        names.append(told(model, infinite))
    assert names == [[], [], ["input of 1"], [], [], ["input of 2"], [], []]
    assert [buffers.counts[2].tolist() for buffers in buffers_of(model)] == [[0, 0, 0], [2, 0, 0], [2, 0, 0]]


def test_a_state_that_is_loaded_begins_a_new_report(late) -> None:
    """The device may still write for the old state: the report of the new one names its own infinities alone."""
    model = make()
    call(model)
    saved = f8.delayed_state_dict(model)
    names: list[list[str]] = []
    for step, infinite in enumerate((0, None, 0, None)):
        if step in (1, 2):
            f8.load_delayed_state_dict(model, saved)
        names.append(told(model, infinite))
    assert names == [[], [], [], ["input of 0"]]


def test_layers_of_one_update_share_a_report_that_no_capture_allocates(reports, monkeypatch) -> None:
    model = make()
    sync(model)
    sync(model)
    assert len(reports) == 1 and report_of(buffers_of(model), torch.device("cpu")) in reports.values()
    reports.clear()
    known = report_of(buffers_of(model), CUDA)
    assert known is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert report_of(buffers_of(model), CUDA) is known
    others = buffers_of(model)[:1], buffers_of(copy.deepcopy(model))
    assert [report_of(other, CUDA) for other in others] == [None, None] and len(reports) == 1
    # Such an update counts, and leaves it to a later one to tell.
    with monkeypatch.context() as patch:
        patch.setattr(delayed_update, "report_of", lambda layers, device: None)
        assert told(model, 1) == []
    assert told(model) == ["input of 1"]


def test_the_tensors_of_a_state_keep_the_order_in_which_the_update_takes_them() -> None:
    buffers = DelayedBuffers(DELAYED, "meta")
    buffers.follow(torch.device("cpu"))
    for one in (buffers, buffers.to(torch.bfloat16), copy.deepcopy(buffers), pickle.loads(pickle.dumps(buffers))):
        assert tuple(name for name, _ in one.named_buffers()) == STATE


def test_a_warning_that_is_an_error_comes_after_the_update() -> None:
    """All layers are updated first, also those of another recipe, which has an update of its own."""
    other = dataclasses.replace(DELAYED, scale_rule=ScaleRule(power_of_two=True))
    model = nn.Sequential(make()[0], make(other)[0])
    with pytest.raises(RuntimeWarning, match="infinite or NaN"):
        call(model, 0)
    assert [buffers.amax_history[1, 0].item() > 0 for buffers in buffers_of(model)] == [True, True]
