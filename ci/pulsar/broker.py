"""One Apache Pulsar in a directory: its configuration, its process, and how it is started, asked and ended.

The directory holds all that a restart needs: `state.json` (ports, and what was configured), `standalone.conf`, the
data, `pid`, and `broker.log`. Ports are chosen once: the bookie is known to its data by its port.
"""

import base64
import hashlib
import hmac
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import certificates
import jars
from jars import Unusable
from ports import free_ports, in_use

SUPER_USER = "admin"
PORT_TIME_MAX_S = 5
STOP_TIME_MAX_S = 20
LOG_LINES = 20
# Small, and quick to start: one node that holds one copy of everything.
DEFAULTS = {
    "clusterName": "standalone",
    "bindAddress": "127.0.0.1",
    "advertisedAddress": "127.0.0.1",
    "functionsWorkerEnabled": "false",
    "loadBalancerEnabled": "false",
    "defaultNumberOfNamespaceBundles": "4",
    "managedLedgerDefaultEnsembleSize": "1",
    "managedLedgerDefaultWriteQuorum": "1",
    "managedLedgerDefaultAckQuorum": "1",
    "managedLedgerCacheSizeMB": "64",
    "allowLoopback": "true",
    "diskUsageThreshold": "0.99",
    "diskUsageWarnThreshold": "0.98",
    "dbStorage_writeCacheMaxSizeMb": "32",
    "dbStorage_readAheadCacheMaxSizeMb": "16",
    "dbStorage_rocksDB_blockCacheSize": "16777216",
    "httpServerEnabled": "false",
    # As in the configuration that Pulsar ships: room for its largest message and what is around it.
    "nettyMaxFrameSizeBytes": "5253120",
}
# What Pulsar's own start script opens to it.
OPENED = (
    "java.base/jdk.internal.loader java.base/java.lang java.base/java.io java.base/java.util.zip java.base/sun.net "
    "java.base/java.nio java.base/jdk.internal.misc java.base/jdk.internal.platform java.management/sun.management "
    "jdk.management/com.sun.management.internal"
).split()
LOGGING = """<Configuration status="ERROR">
  <Appenders><Console name="C"><PatternLayout pattern="%d %-5level %c{1} - %m%n"/></Console></Appenders>
  <Loggers><Root level="warn"><AppenderRef ref="C"/></Root></Loggers>
</Configuration>
"""


class Broker:
    def __init__(self, data: pathlib.Path, say):
        self.data, self.say, self.process = data.resolve(), say, None

    def configure(self, args):
        """Writes the configuration. What an earlier start in this directory was told holds, unless told otherwise."""
        self.data.mkdir(parents=True, exist_ok=True)
        state = self.state()
        ports = state.setdefault("ports", {})
        state["settings"] = state.get("settings", {}) | dict(map(setting, args.set))
        state["auth"] = args.auth or state.get("auth", False)
        state["tls"] = args.tls or state.get("tls", False)
        chosen = {"broker": args.port, "admin": args.admin_port, "bookie": None, "tls": None}
        for name, free in zip(chosen, free_ports(len(chosen))):
            ports[name] = chosen[name] or ports.get(name) or free
        conf = DEFAULTS | {"brokerServicePort": ports["broker"], "webServicePort": ports["admin"]}
        conf |= self.auth_settings() if state["auth"] else {}
        conf |= certificates.settings(self.data, ports["tls"]) if state["tls"] else {}
        conf |= state["settings"]
        lines = "".join(f"{key}={value}\n" for key, value in conf.items())
        write_private(self.data / "standalone.conf", lines)
        (self.data / "log4j2.xml").write_text(LOGGING)
        (self.data / "state.json").write_text(json.dumps(state, indent=1))

    def start(self, args, preexec):
        """Starts the process and waits until the broker says that it is well."""
        if self.pid():
            raise Unusable(f"a broker runs in {self.data} already: its process is {self.pid()}")
        end = time.monotonic() + PORT_TIME_MAX_S
        for name, port in self.state()["ports"].items():
            # The threads of a broker that was killed a moment ago let go of its sockets one after the other.
            while in_use(port) and time.monotonic() < end:
                time.sleep(0.05)
            if in_use(port):
                raise Unusable(f"port {port}, for its {name} interface, is in use: end what uses it, or choose another")
        java, lib, log = java_17(), jars.ready(self.say), self.data / "broker.log"
        options = ["-Xms256m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseSerialGC"]
        # Without the optimising compiler it is up in half the time.
        options += [] if args.optimize else ["-XX:TieredStopAtLevel=1"]
        for package in OPENED:
            options += ["--add-opens", f"{package}=ALL-UNNAMED"]
        options += ["-Dio.netty.tryReflectionSetAccessible=true", f"-Dlog4j2.configurationFile={self.data}/log4j2.xml"]
        program = ["-cp", f"{lib}/*", "org.apache.pulsar.PulsarStandaloneStarter"]
        program += ["--config", f"{self.data}/standalone.conf", "--no-stream-storage", "--no-functions-worker"]
        program += ["--metadata-dir", f"{self.data}/metadata", "--bookkeeper-dir", f"{self.data}/bookkeeper"]
        program += ["--bookkeeper-port", str(self.state()["ports"]["bookie"])]
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [java, *options, *program], stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=preexec
            )
        (self.data / "pid").write_text(str(self.process.pid))
        try:
            self.await_health(args.patience)
        except BaseException:
            self.kill()
            raise

    def await_health(self, patience_s: float):
        request = urllib.request.Request(f"{self.admin_url()}/admin/v2/brokers/health")
        if self.state()["auth"]:
            request.add_header("Authorization", f"Bearer {self.token(SUPER_USER, None)}")
        # A proxy that the environment names is for other hosts.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        end = time.monotonic() + patience_s
        answer = "no answer"
        while time.monotonic() < end:
            status = self.process.poll()
            if status is not None:
                raise Unusable(f"Apache Pulsar ended with status {status} while it started; its last words:\n{self.log()}")
            try:
                with direct.open(request, timeout=5) as response:
                    answer = response.read(200).decode(errors="replace")
                    if answer == "ok":
                        return
            except (OSError, ValueError) as error:
                answer = str(error)
            time.sleep(0.1)
        raise Unusable(f"Apache Pulsar was not up after {patience_s:g} s ({answer}); its last words:\n{self.log()}")

    def environment(self) -> dict[str, str]:
        """What a command beside it is told."""
        state = self.state()
        here = pathlib.Path(__file__).resolve().parent / "standalone"
        told = {"PULSAR_URL": f"pulsar://127.0.0.1:{state['ports']['broker']}", "PULSAR_ADMIN": self.admin_url()}
        told |= {"PULSAR_PID": str(self.pid()), "PULSAR_DATA": str(self.data), "PULSAR_STANDALONE": str(here)}
        if state["auth"]:
            told["PULSAR_TOKEN"] = self.token(SUPER_USER, None)
        if state["tls"]:
            told["PULSAR_TLS_URL"] = f"pulsar+ssl://localhost:{state['ports']['tls']}"
            told["PULSAR_CA"] = str(certificates.authority(self.data))
        return told

    def stop(self):
        """Asks it to end, and ends it if it does not."""
        pid = self.pid()
        if pid and self.signal(pid, signal.SIGTERM) and not self.gone(pid, STOP_TIME_MAX_S):
            self.say(f"Apache Pulsar did not end within {STOP_TIME_MAX_S} s of SIGTERM, and is killed")
            self.kill()
        (self.data / "pid").unlink(missing_ok=True)

    def kill(self) -> bool:
        """Ends it at once; whether there was one."""
        pid = self.pid()
        if pid and self.signal(pid, signal.SIGKILL) and not self.gone(pid, STOP_TIME_MAX_S):
            raise Unusable(f"process {pid} does not end")
        (self.data / "pid").unlink(missing_ok=True)
        return bool(pid)

    def token(self, role: str, valid_s: int | None) -> str:
        """A token for a role: a JSON web token, signed with HMAC-SHA256."""
        key = self.data / "token.key"
        if not key.exists():
            raise Unusable(f"the broker in {self.data} asks for no tokens: start it with --auth")
        claims = {"sub": role} | ({} if valid_s is None else {"exp": int(time.time()) + valid_s})
        text = ".".join(base64url(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
        return f"{text}.{base64url(hmac.digest(key.read_bytes(), text.encode(), hashlib.sha256))}"

    def auth_settings(self) -> dict[str, str]:
        key = self.data / "token.key"
        if not key.exists():
            write_private(key, secrets.token_bytes(32))
        return {
            "authenticationEnabled": "true",
            "authorizationEnabled": "true",
            "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
            "tokenSecretKey": f"file://{key}",
            "superUserRoles": SUPER_USER,
            "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
            "brokerClientAuthenticationParameters": f"token:{self.token(SUPER_USER, None)}",
        }

    def state(self) -> dict:
        try:
            return json.loads((self.data / "state.json").read_text())
        except FileNotFoundError:
            return {}

    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.state()['ports']['admin']}"

    def pid(self) -> int | None:
        """The process, if it lives: the number alone may be another's by now."""
        try:
            pid = int((self.data / "pid").read_text())
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if str(self.data).encode() in command else None

    def signal(self, pid: int, number: int) -> bool:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def gone(self, pid: int, patience_s: float) -> bool:
        """Waits until the process has ended, be it our child or not."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            if self.process is not None and self.process.pid == pid:
                self.process.poll()
            if self.pid() != pid:
                return True
            time.sleep(0.02)
        return False

    def log(self) -> str:
        lines = (self.data / "broker.log").read_text(errors="replace").splitlines()
        return "\n".join(line[:500] for line in lines[-LOG_LINES:]) or "(nothing)"


def setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or "\n" in text:
        raise Unusable(f"--set {text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def java_17() -> str:
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        raise Unusable(f"needs Java 17 or later ({java or 'there is no java'}): `ci/setup --test` installs it")
    told = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    version = re.search(r'version "(\d+)', told)
    if version is None or int(version[1]) < 17:
        raise Unusable(f"needs Java 17 or later, and {java} says {told.strip() or 'nothing'!r}")
    return java


def write_private(path: pathlib.Path, content: str | bytes):
    path.touch(mode=0o600)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
