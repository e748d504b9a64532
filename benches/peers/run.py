#!/usr/bin/env python3
"""Measures gradwire and its peers in turns, on the same sizes, and prints a table of ratios.

    ci/peers openmpi mpich gloo
    cargo build --release -p gradwire-cli
    benches/peers/run.py --rounds 5 --json peers.jsonl

Every round runs every contender once, so that all see the machine in the same moods; a contender's figure for a size
is its best round's median. Only ratios taken in one run mean anything.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SIZES = "4KiB,64KiB,1MiB,16MiB,64MiB"
DEADLINE_S = 600
TRANSPORTS = ("shm", "tcp")


def peers_dir() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("PEERS_DIR") or pathlib.Path(cache) / "gradwire" / "peers")


class Contender:
    """Something that allreduces over one kind of link with one wire format."""

    def __init__(self, name, transport, wire="fp32"):
        self.name, self.transport, self.wire = name, transport, wire

    @property
    def label(self):
        return f"{self.name} {self.transport}" + ("" if self.wire == "fp32" else f" {self.wire}")

    def run(self, sizes, ranks):
        """The rows of one run."""
        lines = self.start(sizes, ranks)
        rows = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
        if len(rows) != len(sizes.split(",")):
            raise RuntimeError(f"{self.label} printed {len(rows)} results for sizes {sizes}")
        if not all(row["verified"] for row in rows):
            raise RuntimeError(f"{self.label} gave a wrong result: {lines}")
        return [row | {"contender": self.label, "transport": self.transport} for row in rows]


class Gradwire(Contender):
    def __init__(self, program, transport, wire="fp32"):
        super().__init__("gradwire", transport, wire)
        self.program = program

    def start(self, sizes, ranks):
        command = [self.program, "bench", "allreduce", f"--ranks={ranks}", f"--bytes={sizes}"]
        command += [f"--transport={self.transport}", f"--wire={self.wire}", "--json=-"]
        return output(command)


class OpenMpi(Contender):
    def start(self, sizes, ranks):
        major = int(output(["mpirun", "--version"]).split("(Open MPI)")[1].strip().split(".")[0])
        links = {"tcp": "tcp,self", "shm": "self,vader" if major < 5 else "self,sm"}[self.transport]
        environment = {
            f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")
        }
        command = ["mpirun", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", links]
        command += ["--mca", "btl_tcp_if_include", "lo", "-n", str(ranks)]
        python = str(peers_dir() / "openmpi" / "bin" / "python")
        return output([*command, python, *mpi_arguments(self, sizes)], environment)


class Mpich(Contender):
    def start(self, sizes, ranks):
        over_tcp = {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_NOLOCAL": "1", "FI_PROVIDER": "tcp"}
        programs = peers_dir() / "mpich" / "bin"
        command = [str(programs / "mpiexec"), "-n", str(ranks), str(programs / "python")]
        return output([*command, *mpi_arguments(self, sizes)], over_tcp if self.transport == "tcp" else {})


class Gloo(Contender):
    def start(self, sizes, ranks):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = ["/usr/bin/python3", str(HERE / "gloo_allreduce.py")]
        command += [f"--bytes={sizes}", f"--peer={self.name}", f"--wire={self.wire}"]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        common["GLOO_SOCKET_IFNAME"] = "lo"
        processes = [
            subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode != 0 for process in processes):
            raise RuntimeError(f"{self.label} failed")
        return "".join(outputs)


def mpi_arguments(contender, sizes):
    return [str(HERE / "mpi_allreduce.py"), f"--bytes={sizes}", f"--peer={contender.name}"]


def output(command, environment=None):
    done = subprocess.run(
        command, env=os.environ | (environment or {}), stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode} from: {' '.join(map(str, command))}")
    return done.stdout


def contenders(program):
    """gradwire, and whatever of its peers is set up here."""
    found = [Gradwire(program, transport) for transport in TRANSPORTS] if program else []
    if program:
        found.append(Gradwire(program, "tcp", "fp16"))
    if (peers_dir() / "openmpi" / "complete").exists() and shutil.which("mpirun"):
        found += [OpenMpi("Open MPI", transport) for transport in TRANSPORTS]
    if (peers_dir() / "mpich" / "complete").exists():
        found += [Mpich("MPICH", transport) for transport in TRANSPORTS]
    has_torch = subprocess.run(["/usr/bin/python3", "-c", "import torch.distributed"], capture_output=True)
    if has_torch.returncode == 0:
        found += [Gloo("Gloo", "tcp"), Gloo("Gloo", "tcp", "fp16")]
    return found


def best_medians(rows):
    """By contender and size, the best round's median in milliseconds."""
    best = {}
    for row in rows:
        key = (row["contender"], row["bytes"])
        best[key] = min(best.get(key, float("inf")), row["ms_p50"])
    return best


def table(all_contenders, sizes, rows):
    """Milliseconds, and for peers in brackets how many times as long as gradwire over the same kind of link."""
    best = best_medians(rows)
    lines = ["| ms (times gradwire fp32 on the same link) | " + " | ".join(sizes.split(",")) + " |"]
    lines.append("| --- |" + " ---: |" * len(sizes.split(",")))
    sizes_bytes = list(dict.fromkeys(row["bytes"] for row in rows))
    for contender in all_contenders:
        cells = []
        for size_bytes in sizes_bytes:
            ms = best.get((contender.label, size_bytes))
            ours = best.get((f"gradwire {contender.transport}", size_bytes))
            ratio = f" ({ms / ours:.2f})" if ms and ours and contender.label != f"gradwire {contender.transport}" else ""
            cells.append("-" if ms is None else f"{ms:.4g}{ratio}")
        lines.append(f"| {contender.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    parser.add_argument("--gradwire", default=str(target / "release" / "gradwire"), help="the program to measure")
    parser.add_argument("--only", default="", help="run only contenders whose label contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", default=SIZES)
    parser.add_argument("--json", help="keep every row of every round in this file, one JSON object a line")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.ranks < 1:
        parser.error("--rounds and --ranks must be at least 1")

    program = arguments.gradwire if os.access(arguments.gradwire, os.X_OK) else None
    if program is None:
        print(f"{arguments.gradwire} is not there: measuring peers alone", file=sys.stderr)
    chosen = [one for one in contenders(program) if arguments.only in one.label]
    if not chosen:
        parser.error("nothing to measure: build gradwire, and set up peers with ci/peers")
    facts = machine()
    rows, failed = [], []
    for round_number in range(1, arguments.rounds + 1):
        for contender in chosen:
            print(f"round {round_number}/{arguments.rounds}: {contender.label}", file=sys.stderr)
            try:
                rows += [row | {"round": round_number} for row in contender.run(arguments.bytes, arguments.ranks)]
            except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
                print(f"left out: {error}", file=sys.stderr)
                failed.append(contender.label)
    if arguments.json:
        kept = [{"machine": facts}, *rows]
        pathlib.Path(arguments.json).write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    print(f"{facts['cpu']}, {facts['cores']} cores, load {facts['load']:.1f} at the start; {arguments.ranks} ranks,")
    print(f"best of {arguments.rounds} rounds' medians.\n")
    print(table(chosen, arguments.bytes, rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
