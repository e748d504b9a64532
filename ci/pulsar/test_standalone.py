#!/usr/bin/env python3
"""The failure paths of ci/pulsar/standalone: what it says when something is missing, and what it leaves behind."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

STANDALONE = pathlib.Path(__file__).resolve().parent / "standalone"
PATIENCE_S = 240
# Prints where the admin interface is and what it answers to a path, with or without a token.
ASK = """
import os, sys, urllib.error, urllib.request
request = urllib.request.Request(os.environ["PULSAR_ADMIN"] + sys.argv[1], method=sys.argv[2])
if len(sys.argv) > 3: request.add_header("Authorization", "Bearer " + sys.argv[3])
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try: print(direct.open(request, timeout=30).read().decode())
except urllib.error.HTTPError as error: print(error.code)
"""


def run(*arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run([STANDALONE, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, **options)


def lives(pid: int, data: str | os.PathLike) -> bool:
    """Whether the broker of this directory has this process: its number alone may be another's by now."""
    process = pathlib.Path(f"/proc/{pid}")
    try:
        # A process that is about to be gone has no command line any more, though it may not count as a zombie yet.
        command = (process / "cmdline").read_bytes()
        state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return os.fsencode(data) in command and state != "Z"


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-test-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def program(self, name: str, text: str) -> pathlib.Path:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def environment(self, **changes) -> dict[str, str]:
        """Where our own programs hide the real ones, with a cache of its own."""
        kept = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PATH")}
        path = {"PATH": f"{self.folder}/bin", "GRADWIRE_PULSAR_CACHE": f"{self.folder}/cache"}
        self.program("python3", f'exec {sys.executable} "$@"')
        return kept | path | changes

    def assert_refused(self, done, *words):
        self.assertEqual(done.returncode, 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertNotIn("Traceback", done.stderr)


class Missing(WithFolder):
    """Nothing here starts a broker."""

    def test_java(self):
        self.assert_refused(run("run", "--", "true", env=self.environment()), "Java 17", "ci/setup --test")
        self.program("java", """echo 'openjdk version "11.0.1"' >&2""")
        self.assert_refused(run("run", "--", "true", env=self.environment()), "Java 17", "11.0.1")
        home = self.environment(JAVA_HOME="/nonexistent")
        self.assert_refused(run("run", "--", "true", env=home), "Java 17", "/nonexistent")

    def test_maven(self):
        self.assert_refused(run("fetch", env=self.environment()), "Maven", "ci/setup --test")
        self.program("mvn", "echo no such host; exit 1")
        self.assert_refused(run("fetch", env=self.environment()), "no such host", "needs a network")
        self.program("mvn", "exit 0")
        self.assert_refused(run("fetch", env=self.environment()), "did not bring pulsar-broker")
        left = [path.name for path in (self.folder / "cache").iterdir() if path.is_dir()]
        self.assertEqual(left, [], "what was cut short is not taken for the whole")

    def test_a_jar_that_was_cut_is_noticed_and_fetched_again(self):
        mvn = """for a; do case $a in -DoutputDirectory=*) d=${a#*=};; esac; done; printf whole > "$d/pulsar-broker-0.jar"
                 printf whole > "$d/other.jar" """
        self.program("mvn", mvn)
        environment = self.environment()
        self.assertIn("there are no jars yet", run("fetch", env=environment).stderr)
        self.assertEqual(run("fetch", env=environment).stderr, "")
        (jar,) = (self.folder / "cache").glob("*/other.jar")
        jar.write_text("cut")
        self.assertIn("other.jar has 3 bytes and not 5", run("fetch", env=environment).stderr)
        self.assertEqual(jar.read_text(), "whole")
        jar.unlink()
        self.assertIn("other.jar is missing", run("fetch", env=environment).stderr)
        self.assertEqual(jar.read_text(), "whole")

    def test_wrong_arguments(self):
        self.assert_refused(run("run", "--set", "nonsense", "--", "true"), "'nonsense'", "KEY=VALUE")
        self.assertEqual(run("run").returncode, 2)
        self.assert_refused(run("token", self.folder, "someone"), "--auth")
        self.assert_refused(run("kill", self.folder), "no broker runs")
        self.assertEqual(run("stop", self.folder).returncode, 0)


class Lives(unittest.TestCase):
    def test_another_process_with_the_number_is_not_the_broker(self):
        data = "/nonexistent/broker's"
        sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        for arguments, expected in ((sleeper, False), ([*sleeper, f"--data={data}"], True)):
            with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
                self.assertEqual(lives(process.pid, data), expected)
                process.stdin.close()
                # Nobody has waited for it: it has its number still.
                end = time.monotonic() + PATIENCE_S
                while pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes():
                    self.assertLess(time.monotonic(), end)
                self.assertFalse(lives(process.pid, data))


class Started(WithFolder):
    def test_a_broker_that_does_not_come_up_is_told_with_its_last_words(self):
        done = run("run", "--patience", "0.1", "--", "true")
        self.assert_refused(done, "was not up after 0.1 s", "last words")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            self.assert_refused(run("run", "--admin-port", port, "--", "true"), f"port {port}", "is in use")
        wrong = run("run", "--set", "brokerServicePort=nonsense", "--", "true")
        self.assert_refused(wrong, "ended with status", "nonsense")

    def test_the_status_is_the_commands_and_nothing_is_left(self):
        done = run("run", "--", "sh", "-c", 'echo "$PULSAR_PID $PULSAR_DATA"; exit 7')
        self.assertEqual(done.returncode, 7, done.stderr)
        pid, data = done.stdout.split()
        self.assertFalse(lives(int(pid), data))
        self.assertFalse(pathlib.Path(data).exists())
        self.assert_refused(run("run", "--", "/nonexistent/program"), "cannot run /nonexistent/program")

    def test_whatever_ends_it_ends_the_broker(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            data = self.folder / number.name
            command = [STANDALONE, "run", "--data", data, "--"]
            command += ["sh", "-c", "echo $PULSAR_PID; exec cat"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
                pid = int(runner.stdout.readline())
                self.assertTrue(lives(pid, data))
                runner.send_signal(number)
                runner.wait(PATIENCE_S)
                self.assertEqual(runner.returncode, 128 + 15 if number == signal.SIGTERM else -9)
            end = time.monotonic() + PATIENCE_S
            while lives(pid, data) and time.monotonic() < end:
                time.sleep(0.05)
            self.assertFalse(lives(pid, data), number)

    def test_topics_and_ports_survive_a_kill_and_tokens_are_asked_for(self):
        topic = "/admin/v2/persistent/public/default/kept"
        script = f"""
            set -e
            ask() {{ {sys.executable} -c "$ASK" "$@"; }}
            ask {topic} PUT "$PULSAR_TOKEN"
            "$PULSAR_STANDALONE" start "$PULSAR_DATA" 2>&1 && exit 1
            "$PULSAR_STANDALONE" kill "$PULSAR_DATA"
            "$PULSAR_STANDALONE" start "$PULSAR_DATA"
            ask /admin/v2/persistent/public/default GET "$PULSAR_TOKEN"
            ask {topic} GET
            ask {topic} DELETE "$("$PULSAR_STANDALONE" token "$PULSAR_DATA" someone)"
            ask {topic} DELETE "$("$PULSAR_STANDALONE" token "$PULSAR_DATA" admin --valid -5)"
        """
        done = run("run", "--auth", "--", "sh", "-c", script, env=os.environ | {"ASK": ASK})
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        lines = [line for line in done.stdout.splitlines() if line]
        self.assertIn("a broker runs in", lines[0])
        self.assertEqual(json.loads(lines[1]), ["persistent://public/default/kept"])
        self.assertEqual(lines[2:], ["401", "403", "401"])


if __name__ == "__main__":
    unittest.main()
