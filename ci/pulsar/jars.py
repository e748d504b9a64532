"""The jars of Apache Pulsar: fetched by Maven once, kept in the cache, and checked before each use."""

import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

POM = pathlib.Path(__file__).resolve().parent / "pom.xml"
MAVEN_TIME_MAX_S = 900
MANIFEST = "manifest.json"


class Unusable(Exception):
    """What stands in the way, and what to do about it."""


def cache_dir() -> pathlib.Path:
    """Where the jars of this pom.xml are kept: another one gets a folder of its own."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    pulsar = pathlib.Path(os.environ.get("GRADWIRE_PULSAR_CACHE") or pathlib.Path(cache) / "gradwire" / "pulsar")
    return pulsar / hashlib.sha256(POM.read_bytes()).hexdigest()[:12]


def ready(say) -> pathlib.Path:
    """The folder of the jars, complete."""
    folder = cache_dir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Several tests may start at the same time, and the first of them fetches.
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wrong = what_is_wrong(folder)
        if wrong is None:
            return folder
        say(f"{wrong}: fetching Apache Pulsar's jars into {folder} (about 230 MB, once)")
        fetch(folder)
    return folder


def what_is_wrong(folder: pathlib.Path) -> str | None:
    """Why the folder cannot be used, if so: an attempt that was cut short, a file that was removed or cut."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return "there are no jars yet"
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes and not {size}"
    return None


def fetch(folder: pathlib.Path):
    """Fetches into a new folder that takes the old one's place only when it is complete."""
    maven = shutil.which("mvn")
    if maven is None:
        raise Unusable("needs Maven to fetch Apache Pulsar: `ci/setup --test` installs it")
    fresh = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix="fetching-"))
    try:
        command = [maven, "-q", "-B", "-f", POM, "dependency:copy-dependencies"]
        options = [f"-DoutputDirectory={fresh}", "-DincludeScope=runtime"]
        try:
            done = subprocess.run(command + options, capture_output=True, text=True, timeout=MAVEN_TIME_MAX_S)
        except subprocess.TimeoutExpired:
            raise Unusable(f"Maven took longer than {MAVEN_TIME_MAX_S} s to fetch Apache Pulsar") from None
        if done.returncode != 0:
            told = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise Unusable(f"Maven cannot fetch Apache Pulsar; it needs a network or a full local repository:\n{told}")
        sizes = {jar.name: jar.stat().st_size for jar in sorted(fresh.glob("*.jar"))}
        if not any(name.startswith("pulsar-broker-") for name in sizes):
            raise Unusable("Maven ended well, but did not bring pulsar-broker")
        (fresh / MANIFEST).write_text(json.dumps(sizes, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
