"""Walks the #includes under src/ and include/ and fails where a floor reaches down or sideways.

A floor includes only floors above it; cpu and cuda never include each other; include/ullage includes only itself; third-party
headers stay out of headers (Highway's -inl.h files apart).
"""

import pathlib
import re
import sys

FLOORS = ["contract", "reference", "cpu", "cuda", "plan", "comm", "model", "session", "runtime", "capi"]
THIRD_PARTY = ("nlohmann/", "CLI/", "fmt/", "pcre2", "hwy/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)


def violations(path, text):
    """The reasons why `text`, the file at `path` (relative to the root), breaks the rules."""
    parts = pathlib.PurePosixPath(path).parts
    floor = parts[1] if parts[0] == "src" else None
    for name in INCLUDE.findall(text):
        target = name.split("/")[0]
        if floor is None:
            if target in FLOORS:
                yield f"{path}: a public header includes {name}"
        elif target in FLOORS:
            if {floor, target} == {"cpu", "cuda"}:
                yield f"{path}: cpu and cuda never include each other, but here is {name}"
            elif FLOORS.index(target) > FLOORS.index(floor):
                yield f"{path}: {floor} lies above {target}, so it may not include {name}"
        third_party = name.startswith(THIRD_PARTY)
        if third_party and path.endswith((".h", ".cuh")) and not (name.startswith("hwy/") and path.endswith("-inl.h")):
            yield f"{path}: {name} belongs in a .cc file"


def main(root):
    # The checker is worth nothing if it cannot fail.
    assert list(violations("src/contract/a.cc", '#include "cpu/b.h"'))
    assert list(violations("src/cuda/a.cu", '#include "cpu/b.h"'))
    assert list(violations("src/cpu/a.h", "#include <hwy/highway.h>"))
    assert list(violations("include/ullage/a.h", '#include "plan/b.h"'))
    assert not list(violations("src/plan/a.cc", '#include "cpu/b.h"\n#include <fmt/format.h>'))
    files = [p for top in ("src", "include") for p in sorted((root / top).rglob("*")) if p.suffix in (".h", ".cc", ".cu", ".cuh")]
    found = [v for p in files for v in violations(p.relative_to(root).as_posix(), p.read_text())]
    for line in found:
        print(line)
    print(f"{len(files)} files, {len(found)} violations")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(__file__).resolve().parent.parent))
