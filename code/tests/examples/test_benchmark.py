"""The benchmark where its figures are bytes: those are the same on every machine."""

import subprocess
import sys

from notes import build

BENCHMARK = build.RESULTS.parent / "benchmark.py"


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARK), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_cache_bytes_hold_their_limits(tmp_path):
    table = tmp_path / "table.md"
    done = run("--quick", "cache", "--write", str(table))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `cache-")]
    assert len(rows) == 4
    assert all(row.endswith("| yes |") for row in rows)
    assert table.read_text(encoding="utf-8") == done.stdout


def test_unknown_row_is_refused():
    done = run("decode", "prefil-2048")
    assert done.returncode == 2
    assert "prefil-2048" in done.stderr
    assert "Traceback" not in done.stderr
