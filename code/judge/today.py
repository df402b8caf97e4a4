"""What to practise today: what failed last time, then what was right a while ago, then new ones."""

import datetime
import re

from judge.catalogue import TASKS
from judge.notes import NOTES, section_of
from judge.progress import Progress

AGAIN_DAYS = (1, 3, 7, 21)  # after the first time right, the second, …
EXERCISES, QUESTIONS = 2, 5


def today(progress: Progress, day: datetime.date) -> str:
    """Two exercises with why, a bug round, and five questions of the notes."""
    lines = [f"{name:18} {why}" for name, why in proposed(progress, day)[:EXERCISES]]
    lines += [f"{'a bug round':18} practice.py debug --seed {round_seed(progress, day)} > round.py"]
    return "\n".join([*lines, "and aloud:", *(f"  {one}" for one in questions(day))])


def proposed(progress: Progress, day: datetime.date) -> list[tuple[str, str]]:
    """Exercises and why: failed last time, due again, then new, those that are asked most first."""
    failed, due, new = [], [], []
    for name, task in TASKS.items():
        record = progress.record(name)
        right = [one for one in map(as_date, record.get("right", [])) if one]
        if record.get("failed"):
            said = record.get("mistake") or "no mistake was named"
            failed.append((str(record["failed"]), name, f"wrong on {record['failed']}: {said}"))
        elif right:
            age = (day - right[-1]).days
            pause = AGAIN_DAYS[min(len(right), len(AGAIN_DAYS)) - 1]
            if age >= pause:
                due.append((-age, name, f"right {age} days ago, and not since"))
        else:
            new.append((not task.often, name, f"new: {task.asks}"))
    failed.sort(reverse=True)  # the latest first
    found = [*failed, *sorted(due, key=lambda one: one[0]), *sorted(new, key=lambda one: one[0])]
    return [(name, why) for _, name, why in found]


def round_seed(progress: Progress, day: datetime.date) -> int:
    """The seed of a round that was begun and not solved, else one of the day."""
    for seed, record in progress.table("rounds").items():
        if isinstance(record, dict) and not record.get("solved") and seed.isdecimal():
            return int(seed)
    return day.toordinal() % 1000


def questions(day: datetime.date) -> list[str]:
    """Five of the notes' questions; the next day the next five."""
    text = section_of(NOTES.read_text(encoding="utf-8"), "9")
    found = re.findall(r"<summary>(?:<[^>]*>)*\s*(Q\d+\..*?)</summary>", text)
    start = day.toordinal() * QUESTIONS
    return [found[(start + i) % len(found)] for i in range(min(QUESTIONS, len(found)))]


def as_date(text: object) -> datetime.date | None:
    """A day of the progress file; None where it is none."""
    try:
        return datetime.date.fromisoformat(str(text))
    except ValueError:
        return None
