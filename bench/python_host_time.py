"""What the losses cost the host: microseconds of forward and backward where the arithmetic is next to nothing.

Ours beside PyTorch's own operations for the same, in one process and in turns, both eager and under torch.compile. On
CUDA nothing waits for the device between the calls of a round, so it is the host's time there too, as long as the
device keeps up. The least of the rounds.

usage: python_host_time.py [--device cuda] [--eager] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from peers_cpu import version
from ullage.torch import cross_entropy, grpo_loss, linear_cross_entropy, token_logprobs

SHAPES = {"cpu": (8, 16, 64), "cuda": (64, 64, 512)}  # tokens, d_model, vocab
SEQUENCES = 2
ROUNDS, CALLS = 30, 100
Loss = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def torch_logprobs(t: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = t["hidden"] @ t["weight"].T
    return F.log_softmax(logits.float(), -1).gather(1, t["targets"][:, None])[:, 0]


def torch_grpo(t: dict[str, torch.Tensor]) -> torch.Tensor:
    ratio = (torch_logprobs(t).view(SEQUENCES, -1) - t["old"]).exp()
    advantages = t["advantages"][:, None]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def ours_grpo(t: dict[str, torch.Tensor]) -> torch.Tensor:
    shaped = (t["hidden"].view(SEQUENCES, -1, t["hidden"].shape[1]), t["weight"], t["targets"].view(SEQUENCES, -1))
    return grpo_loss(*shaped, t["advantages"], t["old"])


# Name -> ours, PyTorch's.
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "cross_entropy": (
        lambda t: cross_entropy(t["logits"], t["targets"]),
        lambda t: F.cross_entropy(t["logits"].float(), t["targets"]),
    ),
    "linear_cross_entropy": (
        lambda t: linear_cross_entropy(t["hidden"], t["weight"], t["targets"]),
        lambda t: F.cross_entropy((t["hidden"] @ t["weight"].T).float(), t["targets"]),
    ),
    "linear_cross_entropy, per token": (
        lambda t: linear_cross_entropy(t["hidden"], t["weight"], t["targets"], reduction="none").sum(),
        lambda t: F.cross_entropy((t["hidden"] @ t["weight"].T).float(), t["targets"], reduction="none").sum(),
    ),
    "token_logprobs": (
        lambda t: token_logprobs(t["hidden"], t["weight"], t["targets"]).sum(),
        lambda t: torch_logprobs(t).sum(),
    ),
    "grpo_loss": (ours_grpo, torch_grpo),
}


def make(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    n_tok, d_model, vocab = SHAPES[device]
    wide = {"hidden": (n_tok, d_model), "weight": (vocab, d_model), "logits": (n_tok, vocab)}
    return {
        **{name: torch.randn(s, device=device, dtype=dtype, requires_grad=True) for name, s in wide.items()},
        "targets": torch.randint(0, vocab, (n_tok,), device=device),
        "advantages": torch.randn(SEQUENCES, device=device),
        "old": torch.randn(SEQUENCES, n_tok // SEQUENCES, device=device) - 4,
    }


def microseconds(losses: list[Loss], inputs: dict[str, torch.Tensor]) -> list[float]:
    """Of each, in turns."""
    leaves = [t for t in inputs.values() if t.requires_grad]

    def step(loss: Loss) -> None:
        for leaf in leaves:
            leaf.grad = None
        loss(inputs).backward()

    for loss in losses:
        for _ in range(CALLS):
            step(loss)
    least = [float("inf")] * len(losses)
    for _ in range(ROUNDS):
        for i, loss in enumerate(losses):
            if leaves[0].is_cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                step(loss)
            least[i] = min(least[i], time.perf_counter() - begin)
    return [round(seconds / CALLS * 1e6, 1) for seconds in least]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--eager", action="store_true", help="not under torch.compile")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs = make(options.device)
    if options.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        from peers_cpu import device as processor

        device = processor()
    records = []
    print(
        f"{'forward + backward, us':<34}{'ours':>8}{'torch':>8}{'ratio':>7}{'compiled: ours':>17}{'torch':>8}{'ratio':>7}"
    )
    for name, losses in LOSSES.items():
        torch.compiler.reset()
        each = list(losses) + ([] if options.eager else [torch.compile(loss, dynamic=False) for loss in losses])
        measured = microseconds(each, inputs)
        pairs = [measured[i : i + 2] for i in range(0, len(measured), 2)]
        keys = (("us", "torch_us"), ("compiled_us", "torch_compiled_us"))
        records.append({"loss": name, **{k: v for names, pair in zip(keys, pairs) for k, v in zip(names, pair)}})
        columns = [
            f"{ours:>{width}.0f}{theirs:>8.0f}{ours / theirs:>7.2f}" for width, (ours, theirs) in zip((8, 17), pairs)
        ]
        print(f"{name:<34}{''.join(columns)}", flush=True)
    record = {
        "benchmark": "bench/python_host_time.py",
        "device": device,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": version(),
        "torch": torch.__version__,
        "shape": SHAPES[options.device],
        "load_average": os.getloadavg()[0],  # above 1, others had the machine too
    }
    if options.output:
        head = json.dumps(record, indent=1)[: -len("\n}")]
        lines = ",\n".join(f"  {json.dumps(each)}" for each in records)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(f'{head},\n "records": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
