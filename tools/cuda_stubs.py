"""Stands empty libraries in for the CUDA ones that PyPI's torch is linked against.

PyPI has no CPU build of torch for Linux, and the CUDA libraries its build names take some 3 GB that a test on the
CPU never calls. Each stub defines the symbols torch wants of it; every one of them returns 100, cudaErrorNoDevice,
so that torch finds no GPU. For a throw-away virtual environment only.

usage: cuda_stubs.py SITE_PACKAGES
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

PREFIXES = ("lib" + p for p in ("cu", "nv", "nccl"))
LIBRARY = re.compile(r"lib(cu|nv|nccl)\S+\.so\.\d+")
SYMBOL = re.compile(r"(__)?(cu|nv|nccl|CU)")


def readelf(flag: str, library: pathlib.Path) -> list[str]:
    run = subprocess.run(["readelf", "-W", flag, str(library)], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def wanted(folder: pathlib.Path) -> dict[str, dict[str, set[str]]]:
    """library -> version ("" for none) -> symbols."""
    libraries: dict[str, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    owner: dict[str, str] = {}  # of a version
    undefined, defined = set(), set()
    for path in sorted(folder.glob("*.so*")):
        for line in readelf("-d", path):
            if "NEEDED" in line and (name := LIBRARY.search(line)):
                libraries[name[0]]
        file = ""
        for line in readelf("-V", path):
            if found := re.search(r"Version: 1\s+File: (\S+)", line):
                file = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and file in libraries:
                owner[found[1]] = file
        for line in readelf("--dyn-syms", path):
            fields = line.split()
            if len(fields) < 8 or not SYMBOL.match(fields[7]):
                continue
            (undefined if fields[6] == "UND" else defined).add(fields[7])
    anywhere = next(iter(libraries))  # takes the symbols whose library is not said
    for symbol in undefined - defined:
        name, _, version = symbol.partition("@")
        libraries[owner.get(version, anywhere)][version].add(name)
    return libraries


def build(name: str, versions: dict[str, set[str]], folder: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, script = pathlib.Path(scratch, "stub.c"), pathlib.Path(scratch, "stub.map")
        symbols = sorted(set().union(*versions.values()))
        source.write_text("".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in symbols))
        nodes = "".join(
            f"{version} {{ global: {' '.join(s + ';' for s in sorted(names))} }};\n"
            for version, names in versions.items()
            if version
        )
        script.write_text(nodes)
        flags = [f"-Wl,--version-script={script}"] if nodes else []
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", *flags, "-o", folder / name, source], check=True
        )


if __name__ == "__main__":
    torch_lib = pathlib.Path(sys.argv[1], "torch", "lib")
    for library, versions in wanted(torch_lib).items():
        build(library, versions, torch_lib)
