"""A record for bench/results/ from what a Google Benchmark program wrote: machine, date, commit, and every counter.

usage: record.py GOOGLE_BENCHMARK.json RECORD.json
"""

import datetime
import json
import sys
from pathlib import Path

from peers_cpu import device, version

# What Google Benchmark says of a run besides the program's counters.
FIELDS = {
    "family_index", "per_family_instance_index", "run_name", "run_type", "repetitions", "repetition_index", "threads",
    "iterations", "real_time", "cpu_time", "time_unit", "name", "label",
}  # fmt: skip


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    told = json.loads(source.read_text())
    records = []
    for run in told["benchmarks"]:
        name = "/".join(part for part in run["name"].split("/") if part != "manual_time" and "iterations:" not in part)
        counters = {key: float(f"{value:.4g}") for key, value in run.items() if key not in FIELDS}
        records.append({"name": name, "ms": float(f"{run['real_time']:.4g}"), **counters})
    result = {
        "benchmark": f"bench/{Path(told['context']['executable']).name}",
        "device": device(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": version(),
        **{key: told["context"][key] for key in ("openblas", "ullage") if key in told["context"]},
        "load_average": told["context"]["load_avg"],  # as the run began: above 1, others had the machine too
    }
    lines = ",\n".join(f"  {json.dumps(record)}" for record in records)
    head = json.dumps(result, indent=1)[: -len("\n}")]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f'{head},\n "records": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
