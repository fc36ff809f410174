"""What torch.compile must be told. Imported where it traces: torch._dynamo takes as long to import as torch itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from ullage.torch import _head


def text_of(document: Mapping[str, Any]) -> str:
    text: str = _dumped(_specialized(document))
    return text


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _dumped(document: Any) -> str:
    return json.dumps(document)


def _specialized(value: Any) -> Any:
    """A number may be held as a symbol; a plan needs the number."""
    if isinstance(value, Mapping):
        return {name: _specialized(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_specialized(each) for each in value]
    return guard_scalar(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


joined = torch.compiler.disable(_head.joined)  # type: ignore[no-untyped-call]
