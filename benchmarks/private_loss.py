"""The loss that a training may log, beside the one without noise: a picture of one small training.

    python -m benchmarks.private_loss

A network of two layers learns made-up points of ten classes, which are nobody's, so both losses may be shown. The
picture is docs/loss.png (extra ``report``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from dp_transformers import PrivacyEngine

PICTURE = Path(__file__).parents[1] / "docs" / "loss.png"
EXAMPLES, CLASSES, WIDTH, BATCH, DELTA, AVERAGED = 20_000, 10, 32, 1024, 1e-6, 10


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--epochs", type=float, default=10.0)
    p.add_argument("--epsilon", type=float, default=8.0)
    p.add_argument("--picture", type=Path, default=PICTURE)
    args = p.parse_args(argv)
    private, raw, said = train(args.epochs, args.epsilon)
    off = [a - b for a, b in zip(private, raw, strict=True)]
    print(f"{said}; {len(raw)} steps, root mean square of what the noise adds: "
          f"{math.sqrt(sum(x * x for x in off) / len(off)):.3f}")  # fmt: skip
    draw(private, raw, said, args.picture)


def train(epochs: float, epsilon: float) -> tuple[list[float], list[float], str]:
    """The private and the raw loss of each step, and what was spent for how much noise."""
    torch.manual_seed(0)
    centers, classes = torch.randn(CLASSES, WIDTH), torch.randint(CLASSES, (EXAMPLES,))
    rows = list(zip(centers[classes] + 1.5 * torch.randn(EXAMPLES, WIDTH), classes, strict=True))
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(rows, BATCH),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        loss_reduction="none",
        loss_bound=4 + math.log(CLASSES),
    )
    private, raw = [], []
    while len(raw) < engine.privacy_spent().mechanism.steps:
        for x, y in loader:
            losses = F.cross_entropy(model(x), y, reduction="none")
            engine.backward(losses)
            optimizer.step()
            private.append(engine.private_loss)
            raw.append(float(losses.detach().mean()))
            if len(raw) == engine.privacy_spent().mechanism.steps:
                break
    spent = engine.privacy_spent()
    return private, raw, f"ε = {spent.epsilon:.3g} at δ = {DELTA:g}, σ = {spent.noise_multiplier:.3f}"


def draw(private: Sequence[float], raw: Sequence[float], said: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), dpi=150, layout="constrained")
    axes, steps = figure.subplots(), range(1, len(raw) + 1)
    averages = [sum(private[k : k + AVERAGED]) / AVERAGED for k in range(0, len(private) - AVERAGED + 1, AVERAGED)]
    axes.plot(steps, private, ".", color="#e65100", markersize=3, alpha=0.5, label="private, each step")
    axes.plot(
        [AVERAGED * (k + 0.5) for k in range(len(averages))], averages, color="#e65100",
        label=f"private, logged every {AVERAGED} steps",
    )  # fmt: skip
    axes.plot(steps, raw, color="#303f9f", linewidth=1, label="without noise (not private)")
    axes.set(xlabel="step", ylabel="loss", title=said, ylim=(0, None))
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
