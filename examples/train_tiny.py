"""Trains one small language model twice on the shipped text, with torch's loss and with Ullage's: the same curve, and
what the loss needs in memory beside it.

usage: train_tiny.py [--steps N] [--vocab N] [--png FILE]
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import resource
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import nn

from ullage.torch import linear_cross_entropy

TEXT = pathlib.Path(__file__).parent / "text" / "pride_and_prejudice.txt"
WIDTH, LENGTH, BATCH = 96, 64, 16


def words(vocab: int) -> torch.Tensor:
    """The text as ids of its most frequent words; all others share id 0."""
    tokens = re.findall(r"\w+|[^\w\s]", TEXT.read_text().lower())
    ids = {word: i for i, (word, _) in enumerate(collections.Counter(tokens).most_common(vocab - 1), start=1)}
    return torch.tensor([ids.get(token, 0) for token in tokens])


class Model(nn.Module):
    """Each position sees the mean of the four words before it, and an MLP: enough to learn something in seconds."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.mix = nn.Sequential(nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.pad(self.embedding(ids), (0, 0, 3, 0))
        return self.mix(torch.cat([x[:, i : i + ids.shape[1]] for i in range(4)], -1))


def torch_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())


def ullage_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, targets, budget_bytes=4 << 20)


LOSSES = {"torch": torch_loss, "ullage": ullage_loss}


def train(name: str, vocab: int, steps: int) -> tuple[list[float], float]:
    """The curve, and the MiB by which the process grew over the steps."""
    torch.manual_seed(0)
    text, model = words(vocab), Model(vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    before, curve = peak_mib(), []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
        batch = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()])
        loss = LOSSES[name](model(batch[:, :-1]), model.head.weight, batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve, peak_mib() - before


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--png", type=pathlib.Path, default=None)
    parser.add_argument("--only", choices=LOSSES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:  # a process of its own: a peak is never given back
        curve, mib = train(options.only, options.vocab, options.steps)
        print(mib, *curve)
        return
    found = {}
    for name in LOSSES:
        command = [sys.executable, __file__, "--only", name, f"--steps={options.steps}", f"--vocab={options.vocab}"]
        mib, *curve = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
        found[name] = (curve, mib)
        print(f"{name:>8}  loss {curve[0]:.4f} -> {curve[-1]:.4f}   training took {mib:,.0f} MiB more at its peak")
    apart = max(abs(a - b) for a, b in zip(found["torch"][0], found["ullage"][0]))
    print(f"the curves are {apart:.1e} apart at most")
    if options.png:
        plot(found, options.png)


def plot(found: dict[str, tuple[list[float], float]], path: pathlib.Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), width_ratios=(3, 1), layout="constrained")
    for (name, (curve, _)), style in zip(found.items(), ({"lw": 4, "alpha": 0.4}, {"lw": 1.2})):
        left.plot(curve, label=name, **style)
    left.set(xlabel="step", ylabel="loss, nats a token")
    left.legend(frameon=False)
    right.bar(list(found), [mib for _, mib in found.values()], color=["C0", "C1"])
    right.set(ylabel="MiB over the untrained model")
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
