"""Cross-entropy fused with its projection, through PyTorch, beside the peers that are here: one run on one GPU.

    ullage             ullage.torch.linear_cross_entropy as it comes
    ullage_512MiB      in that much workspace: with more rows than d_model, strips that make the logits twice
    ullage_main_grad   the gradient of the weight added to a float32 weight.main_grad, which is not counted
    ullage_filter      with filter_tolerance=1e-2, and what filter_reports says of it; where rows point at their target
    eager, compile     F.cross_entropy((hidden @ weight.T).float(), targets)
    liger, liger_f32   LigerFusedLinearCrossEntropyLoss(), and with accum_dtype=torch.float32
    cce, cce_exact     cut_cross_entropy.linear_cross_entropy, filtered as it comes, and exact
    quack              quack's chunked_linear_cross_entropy, untuned: its autotuner takes minutes a shape

bf16, forward and backward. Times are medians of CUDA events; peers take turns, so that a slow moment is nobody's, and
so do the three products alone, by cuBLAS in chunks of 1024 rows. Matrix products run before each for some three
milliseconds, as in training: the host is ahead, and the card as hot as its power limit lets it be. host_ms is what a
peer's calls took on the host.

Memory is the most that is allocated over the inputs, so it holds both gradients. Errors are relative Frobenius norms
against float32 products (no TF32) and a float64 softmax. Rows: "flat", standard normal hidden states and weights of
variance 1/d_model; "peaked", each hidden state also points at its target's row of the weight, to a probability near a
half, as a trained model's do; "sure", twice as much, to one less 1e-5.

Liger, CCE and QuACK are found on the Python path, or in the checkouts that LIGER, CCE and QUACK name.

usage: peers_torch.py [--quick] [--only PEER,...] [--rows KIND,...] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

for variable, folder in (("LIGER", "src"), ("CCE", "."), ("QUACK", ".")):
    if os.environ.get(variable):
        sys.path.append(os.path.join(os.environ[variable], folder))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from record import save, started, timed  # noqa: E402
from ullage.torch import check, filter_reports, linear_cross_entropy  # noqa: E402

SHAPES = [(2048, 4096, 151936), (8192, 1024, 151936), (8192, 4096, 128256)]
ROUNDS = 7
POINTS = {"flat": 0, "peaked": 12, "sure": 24}  # logit of the target, about
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T).float(), targets)


def peers() -> tuple[dict[str, Loss], dict[str, str]]:
    """Those that are here, and why the others are not."""
    found: dict[str, Loss] = {
        "ullage": linear_cross_entropy,
        "ullage_512MiB": lambda h, w, t: linear_cross_entropy(h, w, t, budget_bytes=512 << 20),
        "ullage_main_grad": linear_cross_entropy,
        "ullage_filter": lambda h, w, t: linear_cross_entropy(h, w, t, filter_tolerance=1e-2),
        "eager": plain,
        "compile": torch.compile(plain, dynamic=False),
    }
    missing = {}
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        rounded, wide = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        found["liger"] = lambda h, w, t: rounded(w, h, t)
        found["liger_f32"] = lambda h, w, t: wide(w, h, t)
    except Exception as error:  # whatever an import of theirs meets
        missing["liger"] = f"{type(error).__name__}: {error}"
    try:
        from cut_cross_entropy import linear_cross_entropy as cce

        found["cce"] = cce
        found["cce_exact"] = lambda h, w, t: cce(h, w, t, impl="cce_exact")
    except Exception as error:
        missing["cce"] = f"{type(error).__name__}: {error}"
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        found["quack"] = lambda h, w, t: chunked_linear_cross_entropy(h, w, t, tuned=False)
    except Exception as error:
        missing["quack"] = f"{type(error).__name__}: {error}"
    return found, missing


def make(n_tok: int, d_model: int, vocab: int, point: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    weight = (torch.randn(vocab, d_model, device="cuda") * d_model**-0.5).bfloat16()
    hidden = torch.randn(n_tok, d_model, device="cuda")
    targets = torch.arange(n_tok, device="cuda") * 7919 % vocab
    if point:
        hidden += point * weight[targets].float()
    return hidden.bfloat16().requires_grad_(), weight.requires_grad_(), targets


def reference(hidden, weight, targets) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss and gradients, a chunk of rows at a time: products in float32, and the softmax in float64, for where a
    probability is near 1 the gradient of its logit and its loss are what it lacks of it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    wide_weight, n_tok = weight.detach().float(), len(targets)
    d_hidden = torch.empty(hidden.shape, device="cuda")
    d_weight = torch.zeros(weight.shape, device="cuda")
    loss = 0.0
    for begin in range(0, n_tok, 512):
        part = slice(begin, begin + 512)
        rows, labels = hidden.detach()[part].float(), targets[part, None]
        log_softmax = F.log_softmax((rows @ wide_weight.T).double(), -1)
        of_labels = log_softmax.gather(1, labels)
        loss -= of_labels.sum().item() / n_tok
        gradient = log_softmax.exp_().scatter_(1, labels, of_labels.expm1()).div_(n_tok).float()
        del log_softmax
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
        self.name, self.loss, self.inputs = name, loss, inputs
        self.milliseconds: list[float] = []
        self.host_ms: list[float] = []
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
        if name == "ullage_filter":
            with filter_reports() as reports:
                self.step()
            self.record |= {
                "kept": reports[0].kept,
                "largest_share": reports[0].largest_share,
                # Of the gradients themselves, as the errors are; the bounds are absolute.
                "d_hidden_bound": reports[0].d_hidden_bound(weight),
                "d_weight_bound": reports[0].d_weight_bound(hidden),
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
        milliseconds, host_ms = timed(self.step)
        self.milliseconds.append(milliseconds)
        self.host_ms.append(host_ms)
        self.forget()
        if self.name == "ullage_main_grad":
            del weight.main_grad

    def finished(self) -> dict:
        times = sorted(self.milliseconds)
        host = sorted(self.host_ms)[len(times) // 2]
        return {
            "ms": round(times[len(times) // 2], 4),
            "least_ms": round(times[0], 4),
            "host_ms": round(host, 4),
            **self.record,
        }


class Products:
    """The three products alone, cuBLAS, bf16, chunks of 1024 rows."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self.hidden, self.weight = hidden.detach(), weight.detach()
        self.milliseconds: list[float] = []
        self.step()

    def step(self) -> None:
        h, w = self.hidden, self.weight
        logits = torch.empty(1024, len(w), device="cuda", dtype=torch.bfloat16)
        d_hidden, d_weight = torch.empty_like(h), torch.empty_like(w)
        for row in range(0, len(h), 1024):
            part = slice(row, row + 1024)
            torch.mm(h[part], w.T, out=logits)
            torch.mm(logits, w, out=d_hidden[part])
            torch.addmm(d_weight, logits.T, h[part], beta=float(row > 0), out=d_weight)

    def time(self) -> None:
        self.milliseconds.append(timed(self.step)[0])

    def finished(self) -> float:
        return round(sorted(self.milliseconds)[len(self.milliseconds) // 2], 4)


def measure(shape: tuple[int, int, int], rows: str, losses: dict[str, Loss]) -> dict:
    inputs = make(*shape, POINTS[rows])
    record = {**dict(zip(("n_tok", "d_model", "vocab"), shape)), "rows": rows}
    record["products_ms"] = 0.0
    wanted = reference(*inputs)
    record["peers"] = {}
    running = []
    for name, loss in losses.items():
        if name == "ullage_filter" and rows == "flat":
            continue
        begin = time.monotonic()
        try:
            running.append(Measured(name, loss, inputs, wanted))
        except Exception as error:  # out of memory, refused, or whatever a peer's compiler meets: an answer too
            record["peers"][name] = {"error": f"{type(error).__name__}: {error}"[:200]}
            inputs[0].grad = inputs[1].grad = None
            for made in ("main_grad", "grad_added_to_main_grad"):
                inputs[1].__dict__.pop(made, None)
        torch.cuda.empty_cache()
        if time.monotonic() - begin > 5:
            print(f"  ({name}: {time.monotonic() - begin:.0f} s to compile)", flush=True)
    del wanted
    torch.cuda.empty_cache()
    products = Products(*inputs[:2])
    for turn in range(ROUNDS):
        products.time()
        for peer in running:
            if turn < 3 or min(peer.milliseconds) < 70:  # a slow one has said enough
                peer.time()
    check()
    record["products_ms"] = products.finished()
    print(f"{' x '.join(map(str, shape))}, {record['rows']}: time, over the three products' {record['products_ms']} ms")
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
    parser.add_argument("--only", default="", help="these peers alone")
    parser.add_argument("--rows", default=",".join(POINTS), help="these kinds of rows alone")
    parser.add_argument("--output", type=Path, default=Path("h200_python.json"))
    options = parser.parse_args()
    losses, missing = peers()
    if options.only:
        losses = {name: losses[name] for name in options.only.split(",") if name in losses}
    result = started("bench/gpu/peers_torch.py", missing)
    failed = []
    for shape in SHAPES[:1] if options.quick else SHAPES:
        for rows in options.rows.split(","):
            # Of sure rows the filter is the question, and the answers of those without one are known.
            unlike = ("eager", "liger", "liger_f32", "cce_exact") if rows == "sure" else ()
            record = measure(shape, rows, {name: loss for name, loss in losses.items() if name not in unlike})
            result["records"].append(record)
            torch.cuda.empty_cache()
            save(result, options.output)
            failed += [each for each, row in record["peers"].items() if each.startswith("ullage") and "error" in row]
    for name in failed:
        print(f"FAILED: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
