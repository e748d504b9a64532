#!/usr/bin/env python3
"""Measures what lost and joining ranks cost, on one machine, in one run.

    cargo build --release -p gradwire-cli -p gradwire-tests
    benches/recovery/run.py --json recovery.json

- `cost`: the time of an allreduce and its commit, with `GRADWIRE_RECOVERY=redo` and with `fail`, in turns; in place, where
  `redo` writes its results to other memory than the contributions that it keeps, and out of place, where both do.
- `kill`: from the SIGKILL of a rank to the end of the first step without it, on the slowest of the others; beside it the
  time from the same SIGKILL to the end of the first step of a job that is started again as a whole.
- `join`: how long a rank that was killed takes to get the state from the others; one copy of as many bytes through a Unix
  socket, on the machine as it is and while the ranks make their steps; and what the steps of the others take meanwhile.
"""

import argparse
import json
import mmap
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"


class Job:
    """Ranks under `gradwire launch`, and what they print."""

    def __init__(self, ranks, arguments, options=(), **environment):
        command = [TARGET / "gradwire", "launch", "-n", str(ranks), *options, "--", TARGET / "e2e-elastic", *map(str, arguments)]
        environment = {**os.environ, **environment}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.lines = []
        self.changed = threading.Condition()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            rank, _, text = line.rstrip().partition("] ")
            with self.changed:
                self.lines.append((int(rank[1:]), text))
                self.changed.notify_all()
        with self.changed:
            self.lines.append((-1, "end"))
            self.changed.notify_all()

    def wait_for(self, rank, beginning, nth=1):
        with self.changed:
            while True:
                found = [text for of, text in self.lines if of == rank and text.startswith(beginning)]
                if len(found) >= nth:
                    return found[nth - 1]
                if any(of == -1 for of, _ in self.lines):
                    raise SystemExit(f"rank {rank} never said '{beginning}': {self.lines[-20:]}")
                self.changed.wait(60)

    def steps(self, rank):
        """(step, contributors, end in us) of every step that this rank ended."""
        with self.changed:
            lines = [text.split() for of, text in self.lines if of == rank and text.startswith("step ")]
        return [(int(words[1]), words[3], int(words[7])) for words in lines]

    def kill(self, rank):
        pid = int(self.wait_for(rank, "pid ").split()[1])
        at = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        os.kill(pid, signal.SIGKILL)
        return at

    def end(self):
        self.process.wait()


def step_ms(job, rank=0, first=0, last=None):
    ends = [end for step, _, end in job.steps(rank) if step >= first and (last is None or step <= last)]
    return [(b - a) / 1000 for a, b in zip(ends, ends[1:])]


def cost(args):
    found = {}
    for place, options in {"in_place": ["--in-place"], "out_of_place": []}.items():
        times = {"redo": [], "fail": []}
        for _ in range(args.rounds):
            for recovery in times:
                command = [TARGET / "gradwire", "bench", "allreduce", "-n", str(args.ranks), "--bytes", f"{args.mib}MiB"]
                command += [*options, "--commit", "--iters", "40", "--transport", args.transport, "--json"]
                environment = {**os.environ, "GRADWIRE_RECOVERY": recovery}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
                times[recovery].append(json.loads(done.stdout)["ms_p50"])
        middle = {recovery: statistics.median(medians) for recovery, medians in times.items()}
        found[place] = {"step_ms": times, "redo_to_fail": middle["redo"] / middle["fail"]}
    return found


def kill(args):
    recovered, restarted, step = [], [], []
    for round_ in range(args.rounds):
        victim = 1 + round_ % (args.ranks - 1)
        options = ["--min-ranks", "1"]
        job = Job(args.ranks, [40, 0, 0, args.mib], options, GRADWIRE_TRANSPORT=args.transport)
        job.wait_for(0, "step 15 ")
        time.sleep(0.01 * round_)
        at = job.kill(victim)
        job.end()
        others = [rank for rank in range(args.ranks) if rank != victim]
        without = ",".join(map(str, others))
        ends = [next(end for _, by, end in job.steps(rank) if by == without) for rank in others]
        recovered.append((max(ends) - at) / 1000)
        step.append(statistics.median(step_ms(job, first=5, last=14)))
        job = Job(args.ranks, [40, 0, 0, args.mib], GRADWIRE_TRANSPORT=args.transport, GRADWIRE_RECOVERY="fail")
        job.wait_for(0, "step 15 ")
        at = job.kill(victim)
        job.end()
        job = Job(args.ranks, [2, 0, 0, args.mib], GRADWIRE_TRANSPORT=args.transport, GRADWIRE_RECOVERY="fail")
        job.end()
        restarted.append((max(job.steps(rank)[0][2] for rank in range(args.ranks)) - at) / 1000)
    return {"step_ms": step, "recovery_ms": recovered, "whole_restart_ms": restarted}


def copy_s(size):
    """One copy through a Unix socket, in pieces of 512 KiB."""
    a, b = socket.socketpair()
    # Memory that was written to, as a state was; and memory that is not there yet, as in a process that begins.
    data = memoryview(bytearray(b"\7") * size)
    place = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    writer = threading.Thread(target=lambda: [a.sendall(data[at : at + (512 << 10)]) for at in range(0, size, 512 << 10)])
    start, got = time.perf_counter(), 0
    writer.start()
    while got < size:
        got += b.recv_into(place[got : got + (512 << 10)])
    writer.join()
    return time.perf_counter() - start


def join(args):
    size, rounds = args.state_mib << 20, []
    for _ in range(args.rounds):
        copy = copy_s(size)
        options = ["--min-ranks", "1", "--restarts", "1"]
        environment = {"GRADWIRE_TRANSPORT": args.transport, "RUST_LOG": "gradwire=info"}
        job = Job(args.ranks, [args.join_steps, args.pause_ms, args.state_mib << 10, 0], options, **environment)
        job.wait_for(0, "step 20 ")
        beside = copy_s(size)
        killed = job.steps(0)[-1][0]
        job.kill(args.ranks - 1)
        again = job.wait_for(args.ranks - 1, "joined ", nth=2)
        job.end()
        first = int(again.split()[2])
        fetch = job_fetch_ms(job)
        before = statistics.median(step_ms(job, first=5, last=18))
        # From the one that is done again without the lost rank.
        meanwhile = step_ms(job, first=killed + 2, last=first)
        load = os.getloadavg()[0]
        rounds.append({"load": load, "copy_s": copy, "copy_beside_steps_s": beside, "join_ms": int(again.split()[6]), "fetch_ms": fetch, "step_ms_before": before,
                       "step_ms_mean_meanwhile": statistics.mean(meanwhile), "step_ms_max_meanwhile": max(meanwhile)})
    return {"state_mib": args.state_mib, "rounds": rounds}


def job_fetch_ms(job):
    lines = [text for _, text in job.lines if text.startswith("fetched ")]
    return int(lines[-1].split()[6]) / 1000 if lines else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=64, help="size of a step's large tensor")
    parser.add_argument("--state-mib", type=int, default=1024)
    parser.add_argument("--join-steps", type=int, default=400)
    parser.add_argument("--pause-ms", type=int, default=20, help="what a step computes, in `join`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--only", choices=["cost", "kill", "join"], action="append")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    found = {"transport": args.transport, "ranks": args.ranks, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    for name, measure in {"cost": cost, "kill": kill, "join": join}.items():
        if not args.only or name in args.only:
            found[name] = measure(args)
            print(name, json.dumps(found[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


main()
