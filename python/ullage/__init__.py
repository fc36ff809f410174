"""Ullage: losses at the head of a language model, and resident decode sessions, in a known amount of memory.

>>> import ullage
>>> ullage.Runtime().execute("residentk.contract", "residentk_dispatch_budget", [28])["result"]
171

`ullage.torch` has the losses as PyTorch operations; it alone needs PyTorch.
"""

from ullage._errors import ExecuteError, UllageError
from ullage._library import version
from ullage.head import HeadPlan, HeadResult, plan_head
from ullage.runtime import Runtime
from ullage.session import Probe, SessionPlan, plan_session, probe

__version__ = version()

__all__ = [
    "ExecuteError",
    "HeadPlan",
    "HeadResult",
    "Probe",
    "Runtime",
    "SessionPlan",
    "UllageError",
    "plan_head",
    "plan_session",
    "probe",
    "version",
]
