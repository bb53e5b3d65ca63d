"""How much of a device's memory this process had in use at most, and how much it could have more.

On a GPU that is what torch's allocator has given out. On the CPU it is what Linux sees of the process, with the
interpreter and its libraries.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device, seen from one process.

    Attributes:
        highest: The most that the process had in use at one time.
        free: What would be left for it with ``highest`` in use.
    """

    highest: float
    free: float

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory:
        """Read it.

        Raises:
            ValueError: nobody says how much the device has.
        """
        try:
            return cls._of_process() if device.type == "cpu" else cls._of_allocator(device)
        except (AttributeError, OSError) as error:
            raise ValueError(
                f"memory_budget='auto' needs to know how much memory device '{device}' has to spare, which cannot be "
                f"read here ({error}): give memory_budget in bytes, 2e9 for two gigabytes, or leave it out."
            ) from error

    @classmethod
    def _of_allocator(cls, device: torch.device) -> DeviceMemory:
        allocator = torch.get_device_module(device)
        free, total = allocator.mem_get_info(device)
        reserved, highest = allocator.memory_reserved(device), allocator.max_memory_allocated(device)
        allowed = allocator.get_per_process_memory_fraction(device) * total - reserved
        return cls(highest, min(free, allowed) + reserved - highest)

    @classmethod
    def _of_process(cls) -> DeviceMemory:
        """What processes of one launch (torchrun, accelerate) have to spare is divided among them."""
        own = _sizes(PROC / "self" / "status")
        available = min(_sizes(PROC / "meminfo")["MemAvailable"], *_left_in_cgroups(), math.inf)
        processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
        return cls(own["VmHWM"], available / processes + own["VmRSS"] - own["VmHWM"])


def _sizes(file: Path) -> dict[str, int]:
    return {name: 1024 * int(kb) for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", file.read_text(), re.MULTILINE)}


def _left_in_cgroups() -> Iterator[int]:
    """What each limit of the process's control groups leaves, of version 1 and 2; files in the cache make room."""
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, limit, usage, cache = (
            (CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else (CGROUPS, "memory.max", "memory.current", "inactive_file")
        )
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / limit).exists():
                cached = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                if (most := (folder / limit).read_text().strip()).isdigit():
                    yield int(most) - int((folder / usage).read_text()) + (int(cached[1]) if cached else 0)
