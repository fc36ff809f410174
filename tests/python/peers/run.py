"""Runs the peers' own tests of their fused cross-entropies against ours: passed of run, and why not.

usage: LIGER=CHECKOUT CCE=CHECKOUT python tests/python/peers/run.py [PYTEST ARGUMENT...]
Needs a GPU, Triton, and ullage on the path; a checkout that is not named is skipped.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
PEERS = {
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


def run(variable: str, arguments: list[str]) -> bool:
    adapter, source, tests = PEERS[variable]
    if variable not in os.environ:
        print(f"SKIPPED: {variable} names no checkout")
        return True
    checkout = pathlib.Path(os.environ[variable]).resolve()
    good = True
    for test in tests:
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as report:
            given = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
            path = [str(HERE), str(checkout / source), *given]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "ULLAGE_PEER_REPORT": report.name,
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            command = [sys.executable, "-m", "pytest", "-q", "-p", "counted", "-p", adapter, "-p", "no:cacheprovider"]
            ended = subprocess.run(
                [*command, test, *arguments], cwd=checkout, env=environment, capture_output=True, text=True
            )
            from counted import summary

            text, passed = summary(report.name)
        print(f"{variable} {test}: {text}", flush=True)
        if ended.returncode > 1:  # pytest itself failed
            print(ended.stdout[-1500:], ended.stderr[-1500:])
        good = good and passed
    return good


def main() -> int:
    return 0 if all([run(variable, sys.argv[1:]) for variable in PEERS]) else 1


if __name__ == "__main__":
    sys.exit(main())
