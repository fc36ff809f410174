"""A pytest plugin: which of a peer's tests called our loss, and how they ended; on JSON lines in ULLAGE_PEER_REPORT."""

from __future__ import annotations

import collections
import json
import os

import pytest

from ullage import UllageError

calls = 0  # of our losses, by the adapters
_REFUSALS = ("head_unknown_kind", "head_bad_dtype", "head_shape_mismatch")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    before = calls
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    if isinstance(error, pytest.skip.Exception):
        ending, reason = "skipped", str(error)
    elif isinstance(error, UllageError) and error.name in _REFUSALS:
        ending, reason = "refused", str(error)
    elif error is not None:
        ending, reason = "failed", f"{type(error).__name__}: {error}"[:400]
    else:
        ending, reason = "passed" if calls > before else "not ours", ""
    with open(os.environ["ULLAGE_PEER_REPORT"], "a") as report:
        print(json.dumps({"test": item.nodeid, "ending": ending, "reason": reason}), file=report)


def summary(path: str) -> tuple[str, bool]:
    """ "12 of 14 passed, 2 refused" and the reasons, and whether none failed."""
    with open(path) as report:
        results = [json.loads(line) for line in report]
    counts = collections.Counter(result["ending"] for result in results)
    run = counts["passed"] + counts["failed"] + counts["refused"]
    text = f"{counts['passed']} of {run} passed"
    for ending, says in (("refused", "refused by name"), ("failed", "failed"), ("skipped", "skipped by themselves")):
        if counts[ending]:
            text += f", {counts[ending]} {says}"
    if counts["not ours"]:
        text += f"; {counts['not ours']} more do not call the loss"
    reasons = collections.Counter(r["reason"] for r in results if r["ending"] in ("refused", "failed"))
    for reason, times in reasons.most_common(12):
        text += f"\n  {times} x {' '.join(reason.split())[:200]}"
    return text, counts["failed"] == 0 and run > 0
