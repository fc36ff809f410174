#!/usr/bin/env python3
"""Runs every GPU test: the C++ ones in build-gpu/bin, the Python package's in build-gpu/wheel, and the peers' own
tests with our losses in the place of theirs, where LIGER and CCE name checkouts.

One pool of processes over all of it: most of a test's time is the host's. A part that cannot run here says why; one
that fails loses no other. Fails where a test failed, a process died, or nothing could be run.

usage: gpu_test.py [--sanitize] [--only WORD] [--json FILE]
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import glob
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build-gpu"
PLUGINS = ROOT / "tests" / "python" / "peers"
PEERS = {  # environment variable -> adapter, what is imported, tests
    "LIGER": (
        "liger_adapter",
        "src",
        ["test/transformers/test_fused_linear_cross_entropy.py", "test/transformers/test_cross_entropy.py"],
    ),
    "CCE": (
        "cce_adapter",
        ".",
        ["tests/test_cce_loss_forward.py", "tests/test_cce_loss_backward.py", "tests/test_cce_lse.py"],
    ),
}
SANITIZED = "*EqualTeacher*:*IgnoredRows*:*InAGraph*:*HeldInRegisters*"
LIMIT_S = 240  # of one process


@dataclasses.dataclass
class Part:
    """Tests that are one line of the report, cut into shards: processes that each run every n-th of them."""

    name: str
    command: list[str]  # "{report}": where the process writes its results
    read: Callable[[pathlib.Path], list[tuple[str, str, str]]]  # -> test, ending, reason
    shards: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    folder: pathlib.Path = ROOT
    results: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # the longest shard's
    worst: float | None = None  # of the bounds that the tests hold errors to, the largest part that one used

    def run(self, shard: int, folder: pathlib.Path) -> tuple[list[tuple[str, str, str]], float, list[float]]:
        """Results, seconds, and the parts of their bounds that errors used."""
        report = folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', self.name)}.{shard}"
        report.touch()
        environment = {
            **os.environ,
            **self.environment,
            "GTEST_TOTAL_SHARDS": str(self.shards),
            "GTEST_SHARD_INDEX": str(shard),
            "ULLAGE_PEER_REPORT": str(report),
        }
        command = [word.format(report=report) for word in self.command]
        begin = time.monotonic()
        try:
            ended = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, errors="replace",
                timeout=LIMIT_S,
            )  # fmt: skip
            said, code = ended.stdout + ended.stderr, ended.returncode
        except subprocess.TimeoutExpired as late:
            # What it had said is bytes, whatever was asked for.
            said, code = f"{(late.stdout or b'').decode(errors='replace')} {late}", -1
        except OSError as error:
            said, code = str(error), -1
        seconds = time.monotonic() - begin
        try:
            found = self.read(report)
        except (ValueError, ElementTree.ParseError):
            found = []
        if code not in (0, 5) and not any(ending in ("failed", "refused") for _, ending, _ in found):  # 5: none
            last = " ".join(said.split())[-600:]
            found.append((f"shard {shard}", "failed", f"the process ended with {code}: {last}"))
        # What draws its inputs can be run again.
        seed = re.search(r"ULLAGE_TEST_SEED=\d+", said)
        if seed:
            found = [(t, e, f"{seed[0]} {r}" if e == "failed" else r) for t, e, r in found]
        return found, seconds, [float(each) for each in re.findall(r"used ([0-9.]+) of its bound", said)]

    def take(self, found: list[tuple[str, str, str]], seconds: float, fractions: list[float]) -> None:
        self.results += found
        self.seconds = max(self.seconds, seconds)
        self.worst = max([*fractions, *([] if self.worst is None else [self.worst])], default=None)

    def count(self, ending: str) -> int:
        return sum(each == ending for _, each, _ in self.results)

    def record(self) -> dict:
        endings = collections.Counter(ending for _, ending, _ in self.results)
        kept = [{"test": t, "ending": e, "reason": r} for t, e, r in self.results if e not in ("passed", "not ours")]
        return {
            "part": self.name,
            **endings,
            "seconds": round(self.seconds, 1),
            **({} if self.worst is None else {"worst_error_of_its_bound": self.worst}),
            **({"not_passed": kept} if kept else {}),
        }

    def line(self) -> str:
        run = sum(map(self.count, ("passed", "failed", "refused", "expected to fail")))
        text = f"{self.name}: {self.count('passed')} of {run} passed"
        says = {
            "failed": "failed",
            "refused": "refused by name",
            "expected to fail": "expected to fail and did",
            "skipped": "skipped by themselves",
        }
        for ending, what in says.items():
            if self.count(ending):
                text += f", {self.count(ending)} {what}"
        if self.count("not ours"):
            text += f"; {self.count('not ours')} more do not call the loss"
        text += f" ({self.seconds:.0f} s"
        text += ")" if self.worst is None else f"; the largest error used {self.worst:.3f} of its bound)"
        for ending in says:
            reasons = collections.Counter(" ".join(r.split())[:240] for _, e, r in self.results if e == ending)
            for reason, times in reasons.most_common(8):
                text += f"\n  {ending}, {times} x {reason}" if reason else ""
        return text


def read_gtest(report: pathlib.Path) -> list[tuple[str, str, str]]:
    found = []
    for suite in json.loads(report.read_text() or "{}").get("testsuites", []):
        for test in suite["testsuite"]:
            name = f"{suite['name']}.{test['name']}"
            if test.get("failures"):
                said = [each["failure"] for each in test["failures"]]
                found.append((name, "failed", f"{name}, {len(said)} x: " + "\n".join(each[:500] for each in said[:8])))
            elif test["result"] == "SKIPPED":
                found.append((name, "skipped", (test.get("skipped") or [{}])[0].get("message", "")))
            elif test["status"] == "RUN":
                found.append((name, "passed", ""))
    return found


def read_junit(report: pathlib.Path) -> list[tuple[str, str, str]]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        ending, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                ending, reason = "failed", f"{case.get('name')}: {child.get('message')}"
            elif child.tag == "skipped":
                ending, reason = "skipped", child.get("message") or ""
        found.append((name, ending, reason))
    return found


def read_lines(report: pathlib.Path) -> list[tuple[str, str, str]]:
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    return [(line["test"], line["ending"], line["reason"]) for line in lines]


def cpp_parts(shards: int, skipped: dict[str, str]) -> list[Part]:
    built = subprocess.run([str(ROOT / "tools" / "gpu_build.sh")], capture_output=True, text=True)
    print(built.stdout + built.stderr, end="", flush=True)
    parts = [
        Part(pathlib.Path(test).name, [test, "--gtest_output=json:{report}"], read_gtest, shards)
        for test in sorted(glob.glob(str(BUILD / "bin" / "cuda_*_test")))
    ]
    if not parts:
        said = (built.stdout + built.stderr).strip().splitlines()
        skipped["the C++ tests"] = said[-1] if said else "none was built"
    return parts


def python_parts(shards: int, skipped: dict[str, str]) -> list[Part]:
    wheel = subprocess.run([str(ROOT / "tools" / "gpu_wheel.sh")], capture_output=True, text=True)
    if wheel.returncode:
        skipped["the Python tests"] = (wheel.stdout + wheel.stderr).strip()
        return []
    path = [str(PLUGINS), str(BUILD / "wheel")]
    base = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "2"}
    probe = "import pytest, torch, ullage; print(ullage.probe().cuda['kernels_compiled'] and torch.cuda.is_available())"
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    environment = {**base, "PYTHONPATH": os.pathsep.join([*path, *map(os.path.abspath, given)])}
    asked = subprocess.run(
        [sys.executable, "-c", probe], env={**os.environ, **environment}, capture_output=True, text=True
    )
    if asked.stdout.strip() != "True":
        why = (asked.stderr.strip().splitlines() or ["no GPU for PyTorch, or build-gpu/wheel has no CUDA kernels"])[-1]
        skipped["the Python tests"] = why
        return []
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sharded"]
    parts = [
        Part(
            "tests/python/test_cuda.py",
            [*pytest, "--junit-xml", "{report}", "tests/python/test_cuda.py"],
            read_junit,
            shards,
            environment,
        )
    ]
    for variable, (adapter, source, tests) in PEERS.items():
        if variable not in os.environ:
            skipped[f"the tests of {variable}"] = f"{variable} names no checkout"
            continue
        checkout = pathlib.Path(os.environ[variable]).resolve()
        theirs = os.pathsep.join([path[0], str(checkout / source), path[1], *map(os.path.abspath, given)])
        for test in tests:
            if not (checkout / test).exists():
                skipped[f"{variable} {test}"] = f"{checkout} does not have it"
                continue
            command = [*pytest, "-p", "counted", "-p", adapter, test]
            name = f"{variable} {pathlib.Path(test).name}"
            parts.append(Part(name, command, read_lines, shards, {**environment, "PYTHONPATH": theirs}, checkout))
    return parts


def sanitizer_parts(skipped: dict[str, str]) -> list[Part]:
    test = BUILD / "bin" / "cuda_head_bits_test"
    if not test.exists():
        skipped["compute-sanitizer"] = "cuda_head_bits_test was not built"
        return []
    return [
        Part(
            f"compute-sanitizer {tool}",
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", str(test), f"--gtest_filter={SANITIZED}",
             "--gtest_output=json:{report}"],
            read_gtest,
        )
        for tool in ("memcheck", "racecheck")
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true", help="the bit tests again under compute-sanitizer")
    parser.add_argument("--only", default="", metavar="WORD", help="the parts that have it in their name")
    parser.add_argument("--json", type=pathlib.Path, default=BUILD / "results" / "gpu_test.json", metavar="FILE")
    options = parser.parse_args()
    begin = time.monotonic()
    device = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
    ) if any(os.access(os.path.join(p, "nvidia-smi"), os.X_OK) for p in os.get_exec_path()) else None  # fmt: skip
    if device is None or device.returncode:
        print("FAILED: nothing was run: no GPU (nvidia-smi names none)")
        return 1
    jobs = os.cpu_count() or 1
    shards, skipped = min(jobs, 12), {}
    parts = cpp_parts(shards, skipped) + python_parts(shards, skipped)
    if options.sanitize:
        parts += sanitizer_parts(skipped)
    parts = [part for part in parts if options.only in part.name]
    prepared = time.monotonic() - begin
    # The longest processes first, so that none is left over at the end: those that compile with PyTorch.
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        ordered = sorted(parts, key=lambda part: part.read is not read_junit)
        waiting = {pool.submit(p.run, shard, pathlib.Path(folder)): p for p in ordered for shard in range(p.shards)}
        left = collections.Counter(p.name for p in waiting.values())
        for done in concurrent.futures.as_completed(waiting):
            part = waiting[done]
            part.take(*done.result())
            left[part.name] -= 1
            if not left[part.name]:
                print(part.line(), flush=True)
    for name, why in skipped.items():
        print(f"SKIPPED: {name}: {why}")
    passed, failed, refused = (sum(part.count(ending) for part in parts) for ending in ("passed", "failed", "refused"))
    seconds = time.monotonic() - begin
    record = {
        "device": device.stdout.strip().splitlines()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "passed": passed,
        "failed": failed,
        "refused": refused,
        "seconds": round(seconds, 1),
        "seconds_of_building": round(prepared, 1),
        "parts": [part.record() for part in parts],
        "skipped_parts": skipped,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{passed} passed, {failed} failed, {refused} refused by name, {seconds:.0f} s; {options.json}")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
