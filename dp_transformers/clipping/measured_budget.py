"""The memory budget measured on the device: ``memory_budget="auto"``.

The budget is 0 at first, while passes are observed, from the second step on, when the optimizer has its state. Once
most passes of some steps are no larger than earlier ones, the peak memory of the process is known. The budget is then
:data:`SHARE` of the free memory of the device, and at most :data:`PART` of the peak.

From then on it is constant, and ranks agree on the smallest. A pass that is larger than all observed ones has no
budget, since its peak is not known.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from .memory import MemoryBudget
from .recorded_call import ForwardPass
from .trainable import TrainableParameters

SHARE, PART = 0.5, 0.25
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass
class MeasuredBudget(MemoryBudget):
    """A budget of 0 bytes until :meth:`settle` is called."""

    limit: float = 0.0
    is_settled: bool = False
    _trainable: TrainableParameters = field(init=False)
    _largest: tuple[float, ...] = (0.0, 0.0)  # of the passes that were observed
    _balance: int = 0  # since the last offer: passes within earlier ones, minus passes that were not

    def refuse(self, mode: str, trainable: TrainableParameters) -> None:
        """Raise ValueError as any budget does, or if the memory of the device cannot be read."""
        super().refuse(mode, trainable)
        self._trainable = trainable
        DeviceMemory.of(trainable.device)

    def limit_of(self, forward: ForwardPass) -> float:
        """Return how many bytes this pass may keep until its clipped sums are formed; 0 if it is larger than any
        before. Its size is then recorded, unless the limit is settled.

        Memory grows with the numbers that modules return, and under attention with their square for each example.
        """
        returned = sum(forward.returned.values())
        size = returned, returned**2 / max(1, forward.batch_size)
        if all(now <= largest for now, largest in zip(size, self._largest, strict=True)):
            self._balance += 1
            return self.limit
        if not self.is_settled:
            self._largest = tuple(map(max, size, self._largest))
            self._balance -= 1
        return 0.0

    def forget(self) -> None:
        """Drop the observed passes, because later ones will run with more memory in use."""
        self._largest, self._balance = (0.0, 0.0), 0

    def offer(self) -> int:
        """Return the bytes that this process can spare, after a step; -1 while most passes are larger than before."""
        balance, self._balance = self._balance, 0
        if balance <= 0:
            return -1
        memory = DeviceMemory.of(self._trainable.device)
        return max(0, int(min(SHARE * memory.free, PART * memory.highest)))

    def settle(self, limit: float) -> None:
        """Let passes within the observed sizes keep ``limit`` bytes from now on."""
        self.limit, self.is_settled = limit, True


def memory_budget_of(given: float | str | None) -> MemoryBudget | None:
    """Return the budget for a number of bytes, "auto" or None. Raise ValueError for anything else."""
    if given is None:
        return None
    return MeasuredBudget() if given == "auto" else MemoryBudget(cast(float, given))


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
