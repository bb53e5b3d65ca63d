"""What every rank of tests/gpu/test_two_devices.py does: some steps of a private loop without noise."""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PrivacyEngine


def train(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    data, engine = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,))), PrivacyEngine(dp_seed=1)
    model, optimizer, criterion, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=DataLoader(data, batch_size=16),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=0.5,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    kind, path, rank = sys.argv[1], sys.argv[2], int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if "LOCAL_RANK" in os.environ:
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.save(train(device), f"{path}.{rank}")
    if dist.is_initialized():
        dist.destroy_process_group()
