"""Cross-entropy fused with its projection against PyTorch on the CPU: time and extra memory, forward and backward.

    F.cross_entropy(hidden @ weight.T, targets)      eager, and under torch.compile
    linear_cross_entropy(hidden, weight, targets)    with the default budget, and with a tenth of eager's extra memory

Each is a process of its own; they take turns, so that a slow moment of the machine is nobody's. Time is the least of
the rounds. Extra memory is the peak of the process less its inputs and its gradients.

usage: peers_cpu.py [--rounds N] [--threads N] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHAPES = [
    ("f32", 256, 576, 49152),
    ("f32", 512, 1024, 151936),
    ("f32", 64, 4096, 32000),
    ("f64", 128, 576, 49152),
]
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

        self.torch = torch
        torch.set_num_threads(n_threads)

        def plain(hidden, weight, targets):
            return F.cross_entropy(hidden @ weight.T, targets)

        if name == "ullage":
            sys.path.insert(0, str(ROOT / "python"))
            from ullage.torch import linear_cross_entropy

            self.loss = lambda *inputs: linear_cross_entropy(*inputs, budget_bytes=self.budget_bytes)
        else:
            self.loss = torch.compile(plain, dynamic=False) if name == "compile" else plain
        self.budget_bytes = None
        self.take(*TINY)
        self.run()

    def take(self, dtype: str, n_tok: int, d_model: int, vocab: int, budget_bytes: int | None = None) -> dict:
        torch = self.torch
        torch.manual_seed(0)
        self.inputs = None
        kind = {"f32": torch.float32, "f64": torch.float64}[dtype]
        hidden = torch.randn(n_tok, d_model, dtype=kind).requires_grad_()
        weight = torch.randn(vocab, d_model, dtype=kind).mul_(0.05).requires_grad_()
        self.inputs = hidden, weight, torch.arange(n_tok) * 7919 % vocab
        self.budget_bytes = budget_bytes
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM falls to VmRSS
        self.before = resident("VmRSS")
        return {}

    def run(self) -> dict:
        hidden, weight, _ = self.inputs
        hidden.grad = weight.grad = None  # autograd gives its buffers away where there is none
        time.sleep(PAUSE_SECONDS)
        start = time.perf_counter()
        loss = self.loss(*self.inputs)
        loss.backward()
        seconds = time.perf_counter() - start
        peak = resident("VmHWM") - self.before
        return {
            "seconds": seconds,
            "peak_bytes": peak,  # over the inputs
            "extra_bytes": peak - hidden.grad.nbytes - weight.grad.nbytes,
            "values": [loss.item(), hidden.grad.norm().item(), weight.grad.norm().item()],  # in place
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
    first = {}
    for name in ("eager", "compile", "ullage"):
        peers[name].ask(*shape)
        first[name] = peers[name].ask()
    tenth = first["eager"]["extra_bytes"] // 10
    peers["ullage_tenth"].ask(*shape, tenth)
    first["ullage_tenth"] = peers["ullage_tenth"].ask()
    row = {"dtype": shape[0], "n_tok": shape[1], "d_model": shape[2], "vocab": shape[3], "tenth_bytes": tenth}
    runs = {name: [] for name, answer in first.items() if "error" not in answer}
    for _ in range(rounds):
        for name in runs:
            runs[name].append(peers[name].ask())
    for name, answer in first.items():
        if name in runs:
            row[name] = {
                "seconds": min(run["seconds"] for run in runs[name]),
                "peak_bytes": runs[name][-1]["peak_bytes"],
                "extra_bytes": runs[name][-1]["extra_bytes"],
            }
        else:
            row[name] = answer
    row["agree"] = agree([runs[name][0]["values"] for name in runs])
    return row


def version() -> str:
    described = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout
    return described.strip() or "unknown"


def device() -> str:
    with open("/proc/cpuinfo") as lines:
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores"


def describe(row: dict) -> str:
    shape = f"{row['dtype']} {row['n_tok']}x{row['d_model']}x{row['vocab']}"
    cells = [f"{shape:22}"]
    for name in ("ullage", "ullage_tenth", "compile", "eager"):
        if "error" in row[name]:
            cells.append(f"{'refused':>24}")
            continue
        ratio = row["eager"]["seconds"] / row[name]["seconds"]
        cells.append(
            f"{row[name]['seconds'] * 1e3:8.1f} {ratio:5.2f}x {row[name]['extra_bytes'] / 2**20:8.1f}"
        )
    return " ".join(cells) + ("" if row["agree"] else "  DISAGREE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "bench/results/cpu_peers.json")
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
        peers = {
            "eager": Process("eager", options.threads),
            "compile": Process("compile", options.threads),
            "ullage": Process("ullage", options.threads),
            "ullage_tenth": Process("ullage", options.threads),
        }
        columns = "".join(f"{name:>25}" for name in ("ullage", "in a tenth", "torch.compile", "torch eager"))
        print(f"forward + backward, {options.threads} threads\n{'':22}{columns}\n{'':22}{'ms  eager/    MiB':>25}" + f"{'ms  eager/    MiB':>25}" * 3)
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
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["agree"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
