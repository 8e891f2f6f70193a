"""Ctrl-C while a DeviceLoader is made: nothing stays open."""

from __future__ import annotations

from pathlib import Path

import torch
from appends import INTERRUPTS
from forked import in_process
from tensordict import TensorDict

import tdgpu

CONSTRUCTOR = (
    INTERRUPTS
    + """
class Near(Interrupt):
    "Where files are opened and closed; elsewhere an interrupt makes no difference."
    def trace(self, frame, event, argument):
        name = os.path.basename(frame.f_code.co_filename)
        if name not in NAMES or frame.f_code.co_name == "finalize":  # what it calls, it sees to
            return None
        return super().trace(frame, event, argument)

def descriptors():
    return len(os.listdir("/proc/self/fd"))

NAMES = {"files.py", "growing.py", "central.py", "signals.py"}
for path in sys.argv[1:]:
    tdgpu.DeviceLoader(path, 4)  # whatever Python opens for itself, it has opened
    before, at, leaks = descriptors(), 0, []
    while True:
        at += 1
        interrupt = Near(at)
        try:
            with interrupt:
                loader = tdgpu.DeviceLoader(path, 4)
        except KeyboardInterrupt:
            pass
        loader = None
        if descriptors() > before:
            leaks.append(interrupt.at)
            before = descriptors()
        if interrupt.at is None:
            break
    print(at > 40, leaks)
"""
)


def test_an_interrupt_while_it_is_made_leaves_no_file_open(tmp_path: Path) -> None:
    data = TensorDict({"a": torch.arange(6), "n": {"b": torch.arange(6)}}, [6])
    data.memmap(tmp_path / "save")
    tdgpu.save(data, tmp_path / "save.tdz")
    assert in_process(CONSTRUCTOR, tmp_path / "save", tmp_path / "save.tdz") == "True []\n" * 2
