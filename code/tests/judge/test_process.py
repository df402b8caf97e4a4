"""The process of the judge: limits, crashes, prints, and messages that nobody else can send."""

import os
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from judge.process import Child, Limits

BOTH = [("value", {"name": "before"}), ("value", {"name": "after"})]


@pytest.fixture
def run(monkeypatch):
    """Runs code in a child: its messages, and the child when it has ended."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def in_child(code: str, limits: Limits | None = None) -> tuple[list, Child]:
        with Child("ask_process", limits) as child:
            return list(child.ask({"code": code})), child

    return in_child


def test_messages_come_in_order_and_prints_apart(run):
    messages, child = run("print('hello'); import os; os.write(2, b'from C')")
    assert messages == BOTH and child.failure is None
    assert "hello" in child.printed and "from C" in child.printed


def test_printing_without_end_is_cut(run):
    messages, child = run("for _ in range(100_000): print('spam' * 10)")
    assert messages == BOTH and 0 < len(child.printed) <= 20_000


FORGED = """
import json, os
line = json.dumps(["value", {"name": "forged"}])
for file in range(64):
    for text in (line, "\\n" + line + "\\n", "0" * 32 + " " + line + "\\n", "unfinished"):
        try:
            os.write(file, text.encode())
        except OSError:
            pass
"""


def test_what_is_written_to_any_file_is_no_message(run):
    messages, child = run(FORGED)
    assert messages == BOTH and child.failure is None


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("while True: pass", "computing", "0.3 s of computing"),
        (
            "while True:\n try:\n  while True: pass\n except BaseException: pass",
            "computing",
            "0.3 s of computing",
        ),
        (
            "import time, threading\nthreading.Thread(target=time.sleep, args=(99,)).start()\n"
            "time.sleep = None\ntime.process_time = None\nthreading.Event().wait()",
            "clock",
            "1 s by the clock, of which it computes 0",
        ),
        ("import os; os._exit(0)", "crash", "status 0"),
        ("import sys; sys.exit(3)", "crash", "status 3"),
        ("raise MemoryError", "crash", "status 1"),
    ],
)
def test_limits_and_crashes_are_told_apart(run, code, kind, words):
    clock = 1.0 if kind == "clock" else 60.0
    messages, child = run(code, Limits(computing=0.3, clock=clock))
    assert messages == BOTH[:1]
    assert child.failure.kind == kind and child.failure.stage == "first"
    assert words in child.failure.words


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_a_crash_of_the_interpreter_names_its_signal(run):
    _, child = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert child.failure.kind == "crash" and "signal 11" in child.failure.words


def test_code_that_lets_no_thread_run_is_ended_from_outside(run, monkeypatch):
    monkeypatch.setattr("judge.process.GRACE_SECONDS", 0.5)
    _, child = run("import re; re.match('(a+)+$', 'a' * 60 + 'b')", Limits(0.2, 0.5))
    assert child.failure.kind == "stuck" and "cannot be interrupted" in child.failure.words


def test_each_stage_has_limits_of_its_own(run):
    code = (
        "import time\ndef work():\n    end = time.process_time() + 0.3\n"
        "    while time.process_time() < end: pass\n"
        "for i in range(4):\n    channel.stage(f'{i}')\n    work()"
    )
    messages, child = run(code, Limits(computing=0.8, clock=30.0))
    assert messages == BOTH and child.failure is None


def test_reading_from_the_keyboard_finds_the_end(run):
    messages, _ = run("import sys; assert sys.stdin.read() == ''; assert not open(0).read()")
    assert messages == BOTH


def test_a_process_that_the_code_starts_holds_nobody_up(run):
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])"
    )
    messages, child = run(code)
    assert messages == BOTH and child.failure is None


def test_a_child_answers_one_request_and_works_in_a_thread(run):
    found = []
    thread = threading.Thread(target=lambda: found.append(run("pass")))
    thread.start()
    thread.join()
    ((messages, child),) = found
    assert messages == BOTH
    with pytest.raises(ValueError, match="one request"):
        next(child.ask({"code": "pass"}))


def test_a_module_that_cannot_be_imported_is_a_crash():
    with Child("no_such_module") as child:
        assert list(child.ask({})) == []
    assert child.failure.kind == "crash" and "no_such_module" in child.printed
