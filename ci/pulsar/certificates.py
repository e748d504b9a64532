"""Certificates for a broker that listens for TLS: an authority of its own, and a server of the name `localhost`."""

import pathlib
import shutil
import subprocess

from jars import Unusable

NAMES = "subjectAltName=DNS:localhost"
DAYS = "365"


def authority(data: pathlib.Path) -> pathlib.Path:
    """The certificate that clients are to trust."""
    return data / "tls" / "ca.pem"


def settings(data: pathlib.Path, port: int) -> dict[str, str]:
    """What the broker is to be told, with the certificates made if they are not there."""
    folder = data / "tls"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        make(folder)
        (folder / "complete").touch()
    return {
        "brokerServicePortTls": port,
        "tlsCertificateFilePath": folder / "server.pem",
        "tlsKeyFilePath": folder / "server.key",
        "tlsTrustCertsFilePath": folder / "ca.pem",
        "tlsProtocols": "TLSv1.3,TLSv1.2",
    }


def make(folder: pathlib.Path):
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-subj", "/CN=gradwire test authority", "-addext", "basicConstraints=critical,CA:TRUE"]
    openssl(folder, "req", "-x509", *key, "-days", DAYS, *name, "-keyout", "ca.key", "-out", "ca.pem")
    openssl(folder, "req", *key, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    (folder / "server.ext").write_text(f"{NAMES}\nbasicConstraints=CA:FALSE\n")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS, "-extfile", "server.ext"]
    openssl(folder, "x509", "-req", "-in", "server.csr", *signed, "-out", "server.pem")


def openssl(folder: pathlib.Path, *arguments: str):
    try:
        done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise Unusable("needs openssl for --tls: `ci/setup --test` installs it") from None
    if done.returncode != 0:
        raise Unusable(f"openssl {arguments[0]} failed:\n{done.stderr}")
