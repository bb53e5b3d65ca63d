"""The peak memory of this process on a device, and the memory that it could still use.

On a GPU it is counted by torch's allocator. On the CPU it is counted by Linux for the whole process.
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
        highest: Peak memory of the process.
        free: Memory that would be left with ``highest`` in use.
    """

    highest: float
    free: float

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory:
        """Read the memory of a device.

        Raises:
            ValueError: it cannot be read here.
        """
        try:
            return cls._of_process() if device.type == "cpu" else cls._of_allocator(device)
        except (AttributeError, OSError) as error:
            raise ValueError(
                f"memory_budget='auto' needs the free memory of device '{device}', which cannot be read here "
                f"({error}): give memory_budget in bytes, 2e9 for two gigabytes, or leave it out."
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
        """Read the memory of the process. Processes of one launch (torchrun, accelerate) share the free memory."""
        own = _sizes(PROC / "self" / "status")
        available = min(_sizes(PROC / "meminfo")["MemAvailable"], *_left_in_cgroups(), math.inf)
        processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
        return cls(own["VmHWM"], available / processes + own["VmRSS"] - own["VmHWM"])


def _sizes(file: Path) -> dict[str, int]:
    return {name: 1024 * int(kb) for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", file.read_text(), re.MULTILINE)}


def _left_in_cgroups() -> Iterator[int]:
    """Yield the bytes left under each limit of the process's control groups, version 1 and 2. Cached files count as
    free."""
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
