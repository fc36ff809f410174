"""What a filter left out of the gradients, asked of the device while someone wants to know."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from ullage import _library as c
from ullage.head import HeadPlan

_listening: list[list[FilterReport]] = []  # of every thread: autograd runs backwards in its own


@dataclasses.dataclass(frozen=True)
class FilterReport:
    """What one run with a filter_tolerance left out of its gradients, and what follows from it.

    The bounds are of the gradients of the total, before an upstream factor, and before their rounding.
    """

    largest_share: float  # of a row's softmax, the most over the rows: at most filter_tolerance
    largest_gradient: float  # the gradient of the logits that this is, the most over the rows
    total_gradient: float  # and summed over the rows
    kept: float  # share of the tiles that the gradients were made of; 1: nothing was left out

    def d_hidden_bound(self, weight: Tensor) -> float:
        """The most that any row of d_hidden is off by, in the Euclidean norm."""
        return self.largest_gradient * _largest_row(weight)

    def d_weight_bound(self, hidden: Tensor) -> float:
        """The most that d_weight is off by, in the Frobenius norm."""
        return self.total_gradient * _largest_row(hidden)


def _largest_row(matrix: Tensor) -> float:
    rows = matrix.detach().reshape(-1, matrix.shape[-1])
    if not rows.numel():
        return 0.0
    return max(float(rows[begin : begin + 8192].float().norm(dim=1).max()) for begin in range(0, len(rows), 8192))


@contextlib.contextmanager
def filter_reports() -> Iterator[list[FilterReport]]:
    """A list to which every run with a filter_tolerance adds its report, in the order of the runs.

    >>> with filter_reports() as reports:
    ...     linear_cross_entropy(hidden, weight, targets, filter_tolerance=1e-3).backward()
    >>> reports[0].kept, reports[0].d_hidden_bound(weight)

    Each such run then waits for the device; outside, none does. In a CUDA graph's capture it raises.
    """
    reports: list[FilterReport] = []
    _listening.append(reports)
    try:
        yield reports
    finally:
        # By identity: two lists of equal reports are equal.
        _listening[:] = [each for each in _listening if each is not reports]


def observe(plan: HeadPlan, workspace: Tensor, stream: int) -> None:
    """After a run with a filter on the current stream."""
    if not _listening:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("ullage: filter_reports waits for the device, which a CUDA graph cannot capture")
    found = c.FilterReport()
    c.call(
        "ullage_head_plan_filter_report",
        plan._handle.pointer,
        workspace.data_ptr(),
        workspace.nbytes,
        stream or None,
        ctypes.byref(found),
    )
    report = FilterReport(found.largest_share, found.largest_gradient, found.total_gradient, found.kept)
    for reports in _listening:
        reports.append(report)
