#!/usr/bin/env python3
"""Measures what settings of Apache Pulsar do to latency: from publishing a message of 1 kB until it is consumed.

    benches/pulsar/run.py [--rounds 3] [--messages 2000] [--json FILE]

Every round starts each configuration once, so that all see the machine in the same moods; a figure is the median of the
rounds. One message is on its way at a time. One node with one copy of everything: what replication costs, and what the
quorum settings change about it, cannot be seen here. Only differences within one run mean anything.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STANDALONE = ROOT / "ci" / "pulsar" / "standalone"
AT_ONCE, WHEN_IDLE = "managedLedgerNewEntriesCheckDelayInMillis=0", "journalFlushWhenQueueEmpty=true"
# What each configuration of the broker changes about the defaults, and which clients are measured at it.
CONFIGURATIONS = {
    "defaults": ([], ["persistent", "batching 10 ms", "non-persistent"]),
    "deduplication on": (["brokerDeduplicationEnabled=true"], ["persistent"]),
    "new entries seen at once": ([AT_ONCE], ["persistent"]),
    "journal flushed when idle": ([WHEN_IDLE], ["persistent"]),
    "these two": ([AT_ONCE, WHEN_IDLE], ["persistent", "batching 10 ms", "non-persistent"]),
    "these two, journal not synced to disk": ([AT_ONCE, WHEN_IDLE, "journalSyncData=false"], ["persistent"]),
}
WARM_UP = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps({client: measure(client, args.messages) for client in args.measure}))
        return 0
    sys.path.insert(0, str(ROOT / "tests" / "judge"))
    import client

    python, rows = client.environment(), {}
    for _ in range(args.rounds):
        for name, (settings, clients) in CONFIGURATIONS.items():
            options = [option for setting in settings for option in ("--set", setting)]
            command = [STANDALONE, "run", "--optimize", *options, "--", python, __file__]
            command += ["--messages", str(args.messages), "--measure", *clients]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for kind, (receipt, median, p99) in json.loads(done.stdout).items():
                rows.setdefault(f"{name}: {kind}", []).append((receipt, median, p99))
    result = {name: [statistics.median(column) for column in zip(*figures)] for name, figures in rows.items()}
    print(f"{'milliseconds':<54}{'receipt p50':>12}{'consumed p50':>14}{'consumed p99':>14}")
    for name, (receipt, median, p99) in result.items():
        print(f"{name:<54}{receipt:>12.2f}{median:>14.2f}{p99:>14.2f}")
    if args.json:
        args.json.write_text(json.dumps({"rounds": rows, "result": result}, indent=1))
    return 0


def measure(kind: str, count: int) -> tuple[float, float, float]:
    """Median until the receipt, and median and 99th percentile until a message is consumed, in milliseconds."""
    import os

    import pulsar

    quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null")
    sending, receiving = (pulsar.Client(os.environ["PULSAR_URL"], logger=quiet) for _ in range(2))
    topic = "latency-" + kind.replace(" ", "-")
    if kind == "non-persistent":
        topic = f"non-persistent://public/default/{topic}"
    batching = {"batching_enabled": True, "batching_max_publish_delay_ms": 10} if kind.startswith("batching") else {}
    consumer = receiving.subscribe(topic, "s")
    producer = sending.create_producer(topic, **batching)
    receipts, consumed, payload = [], [], bytes(1000)
    for _ in range(WARM_UP + count):
        times = []
        started = time.perf_counter()
        producer.send_async(payload, lambda result, message_id: times.append(time.perf_counter()))
        message = consumer.receive(20_000)
        consumed.append((time.perf_counter() - started) * 1e3)
        consumer.acknowledge(message)
        while not times:
            time.sleep(0.0002)
        receipts.append((times[0] - started) * 1e3)
    sending.close()
    receiving.close()
    consumed, receipts = sorted(consumed[WARM_UP:]), sorted(receipts[WARM_UP:])
    return statistics.median(receipts), statistics.median(consumed), consumed[len(consumed) * 99 // 100]


if __name__ == "__main__":
    sys.exit(main())
