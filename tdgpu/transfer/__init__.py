"""How bytes move: from leaves to chunks, through the ring, to the device.

plan       leaves -> destinations and chunks
native     the ctypes face of the core (csrc/)
engine     a device with a driver table: ring, gated copy stream
generic    other accelerators, through torch alone
registry   which device is served how; start, synchronize, fork, exit
watcher    failures of loads that nobody waits for
future     what the caller holds
"""

from tdgpu.transfer.base import Transfer
from tdgpu.transfer.diagnose import diagnose
from tdgpu.transfer.future import LoadFuture, LoadProgress
from tdgpu.transfer.registry import register_driver, start, synchronize

__all__ = ["LoadFuture", "LoadProgress", "Transfer", "diagnose", "register_driver", "start", "synchronize"]
