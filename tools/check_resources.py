#!/usr/bin/env python3
"""Holds the registers and stack frames of the CUDA kernels to tests/resource/kernels.txt.

usage: check_resources.py [--update] [NVCC]

Compiles every .cu of src/cuda for sm_90a with --resource-usage; needs no GPU. A stack frame above the table's means that an
array went to local memory or a register spilled; more registers, fewer warps on a multiprocessor.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/resource/kernels.txt"
FLAGS = ["-std=c++20", "-O2", "-fmad=false", "-gencode", "arch=compute_90a,code=sm_90a", "--resource-usage", "-cubin", "-o", os.devnull]
ENTRY = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)
KIND = re.compile(r"RowKindI(f|13__nv_bfloat16|6__half)LNS1_6FamilyE(\d)ELb(\d)E")
ELEMENTS = {"f": "f32", "13__nv_bfloat16": "bf16", "6__half": "f16"}
FAMILIES = ["labels", "forward", "reverse", "mixed", "jensen_shannon", "entropy", "tempered"]
PRODUCT = re.compile(r"product_kernelINS0_11ProductTileILi(\d+)E.*?ConsumersE\dELi(\d)E.*?MajorE(\d)ELS\d+_(\d)ENS1_\d+([A-Za-z]+\d*)I.*?EELb([01])E")
BARE = re.compile(r"cuda(?:\d+_GLOBAL__N__\w*?_[0-9a-f]{8})?\d+([a-z_]+?)(?:I|E)")


def name_of(mangled):
    """cluster_rows.bf16.forward.softcap for a row kernel, product.192.0.kk.ScaledExponentials.bf16 for a product (columns of a
    tile, staged boxes, the operands' contiguous dimensions, their type; listed: over chosen blocks of k), the bare name for another."""
    element = next((f".{name}" for key, name in ELEMENTS.items() if len(key) > 1 and key in mangled), "")
    product = PRODUCT.search(mangled)
    if product:
        majors = "".join("km"[int(digit)] for digit in product.group(3, 4))
        return f"product.{product[1]}.{product[2]}.{majors}.{product[5]}{element}" + (".listed" if product[6] == "1" else "")
    bare = BARE.search(mangled).group(1)
    kind = KIND.search(mangled)
    if not kind:
        return bare + (element if bare.startswith("linear_") else "")
    return ".".join([bare, ELEMENTS[kind[1]], FAMILIES[int(kind[2])]] + ["softcap"] * int(kind[3]))


def kernels_of(nvcc, source):
    command = [nvcc, *FLAGS, f"-I{ROOT}/src", f"-I{ROOT}/include", str(source)]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {name_of(mangled): (int(registers), int(stack)) for mangled, stack, registers in ENTRY.findall(report)}


def main(arguments):
    update = "--update" in arguments
    given = [a for a in arguments if a != "--update"]
    nvcc = given[0] if given else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    found = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for kernels in pool.map(lambda source: kernels_of(nvcc, source), sorted((ROOT / "src/cuda").rglob("*.cu"))):
            found.update(kernels)
    if update:
        lines = [f"{name:44} {registers:3} registers {stack:4} bytes of stack" for name, (registers, stack) in sorted(found.items())]
        TABLE.write_text("\n".join(lines) + "\n")
    table = {}
    for line in TABLE.read_text().splitlines():
        fields = line.split()
        table[fields[0]] = (int(fields[1]), int(fields[3]))
    faults = [f"{name}: not in the table" for name in sorted(found.keys() - table.keys())]
    faults += [f"{name}: in the table, not compiled" for name in sorted(table.keys() - found.keys())]
    for name in sorted(found.keys() & table.keys()):
        for what, now, before in zip(("registers", "bytes of stack"), found[name], table[name]):
            if now > before:
                faults.append(f"{name}: {now} {what}, {before} in the table")
    for fault in faults:
        print(fault)
    print(f"{len(found)} kernels, {len(faults)} faults")
    return 1 if faults or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
