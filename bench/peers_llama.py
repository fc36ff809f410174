"""`ullage loss` against llama.cpp on the same text, model and threads: perplexity and time.

Windows of 512 tokens that know nothing of each other; each scores all but its first token. llama.cpp's time is that of
llama_decode alone; ours is that of everything after the text is tokens: forward, logits and losses. The two take turns,
and the medians are compared. llama.cpp: pip install llama-cpp-python==0.3.36, built for this machine.

usage: peers_llama.py MODEL.gguf TEXT [--rounds N] [--threads N] [--output FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

from peers_cpu import ROOT, device, version

WINDOW = 512


class LlamaCpp:
    def __init__(self, model: str, n_threads: int) -> None:
        self.model = llama_cpp.Llama(
            model,
            n_ctx=WINDOW,
            n_batch=WINDOW,
            n_ubatch=WINDOW,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            logits_all=True,
            verbose=False,
        )
        self.batch = llama_cpp.llama_batch_init(WINDOW, 0, 1)

    def tokens(self, text: str) -> list[int]:
        return self.model.tokenize(text.encode(), add_bos=False, special=False)

    def perplexity(self, tokens: list[int]) -> tuple[float, float]:
        """And the seconds in llama_decode."""
        context, n_vocab = self.model.ctx, self.model.n_vocab()
        seconds, loss, n_scored = 0.0, 0.0, 0
        for first in range(0, len(tokens), WINDOW):
            window = tokens[first : first + WINDOW]
            n = self.batch.n_tokens = len(window)
            for i, token in enumerate(window):
                self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, i, 1
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            start = time.perf_counter()
            if llama_cpp.llama_decode(context, self.batch) != 0:
                sys.exit("llama_decode failed")
            pointer = llama_cpp.llama_get_logits(context)  # waits for the work
            seconds += time.perf_counter() - start
            floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
            logits = np.ctypeslib.as_array(floats, (n, n_vocab))[:-1].astype(np.float64)
            top = logits.max(axis=1)
            log_sums = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
            loss += (log_sums - logits[np.arange(n - 1), window[1:]]).sum()
            n_scored += n - 1
        return math.exp(loss / n_scored), seconds


def ullage(program: Path, model: str, text: str, n_threads: int) -> dict:
    run = subprocess.run(
        [program, "loss", model, "--text", text, "--window", str(WINDOW), "--threads", str(n_threads), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(run.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--program", type=Path, default=ROOT / "build-bench/bin/ullage")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/cpu_llama.json")
    options = parser.parse_args()

    peer = LlamaCpp(options.model, options.threads)
    tokens = peer.tokens(Path(options.text).read_text())
    peer.perplexity(tokens[:WINDOW])
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(ullage(options.program, options.model, options.text, options.threads))
        theirs.append(peer.perplexity(tokens))
    our_seconds = statistics.median(run["measured"]["seconds"] for run in ours)
    their_seconds = statistics.median(seconds for _, seconds in theirs)
    result = {
        "device": device(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": version(),
        "llama_cpp_python": llama_cpp.__version__,
        "threads": options.threads,
        "rounds": options.rounds,
        "n_tokens": len(tokens),
        "ullage": {"perplexity": ours[0]["result"]["perplexity"], "seconds": our_seconds},
        "llama_cpp": {"perplexity": theirs[0][0], "seconds": their_seconds},
        "llama_cpp_over_ullage": their_seconds / our_seconds,
    }
    print(json.dumps(result, indent=1))
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    difference = abs(ours[0]["result"]["perplexity"] / theirs[0][0] - 1)
    return 0 if difference <= 0.005 else 1


if __name__ == "__main__":
    sys.exit(main())
