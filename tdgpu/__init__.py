"""tdgpu: tensordict's memory-mapped saves, to the GPU and back, at the speed of the disk and the link.

>>> import tdgpu
>>> from tensordict import TensorDict
>>> import tempfile, torch
>>> with tempfile.TemporaryDirectory() as path:
...     _ = TensorDict(a=torch.arange(3)).memmap(path)
...     print(tdgpu.load_memmap(path, device="cpu")["a"].tolist())
[0, 1, 2]
"""

from tdgpu.append.appender import MemmapAppender
from tdgpu.append.once import append_memmap, recover_memmap
from tdgpu.archives.packing import pack_memmap, save
from tdgpu.archives.unpacking import unpack_memmap
from tdgpu.archives.verifying import verify_memmap
from tdgpu.cache.explain import Explanation, explain
from tdgpu.cache.fingerprint import fingerprint
from tdgpu.cache.hasher import FingerprintWarning, Hasher
from tdgpu.cache.locks import CacheWarning
from tdgpu.cache.switch import disable_caching, enable_caching, is_caching_enabled
from tdgpu.data.dataset import MemmapDataset
from tdgpu.data.iterable import IterableMemmapDataset
from tdgpu.data.loader import DeviceLoader
from tdgpu.data.orders import PermutationSampler, WeightedSampler
from tdgpu.data.progress import progress
from tdgpu.data.stats import LoaderStats
from tdgpu.errors import TdgpuError, TransformError
from tdgpu.growing import MemmapReader
from tdgpu.layout.commit import RecoveryReport
from tdgpu.load import load_memmap
from tdgpu.options import options
from tdgpu.transfer import LoadFuture, LoadProgress, synchronize

__version__ = "0.1.0"

__all__ = [
    "CacheWarning",
    "DeviceLoader",
    "Explanation",
    "FingerprintWarning",
    "Hasher",
    "IterableMemmapDataset",
    "LoadFuture",
    "LoadProgress",
    "LoaderStats",
    "MemmapAppender",
    "MemmapDataset",
    "MemmapReader",
    "PermutationSampler",
    "RecoveryReport",
    "TdgpuError",
    "TransformError",
    "WeightedSampler",
    "__version__",
    "append_memmap",
    "disable_caching",
    "enable_caching",
    "explain",
    "fingerprint",
    "is_caching_enabled",
    "load_memmap",
    "options",
    "pack_memmap",
    "progress",
    "recover_memmap",
    "save",
    "synchronize",
    "unpack_memmap",
    "verify_memmap",
]
