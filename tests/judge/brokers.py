"""The brokers that are judged: how they are started, ended like in a crash, and asked for what clients cannot ask."""

import ctypes
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STANDALONE = ROOT / "ci" / "pulsar" / "standalone"
COMPACTION_TIME_MAX_S = 60

sys.path.append(str(STANDALONE.parent))
from ports import free_ports  # noqa: E402


class Embedded:
    """`gradwire broker`, with a directory that it keeps its topics in."""

    def __init__(self, gradwire: pathlib.Path):
        self.gradwire = gradwire
        self.data = tempfile.TemporaryDirectory(prefix="gradwire-judge-")
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.url = f"pulsar://{self.address}"
        self.start()

    def start(self):
        command = [self.gradwire, "broker", "--listen", self.address, "--no-auth", "--data-dir", self.data.name]
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, preexec_fn=end_with_parent, **quiet)
        if self.process.stdout.readline().strip() != self.url:
            raise RuntimeError(f"{self.gradwire} broker does not start: status {self.process.wait()}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self):
        self.kill()
        self.data.cleanup()

    def compact(self, topic: str):
        """Nothing to do: it compacts by itself."""


def end_with_parent():
    """In the broker's process: whatever ends this program ends the broker."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


class Apache:
    """Apache Pulsar, by ci/pulsar/standalone. Ends with this process, whatever ends that."""

    def __init__(self):
        command = [STANDALONE, "run", "--", "sh", "-c", "env; echo; exec cat"]
        self.runner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        lines = iter(lambda: self.runner.stdout.readline().rstrip("\n"), "")
        self.variables = dict(line.split("=", 1) for line in lines if line.startswith("PULSAR_"))
        if "PULSAR_URL" not in self.variables:
            raise RuntimeError("Apache Pulsar does not start: see above")
        self.url = self.variables["PULSAR_URL"]
        # By default it forgets what no subscription needs, some time or other: when it starts a new ledger.
        self.ask("POST", "namespaces/public/default/retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})

    def start(self):
        subprocess.run([STANDALONE, "start", self.variables["PULSAR_DATA"]], check=True)

    def kill(self):
        subprocess.run([STANDALONE, "kill", self.variables["PULSAR_DATA"]], check=True)

    def close(self):
        self.runner.stdin.close()
        self.runner.wait()

    def compact(self, topic: str):
        """Asks for compaction and waits until it is done."""
        self.ask("PUT", f"persistent/public/default/{topic}/compaction")
        end = time.monotonic() + COMPACTION_TIME_MAX_S
        while self.ask("GET", f"persistent/public/default/{topic}/compaction")["status"] == "RUNNING":
            if time.monotonic() > end:
                raise RuntimeError(f"compaction takes longer than {COMPACTION_TIME_MAX_S} s")
            time.sleep(0.1)

    def ask(self, method: str, path: str, body=None):
        url = f"{self.variables['PULSAR_ADMIN']}/admin/v2/{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=30) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.code} {error.read(300).decode(errors='replace')}") from None
        return json.loads(text) if text else None
