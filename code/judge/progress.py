"""What is remembered of a reader: the exercises solved, and how far a mistake was hinted at."""

import contextlib
import json
import os
import time
from pathlib import Path

from judge.catalogue import TASKS


def progress_file() -> Path:
    """Where it is kept, if no other place is given."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "transformer_block_practice.json"


class Progress:
    """One small JSON file; a missing or damaged one is empty, and one may be unwritable.

    Other keys in the file are kept as they are.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = {}
        self.content: dict = content if isinstance(content, dict) else {}

    def table(self, key: str) -> dict:
        """What the file holds under a key, empty where that is no table."""
        found = self.content.get(key)
        return found if isinstance(found, dict) else {}

    @property
    def solved(self) -> dict[str, str]:
        """The first day on which each exercise was right."""
        return {name: str(day) for name, day in self.table("solved").items() if name in TASKS}

    def record(self, name: str) -> dict:
        """What is known of an exercise, by key.

        right: the days on which it was; failed: the day when it was wrong and not right since;
        mistake: the last one; blank: the time of its template; seconds: from there to right.
        """
        found = self.table("tries").get(name)
        record = dict(found) if isinstance(found, dict) else {}
        if not isinstance(record.get("right"), list):
            record["right"] = [self.solved[name]] if name in self.solved else []
        return record

    def remember_blank(self, names: list[str]) -> None:
        """Note that a template was taken, from which the seconds to the right answer count."""
        self._remember({name: {"blank": int(time.time())} for name in names})

    def remember_tries(self, mistakes: dict[str, str | None], right: list[str]) -> None:
        """Note what was wrong, with the mistake by name, and what was right, with its seconds."""
        today, now, new = time.strftime("%Y-%m-%d"), time.time(), {}
        for name, mistake in mistakes.items():
            new[name] = {"failed": today, "mistake": mistake}
        for name in right:
            record = self.record(name)
            days = record["right"] + [today] * (today not in record["right"])
            new[name] = {"right": days, "failed": None}
            if "blank" in record and "seconds" not in record:
                new[name]["seconds"] = int(now - record["blank"])
        first = {name: today for name in right if name not in self.solved}
        if first:
            self.content["solved"] = {**self.solved, **first}
        self._remember(new)

    def _remember(self, new: dict[str, dict]) -> None:
        """Add to the records of exercises; names that are none are left alone."""
        new = {name: {**self.record(name), **more} for name, more in new.items() if name in TASKS}
        if new:
            self.content["tries"] = {**self.table("tries"), **new}
            self.write()

    def hints_given(self, name: str, mistake: str) -> int:
        """How often this mistake of an exercise was hinted at, this time included."""
        before = self.table("hints").get(name)
        same = isinstance(before, list) and len(before) == 2 and before[0] == mistake
        count = 1 + (before[1] if same and isinstance(before[1], int) else 0)
        self.content["hints"] = {**self.table("hints"), name: [mistake, count]}
        self.write()
        return count

    def write(self) -> None:
        """Write the file; a run that cannot still judges."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
