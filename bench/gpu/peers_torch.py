"""Cross-entropy fused with its projection, through PyTorch, beside the peers that are here: one run on one GPU.

    ullage             ullage.torch.linear_cross_entropy as it comes: 512 MiB of workspace
    ullage_4GiB        with a budget in which the float32 gradient of the weight fits
    ullage_main_grad   the gradient of the weight added to a float32 weight.main_grad, which is not counted
    eager, compile     F.cross_entropy((hidden @ weight.T).float(), targets)
    liger, liger_f32   LigerFusedLinearCrossEntropyLoss(), and with accum_dtype=torch.float32
    cce, cce_exact     cut_cross_entropy.linear_cross_entropy, filtered as it comes, and exact

bf16, forward and backward. Times are medians of CUDA events; peers take turns, so that a slow moment is nobody's.
Memory is the most that is allocated over the inputs, so it holds both gradients. Errors are relative Frobenius norms
against float32 (no TF32). Rows: "flat", standard normal hidden states and weights of variance 1/d_model; "peaked",
each hidden state also points at its target's row of the weight, to a probability near a half, as a trained model's do.

Liger and CCE are found on the Python path, or in the checkouts that LIGER and CCE name.

usage: peers_torch.py [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

for checkout in (os.environ.get("LIGER", "") and os.environ["LIGER"] + "/src", os.environ.get("CCE", "")):
    if checkout:
        sys.path.append(checkout)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import ullage  # noqa: E402
from ullage.torch import check, linear_cross_entropy  # noqa: E402

SHAPES = [(2048, 4096, 151936), (8192, 1024, 151936), (8192, 4096, 128256)]
ROUNDS = 7
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T).float(), targets)


def peers() -> tuple[dict[str, Loss], dict[str, str]]:
    """Those that are here, and why the others are not."""
    found: dict[str, Loss] = {
        "ullage": linear_cross_entropy,
        "ullage_4GiB": lambda h, w, t: linear_cross_entropy(h, w, t, budget_bytes=4 << 30),
        "ullage_main_grad": linear_cross_entropy,
        "eager": plain,
        "compile": torch.compile(plain, dynamic=False),
    }
    missing = {}
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        rounded, wide = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        found["liger"] = lambda h, w, t: rounded(w, h, t)
        found["liger_f32"] = lambda h, w, t: wide(w, h, t)
    except ImportError as error:
        missing["liger"] = str(error)
    try:
        from cut_cross_entropy import linear_cross_entropy as cce

        found["cce"] = cce
        found["cce_exact"] = lambda h, w, t: cce(h, w, t, impl="cce_exact")
    except ImportError as error:
        missing["cce"] = str(error)
    return found, missing


def make(n_tok: int, d_model: int, vocab: int, peaked: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    weight = (torch.randn(vocab, d_model, device="cuda") * d_model**-0.5).bfloat16()
    hidden = torch.randn(n_tok, d_model, device="cuda")
    targets = torch.arange(n_tok, device="cuda") * 7919 % vocab
    if peaked:
        hidden += 12 * weight[targets].float()
    return hidden.bfloat16().requires_grad_(), weight.requires_grad_(), targets


def reference(hidden, weight, targets) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss and gradients in float32, a chunk of rows at a time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    wide_weight, n_tok = weight.detach().float(), len(targets)
    d_hidden = torch.empty(hidden.shape, device="cuda")
    d_weight = torch.zeros(weight.shape, device="cuda")
    loss = 0.0
    for begin in range(0, n_tok, 512):
        part = slice(begin, begin + 512)
        rows, labels = hidden.detach()[part].float(), targets[part, None]
        gradient = F.log_softmax(rows @ wide_weight.T, -1)
        loss -= gradient.gather(1, labels).double().sum().item() / n_tok
        gradient.exp_().scatter_add_(1, labels, torch.full(labels.shape, -1.0, device="cuda"))
        gradient /= n_tok
        d_hidden[part] = gradient @ wide_weight
        d_weight.addmm_(gradient.T, rows)
    return loss, d_hidden, d_weight


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """A piece at a time: the difference of two weights' gradients is large."""
    squares = [
        ((f.float() - w).double().square().sum(), w.double().square().sum())
        for f, w in zip(found.split(8192), wanted.split(8192))
    ]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt())


class Measured:
    """One peer at one shape."""

    def __init__(self, name: str, loss: Loss, inputs: tuple, wanted: tuple) -> None:
        self.name, self.loss, self.inputs, self.milliseconds = name, loss, inputs, []
        hidden, weight, _ = inputs
        if name == "ullage_main_grad":
            weight.main_grad = torch.zeros(weight.shape, device="cuda")
        found = self.step()
        d_weight = weight.main_grad if name == "ullage_main_grad" else weight.grad
        self.record = {
            "loss_error": abs(found.item() - wanted[0]) / wanted[0],
            "d_hidden_error": relative(hidden.grad, wanted[1]),
            "d_weight_error": relative(d_weight, wanted[2]),
        }
        self.forget()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        self.record["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
        self.forget()
        if name == "ullage_main_grad":
            del weight.main_grad

    def step(self) -> torch.Tensor:
        loss = self.loss(*self.inputs)
        loss.backward()
        return loss.detach()

    def forget(self) -> None:
        for tensor in self.inputs[:2]:
            tensor.grad = None

    def time(self) -> None:
        hidden, weight, _ = self.inputs
        if self.name == "ullage_main_grad":
            weight.main_grad = torch.zeros(weight.shape, device="cuda")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.step()
        end.record()
        end.synchronize()
        self.milliseconds.append(begin.elapsed_time(end))
        self.forget()
        if self.name == "ullage_main_grad":
            del weight.main_grad

    def finished(self) -> dict:
        times = sorted(self.milliseconds)
        return {"ms": round(times[len(times) // 2], 4), "least_ms": round(times[0], 4), **self.record}


def products(hidden, weight) -> float:
    """The three products alone, cuBLAS, bf16, chunks of 1024 rows: milliseconds."""
    n_tok, vocab = len(hidden), len(weight)
    h, w = hidden.detach(), weight.detach()
    logits = torch.randn(1024, vocab, device="cuda").bfloat16()
    d_hidden, d_weight = torch.empty_like(h), torch.zeros_like(w)
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for row in range(0, n_tok, 1024):
            torch.mm(h[row : row + 1024], w.T, out=logits)
            torch.mm(logits, w, out=d_hidden[row : row + 1024])
            d_weight.addmm_(logits.T, h[row : row + 1024])
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[ROUNDS // 2]


def measure(shape: tuple[int, int, int], peaked: bool, losses: dict[str, Loss]) -> dict:
    inputs = make(*shape, peaked)
    record = {**dict(zip(("n_tok", "d_model", "vocab"), shape)), "rows": "peaked" if peaked else "flat"}
    record["products_ms"] = round(products(*inputs[:2]), 4)
    wanted = reference(*inputs)
    record["peers"] = {}
    print(f"{' x '.join(map(str, shape))}, {record['rows']}: time, over the three products' {record['products_ms']} ms")
    running = []
    for name, loss in losses.items():
        try:
            running.append(Measured(name, loss, inputs, wanted))
        except (RuntimeError, ValueError) as error:  # out of memory, or refused: an answer too
            record["peers"][name] = {"error": f"{type(error).__name__}: {error}"[:200]}
            inputs[0].grad = inputs[1].grad = None
        torch.cuda.empty_cache()
    del wanted
    for turn in range(ROUNDS):
        for peer in running:
            if turn < 3 or min(peer.milliseconds) < 100:  # a slow one has said enough
                peer.time()
    check()
    for peer in running:
        record["peers"][peer.name] = peer.finished()
    for name, row in record["peers"].items():
        if "error" in row:
            print(f"  {name:<18} {row['error'][:110]}")
            continue
        errors = " ".join(f"{row[each]:.1e}" for each in ("loss_error", "d_hidden_error", "d_weight_error"))
        ratio = row["ms"] / record["products_ms"]
        print(f"  {name:<18} {row['ms']:8.2f} ms {ratio:6.2f} {row['peak_mib']:9.1f} MiB  errors {errors}", flush=True)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first shape alone")
    parser.add_argument("--output", type=Path, default=Path("h200_python.json"))
    options = parser.parse_args()
    losses, missing = peers()
    for name, why in missing.items():
        print(f"SKIPPED: {name}: {why}")
    result = {
        "benchmark": "bench/gpu/peers_torch.py",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ullage": ullage.version(),
        "missing": missing,
        "records": [],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES[:1] if options.quick else SHAPES:
        for peaked in (False, True):
            result["records"].append(measure(shape, peaked, losses))
            torch.cuda.empty_cache()
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
