"""Cross-entropy fused with its projection against PyTorch on the CPU: time and extra memory, forward and backward.

    eager, compile   F.cross_entropy(hidden @ weight.T, targets), eager and under torch.compile
    ullage           the plan's run into the caller's gradients, with the default budget
    ullage_tenth     the same, its budget a tenth of eager's extra memory
    ullage_torch     ullage.torch.linear_cross_entropy

Each is a process of its own; they take turns, so that a slow moment of the machine is nobody's. Time is the least of
the rounds. Extra memory is the peak of the process less its inputs and its gradients.

usage: peers_cpu.py [--rounds N] [--threads N] [--output FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHAPES = [
    ("f32", 256, 576, 49152),
    ("f32", 64, 4096, 32000),
    ("f64", 128, 576, 49152),
    ("f32", 512, 1024, 151936),
]
# What is measured -> how its process makes the loss. Eager comes first: a tenth of its memory is the other's budget.
PEERS = {
    "eager": "eager",
    "compile": "compile",
    "ullage": "ullage",
    "ullage_tenth": "ullage",
    "ullage_torch": "ullage_torch",
}
LIBC = ctypes.CDLL(None)
TINY = ("f32", 8, 64, 512)  # loads what a process loads once
# OpenMP's threads spin after a call, on the cores that the next process needs.
PAUSE_SECONDS = 0.06


def resident(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since the last reset."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


class Peer:
    """One way to the loss and its gradients, at one shape after another."""

    def __init__(self, name: str, n_threads: int) -> None:
        import torch
        import torch.nn.functional as F

        sys.path.insert(0, str(ROOT / "python"))
        torch.set_num_threads(n_threads)
        self.torch, self.name, self.n_threads = torch, name, n_threads

        def plain(hidden, weight, targets):
            return F.cross_entropy(hidden @ weight.T, targets)

        if name == "eager":
            self.loss = plain
        elif name == "compile":
            self.loss = torch.compile(plain, dynamic=False)
        elif name == "ullage_torch":
            from ullage.torch import linear_cross_entropy

            self.loss = linear_cross_entropy
        self.take(*TINY)
        self.run()

    def take(self, dtype: str, n_tok: int, d_model: int, vocab: int, budget_bytes: int = 0) -> dict:
        torch = self.torch
        torch.manual_seed(0)
        self.inputs = self.gradients = None
        kind = {"f32": torch.float32, "f64": torch.float64}[dtype]
        hidden = torch.randn(n_tok, d_model, dtype=kind)
        weight = torch.randn(vocab, d_model, dtype=kind).mul_(0.05)
        self.inputs = hidden, weight, torch.arange(n_tok) * 7919 % vocab
        LIBC.malloc_trim(0)  # what the last shape gave back would pass for memory that was there
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM falls to VmRSS
        self.before = resident("VmRSS")
        if self.name == "ullage":
            from ullage import plan_head

            self.plan = plan_head(
                [{"kind": "cross_entropy"}],
                n_tok=n_tok,
                d_model=d_model,
                vocab=vocab,
                dtype=dtype,
                gradients=("d_hidden", "d_weight"),
                budget_bytes=budget_bytes,
                n_threads=self.n_threads,
            )
            return {"mode": self.plan.mode, "chunk": self.plan.chunk, "workspace_bytes": self.plan.workspace_bytes}
        hidden.requires_grad_()
        weight.requires_grad_()
        return {}

    def forward_backward(self) -> tuple:
        """The loss, d_hidden, d_weight."""
        hidden, weight, targets = self.inputs
        if self.name == "ullage":
            gradients = self.torch.empty_like(hidden), self.torch.empty_like(weight)
            out = dict(zip(("d_hidden", "d_weight"), gradients))
            return self.plan.run(hidden=hidden, weight=weight, labels=targets, out=out).total, *gradients
        loss = self.loss(*self.inputs)
        loss.backward()
        return loss.item(), hidden.grad, weight.grad

    def run(self) -> dict:
        self.gradients = None
        if self.name != "ullage":
            for tensor in self.inputs[:2]:
                tensor.grad = None  # autograd gives its buffers away where there is none
        time.sleep(PAUSE_SECONDS)
        start = time.perf_counter()
        loss, *self.gradients = self.forward_backward()
        seconds = time.perf_counter() - start
        peak = resident("VmHWM") - self.before
        return {
            "seconds": seconds,
            "peak_bytes": peak,  # over the inputs
            "extra_bytes": peak - sum(gradient.nbytes for gradient in self.gradients),
            "values": [loss, *(gradient.norm().item() for gradient in self.gradients)],
        }


def serve(name: str, n_threads: int) -> None:
    """Answers one JSON line with another: [] runs, [dtype, n_tok, ...] takes a shape."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Peer(name, n_threads)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = peer.take(*arguments) if arguments else peer.run()
        except ValueError as error:  # UllageError: a budget that cannot be kept is an answer too
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


class Process:
    def __init__(self, name: str, n_threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--threads", str(n_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *arguments) -> dict:
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def agree(values: list[list[float]]) -> bool:
    """Loss and the norms of both gradients, to what f32 sums of this length may differ by."""
    return all(abs(a - b) <= 1e-4 * abs(b) for other in values[1:] for a, b in zip(other, values[0]))


def measure(shape: tuple, rounds: int, peers: dict[str, Process]) -> dict:
    row = dict(zip(("dtype", "n_tok", "d_model", "vocab"), shape))
    budget = {"ullage_tenth": 0}
    for name, peer in peers.items():
        row[name] = peer.ask(*shape, budget.get(name, 0))
        if "error" in row[name]:
            continue
        row[name].update(peer.ask())
        if name == "eager":
            row[name].update(peer.ask())  # the first run of a shape takes less than all that follow
            budget["ullage_tenth"] = row["tenth_bytes"] = row[name]["extra_bytes"] // 10
    ran = [name for name in peers if "error" not in row[name]]
    for _ in range(rounds):
        for name in ran:
            again = peers[name].ask()
            again["seconds"] = min(again["seconds"], row[name]["seconds"])
            row[name].update(again)
    row["agree"] = agree([row[name].pop("values") for name in ran])
    return row


def version() -> str:
    described = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout
    return described.strip() or "unknown"


def device() -> str:
    with open("/proc/cpuinfo") as lines:
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def describe(row: dict) -> str:
    cells = [f"{row['dtype']} {row['n_tok']}x{row['d_model']}x{row['vocab']}".ljust(22)]
    for name in PEERS:
        run = row[name]
        if "error" in run:
            cells.append("refused".rjust(24))
            continue
        ratio = row["eager"]["seconds"] / run["seconds"]
        cells.append(f"{run['seconds'] * 1e3:7.0f} {ratio:6.2f} {run['extra_bytes'] / 2**20:9.1f}")
    return " ".join(cells) + ("" if row["agree"] else "  THEY DISAGREE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/cpu_peers.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("ULLAGE_LIBRARY", str(ROOT / "build-bench/lib/libullage.so"))
    if options.serve:
        serve(options.serve, options.threads)
        return 0
    import torch

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        peers = {name: Process(process, options.threads) for name, process in PEERS.items()}
        print(f"forward + backward, {options.threads} threads: ms, eager's time over it, MiB over inputs and gradients")
        print(" " * 22, *(name.rjust(24) for name in PEERS))
        rows = []
        for shape in SHAPES:
            rows.append(measure(shape, options.rounds, peers))
            print(describe(rows[-1]), flush=True)
        for process in peers.values():
            process.close()
    result = {
        "device": device(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": version(),
        "torch": torch.__version__,
        "threads": options.threads,
        "rounds": options.rounds,
        "load_average": os.getloadavg()[1],  # above the threads: others had the machine too
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["agree"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
