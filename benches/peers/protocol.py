"""How every peer is measured: as `gradwire bench allreduce` measures itself.

For each size a number of iterations; each with a fresh stamp in the input, a cleared output, a barrier, the timed
operation alone, and a check of the result. An iteration takes as long as the slowest rank took.
"""

import argparse
import json
import math
import time

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", required=True, type=lambda text: [size(item) for item in text.split(",")])
    parser.add_argument("--peer", required=True)
    parser.add_argument("--wire", default="fp32", choices=["fp32", "fp16"])
    return parser.parse_args()


def size(text: str) -> int:
    digits = text.rstrip("BKMGi")
    return int(digits) * UNITS[text[len(digits):]]


def iterations(size_bytes: int) -> int:
    return min(max((1 << 30) // size_bytes, 10), 1000)


def measure(size_bytes, prepare, barrier, operation, check, slowest):
    """Times of all ranks' slowest, in milliseconds, and whether every result on this rank was right."""
    times, right = [], True
    measured = iterations(size_bytes)
    warmup = math.ceil(measured / 10)
    for iteration in range(warmup + measured):
        prepare(iteration)
        barrier()
        start = time.perf_counter()
        operation()
        elapsed = time.perf_counter() - start
        right = check(iteration) and right
        if iteration >= warmup:
            times.append(elapsed * 1e3)
    return sorted(slowest(times)), right


def report(peer, ranks, wire, size_bytes, times, verified) -> None:
    """One line of JSON, with the fields of `gradwire bench allreduce --json`. Called by rank 0."""
    print(
        json.dumps({
            "op": "allreduce",
            "peer": peer,
            "ranks": ranks,
            "wire": wire,
            "bytes": size_bytes,
            "iters": len(times),
            "ms_min": times[0],
            "ms_p50": percentile(times, 50),
            "ms_p99": percentile(times, 99),
            "verified": bool(verified),
        }),
        flush=True,
    )


def percentile(ordered, percent):
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]
