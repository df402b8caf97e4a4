"""Code of a reader, run in a fresh Python: apart from its caller, limited, heard on one channel.

    with Child("judge.worker") as child:               # starts, imports the module, and waits
        for kind, content in child.ask(request):       # what answer(request, channel) has sent
            ...
        child.failure                                  # None, or why the answer is not whole
        child.printed                                  # what was printed in there

The module defines `answer(request, channel)`, which calls `channel.send(kind, content)` for each
message and `channel.stage(label)` before each piece of work with limits of its own. Requests and
messages are JSON. A child answers one request; one that is started early is warm.

Prints, of Python or of C, reach `printed` and never the channel. A message counts only behind a key
that the child learns with the request, so nothing that the code writes to any file can pass for
one. No fork and no signals: this works in a notebook, in a thread, behind autograd, on Windows.
"""

import contextlib
import importlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CODE = Path(__file__).resolve().parents[1]
START = (
    "import sys; sys.path[0] = sys.argv.pop(1); from judge.process import serve; serve(sys.argv[1])"
)
PRINTED_BYTES = 20_000  # kept of what is printed; the rest is read and dropped
TICK_SECONDS = 0.05  # between two looks of the clock in the child
GRACE_SECONDS = 5.0  # beyond the clock's limit, before the caller ends the child itself


class Limits(NamedTuple):
    """Seconds for each stage: of the child's own computing, and by the clock."""

    computing: float = 8.0
    clock: float = 40.0


class Failure(NamedTuple):
    """Why a child's answer is not whole.

    kind: "computing" or "clock" (the limit that was passed), "stuck" (by the clock, and nothing
    could interrupt it), "crash" (the process has ended). stage: the label of what ran last.
    """

    kind: str
    stage: str | None
    words: str


class Child:
    """A fresh Python that has imported a module and waits for its one request."""

    def __init__(self, module: str, limits: Limits | None = None):
        """module: its dotted name, importable from code/ or from PYTHONPATH."""
        self.limits = limits or Limits()
        self.failure: Failure | None = None
        self._key = secrets.token_hex(16)
        self._printed = bytearray()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-c", START, str(CODE), module]
        self._process = subprocess.Popen(command, **pipes)
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._listen, self._collect)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def printed(self) -> str:
        """What was printed, cut after 20,000 bytes."""
        return bytes(self._printed).decode(errors="replace")

    def ask(self, request: object) -> Iterator[tuple[str, object]]:
        """Send the one request; yield (kind, content) as they come. Then failure and printed hold.

        ValueError when the child has had its request.
        """
        if self._process.stdin.closed:
            raise ValueError("a child answers one request, and this one has had it")
        with contextlib.suppress(OSError):  # it has ended already: the loop below says how
            line = json.dumps([self._key, request, list(self.limits)]) + "\n"
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        yield from self._messages()
        self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        for reader in self._readers:  # one may wait for a process that the code has started
            reader.join(timeout=0.5)

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _collect(self) -> None:
        while data := os.read(self._process.stderr.fileno(), 65_536):
            self._printed += data[: PRINTED_BYTES - len(self._printed)]

    def _messages(self) -> Iterator[tuple[str, object]]:
        stage, prefix = None, self._key.encode() + b" "
        patience = self.limits.clock + GRACE_SECONDS
        until = time.monotonic() + patience
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                words = f"it does not come to an end within {self.limits.clock:g} s by the clock"
                self.failure = Failure("stuck", stage, f"{words}, and cannot be interrupted")
                return
            if line is None:
                self.failure = Failure("crash", stage, self._how_it_ended())
                return
            if not line.startswith(prefix):
                continue
            kind, content = json.loads(line.removeprefix(prefix))
            until = time.monotonic() + patience
            if kind in ("stage", "running"):
                stage = content
            elif kind == "late":
                self.failure = Failure(content["limit"], stage, content["words"])
                return
            elif kind == "end":
                return
            else:
                yield kind, content

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"it ends the process that runs it ({how})"


class Channel:
    """In the child: where messages go, and the limits of the stage that runs."""

    def __init__(self, file: int, key: str, limits: Limits):
        self._lock = threading.Lock()
        self._limits = limits
        self._computing, self._clock = time.process_time(), time.monotonic()

        def send(kind: str, content: object) -> None:
            data = f"\n{key} {json.dumps([kind, content])}\n".encode()
            with self._lock:
                while data:
                    data = data[os.write(file, data) :]

        self.send = send
        threading.Thread(target=self._watch, daemon=True).start()

    def stage(self, label: str) -> None:
        """Begin a piece of work with limits of its own."""
        self._computing, self._clock = time.process_time(), time.monotonic()
        self.send("stage", label)

    def running(self, label: str) -> None:
        """Say what runs now, within the limits of the stage."""
        self.send("running", label)

    def _watch(
        self, sleep=time.sleep, computed=time.process_time, now=time.monotonic, leave=os._exit
    ) -> None:  # fmt: skip
        """End the process when a stage is late; bound before the code could patch them."""
        limits = self._limits
        while True:
            sleep(TICK_SECONDS)
            spent, waited = computed() - self._computing, now() - self._clock
            if spent > limits.computing:
                words = f"it does not come to an end within {limits.computing:g} s of computing"
                self.send("late", {"limit": "computing", "words": words})
                leave(1)
            if waited > limits.clock:
                words = f"it does not come to an end within {limits.clock:g} s by the clock"
                words += f", of which it computes {spent:.1f} s"
                self.send("late", {"limit": "clock", "words": words})
                leave(1)


def serve(module: str) -> None:
    """In the child: import the module, wait for the request, answer it, and leave."""
    results = os.dup(1)  # not inherited by what the code starts
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    answer = importlib.import_module(module).answer
    line = sys.stdin.buffer.readline()
    if not line:  # the caller has gone, or needs no answer any more
        os._exit(0)
    key, request, limits = json.loads(line)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115, for the life of the process
    channel = Channel(results, key, Limits(*limits))
    send = channel.send
    answer(request, channel)
    sys.stdout.flush()
    send("end", None)
    os._exit(0)
