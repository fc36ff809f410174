"""Losses from logits through PyTorch, forward and backward, beside the peers that are here: one run on one GPU.

    ullage      ullage.torch.cross_entropy and distillation
    eager       F.cross_entropy(logits.float(), targets), and F.kl_div of two log_softmax
                textbook: forward KL at temperature 2 times its square, and half a cross-entropy
    compile     the same, compiled
    liger       LigerCrossEntropyLoss, which writes the gradient over the logits; LigerKLDIVLoss, LigerJSD of log_softmax

bf16. The yardstick of a label loss is a copy of the logits, of a distillation the sum of logits and teacher, both by
PyTorch and in the same turns. Times are medians of CUDA events, peers in turns; matrix products run before each for some
three milliseconds, as in training, so that the host is ahead: host_ms is what a step takes of it. The logits require a
gradient, of every peer: without one, some skip it. Errors are relative Frobenius norms against a float64 softmax of the
same logits.

Liger is found on the Python path, or in the checkout that LIGER names.

usage: peers_logits.py [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

if os.environ.get("LIGER"):
    sys.path.append(os.path.join(os.environ["LIGER"], "src"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from record import save, started, timed  # noqa: E402
from ullage.torch import check, cross_entropy, distillation  # noqa: E402

SHAPES = [(8192, 151936), (16384, 32768), (65536, 8192), (262144, 1000), (262144, 256)]
ROUNDS = 7
DEVICE = "cuda"
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits, and of targets or a teacher's logits


def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(one | other), mean over rows."""
    return F.kl_div(
        F.log_softmax(other.float(), -1), F.log_softmax(one.float(), -1), reduction="batchmean", log_target=True
    )


@cache
def targets_of(n_tok: int, vocab: int) -> torch.Tensor:
    return torch.arange(n_tok, device=DEVICE) * 7919 % vocab


PLAIN: dict[str, Loss] = {
    "cross_entropy": lambda x, y: F.cross_entropy(x.float(), y),
    "forward_kl": lambda x, teacher: kl(teacher, x),
    "reverse_kl": kl,
    "textbook": lambda x, t: 4 * kl(t / 2, x / 2) + 0.5 * F.cross_entropy(x.float(), targets_of(*x.shape)),
}
TEMPERED = {"temperature": 2.0, "student_temperature": 2.0, "t_squared": True, "cross_entropy_weight": 0.5}
OURS: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    **{name: lambda x, t, name=name: distillation(x, t, divergence=name) for name in ("forward_kl", "reverse_kl")},
    "jensen_shannon": lambda x, t: distillation(x, t, divergence="jensen_shannon"),
    "textbook": lambda x, t: distillation(x, t, targets_of(*x.shape), **TEMPERED),
}


def peers() -> tuple[dict[str, dict[str, Loss]], dict[str, str]]:
    """By peer and loss, and why the others are not here."""
    found = {"ullage": OURS, "eager": PLAIN, "compile": {n: torch.compile(f, dynamic=False) for n, f in PLAIN.items()}}
    missing = {}
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss, LigerJSD, LigerKLDIVLoss

        entropy, divergence = LigerCrossEntropyLoss(), LigerKLDIVLoss(reduction="batchmean", log_target=True)
        mixture = LigerJSD(beta=0.5)
        logs = F.log_softmax
        found["liger"] = {
            "cross_entropy": entropy,
            "forward_kl": lambda x, t: divergence(logs(x.float(), -1), logs(t.float(), -1)),
            "jensen_shannon": lambda x, t: mixture(logs(x.float(), -1), logs(t.float(), -1)),
        }
    except Exception as error:  # whatever an import of theirs meets
        missing["liger"] = f"{type(error).__name__}: {error}"
    return found, missing


def gradient_of(name: str, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of the mean over these rows, in float64."""
    log_q = F.log_softmax(x.double(), -1)
    q = log_q.exp()
    if name == "cross_entropy":
        return q.scatter_add_(1, other[:, None], torch.full_like(q[:, :1], -1))
    if name == "textbook":
        warm = [F.softmax(z.double() / 2, -1) for z in (x, other)]
        hit = torch.ones_like(q[:, :1])
        return 2 * (warm[0] - warm[1]) + 0.5 * q.scatter_add_(1, targets_of(*x.shape)[:, None], -hit)
    log_p = F.log_softmax(other.double(), -1)
    if name == "forward_kl":
        return q - log_p.exp()
    against = log_p if name == "reverse_kl" else torch.logaddexp(log_p, log_q) - torch.log(q.new_tensor(2.0))
    ratio = log_q - against
    return (q * (ratio - (q * ratio).sum(-1, keepdim=True))) * (1.0 if name == "reverse_kl" else 0.5)


def relative(name: str, found: torch.Tensor, x: torch.Tensor, other: torch.Tensor, rows: int = 64) -> float:
    """The error of the first rows' gradient."""
    wanted = gradient_of(name, x[:rows], other[:rows]) / len(x)
    return float((found[:rows].double() - wanted).norm() / wanted.norm())


def median(times: list[float]) -> float:
    return round(sorted(times)[len(times) // 2], 4)


def measure(n_tok: int, vocab: int, name: str, losses: dict[str, Loss]) -> dict:
    torch.manual_seed(0)
    stored = 3 * torch.randn(n_tok, vocab, device=DEVICE, dtype=torch.bfloat16)
    labels = name == "cross_entropy"
    other = targets_of(n_tok, vocab) if labels else stored.roll(1, 0)
    into = torch.empty_like(stored)
    yardstick = (lambda: into.copy_(stored)) if labels else (lambda: torch.add(stored, other, out=into))
    record: dict = {"n_tok": n_tok, "vocab": vocab, "loss": name, "yardstick": "copy" if labels else "add", "peers": {}}
    # One that writes over its logits has its own.
    logits = stored.clone().requires_grad_()

    def step(loss: Loss) -> None:
        logits.grad = None
        loss(logits, other).backward()

    running: dict[str, list[tuple[float, float]]] = {}
    for peer, loss in losses.items():
        try:
            with torch.no_grad():
                logits.copy_(stored)
            step(loss)
            assert logits.grad is not None
            record["peers"][peer] = {"error": relative(name, logits.grad, stored, other)}
            running[peer] = []
        except Exception as error:  # out of memory, or whatever a peer's compiler meets: an answer too
            record["peers"][peer] = {"failed": f"{type(error).__name__}: {error}"[:200]}
        logits.grad = None
        torch.cuda.empty_cache()
    plain: list[float] = []
    for _ in range(ROUNDS):
        plain.append(timed(yardstick)[0])
        for peer, times in running.items():
            times.append(timed(lambda peer=peer: step(losses[peer])))
    check()
    record["yardstick_ms"] = median(plain)
    print(f"{n_tok} x {vocab}, {name}: time, over {record['yardstick']}'s {record['yardstick_ms']} ms")
    for peer, row in record["peers"].items():
        if peer in running:
            row["ms"], row["host_ms"] = (median(list(times)) for times in zip(*running[peer]))
            print(f"  {peer:<8} {row['ms']:8.3f} ms {row['ms'] / record['yardstick_ms']:6.2f}  error {row['error']:.1e}")
        else:
            print(f"  {peer:<8} {row['failed'][:110]}")
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first shape alone")
    parser.add_argument("--output", type=Path, default=Path("h200_logits_python.json"))
    options = parser.parse_args()
    found, missing = peers()
    result = started("bench/gpu/peers_logits.py", missing)
    failed = False
    for n_tok, vocab in SHAPES[:1] if options.quick else SHAPES:
        for name in OURS:
            record = measure(n_tok, vocab, name, {peer: losses[name] for peer, losses in found.items() if name in losses})
            result["records"].append(record)
            torch.cuda.empty_cache()
            save(result, options.output)
            failed |= "failed" in record["peers"]["ullage"]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
