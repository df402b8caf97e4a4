"""How often the bug round counts right: `python3 code/tests/judge/round_survey.py 0 300`.

For each seed, every state of repair is written anew: the bugs that are left stand as they were
planted, all else is drawn again from the pieces, so that mended lines and untouched parts are in
other styles. Then other bugs are put into the mended file; none of them may pass for done.
"""

import collections
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from judge.round.paper import (
    Draw,
    Paper,
    Planted,
    clean_paper,
    kinds,
    nth_set,
    pieces,
    plantable,
)
from judge.round.probes import PROBES
from judge.round.states import States, measured
from judge.round.subject import Subject
from judge.round.worker import chosen_set

KEPT = {  # options of a choice that leave names and shapes of parameters as they are
    "packing": (("apart", "helper"), ("chunk", "permute")),
    "mlp": (("functional", "modules"), ("sequential",)),
    "head": (("tied",), ("untied",), ("matrix",)),
    "places": (("table",), ("parameter",)),
}


def restyled(paper: Paper, left: Sequence[Planted], draw: Draw) -> Paper | None:
    """The clean file in other styles, in which the bugs that are left can stand as they stood."""
    for attempt in range(60):
        choices = {}
        for name, options in pieces()[0].items():
            groups = KEPT.get(name, (tuple(options),))
            group = next(one for one in groups if paper.choices[name] in one)
            keep = attempt > 20 and draw.random() < attempt / 60
            choices[name] = paper.choices[name] if keep else draw.one(group)
        other = paper.in_choices(choices)
        found = [plantable(other, bug.kind) for bug in left]
        if all(one and (one.right, one.wrong) == (b.right, b.wrong) for one, b in zip(found, left)):
            return other
    return None


def stands(paper: Paper, left: Sequence[Planted]) -> list[Planted]:
    return [plantable(paper, bug.kind) for bug in left]


def survey(seed: int, faults: int = 4, extra: int = 6) -> dict:
    """Counts for a seed: states right and wrong, and new bugs that passed for done."""
    paper = clean_paper(seed, faults)
    begun = time.process_time()
    number = chosen_set(paper)
    making = time.process_time() - begun
    planted = nth_set(paper, number)
    states = States(paper, planted)
    draw = Draw(seed + 7)
    found: dict = {
        "seed": seed,
        "set": number,
        "making": making,
        "wrong": [],
        "done": [],
        "states": 0,
    }
    found["trying"] = 0.0
    for state in states.all:
        left = [bug for i, bug in enumerate(planted) if i not in state]
        other = restyled(paper, left, draw) or paper
        found["unchanged"] = found.get("unchanged", 0) + (other is paper)
        begun = time.process_time()
        got, off = judged(states, other.text(stands(other, left)))
        found["trying"] = max(found["trying"], time.process_time() - begun)
        found["states"] += 1
        if len(got) != len(state) or off:
            found["wrong"].append((sorted(state), sorted(got), off, [b.kind.name for b in left]))
    strangers = [kind for kind in kinds() if kind not in [bug.kind for bug in planted]]
    placed = (plantable(paper, kind) for kind in draw.shuffled(strangers))
    for bug in itertools.islice(filter(None, placed), extra):
        got, off = judged(states, paper.text([bug]))
        if not off and len(got) == len(planted):
            found["done"].append(bug.kind.name)
    found["new"] = extra
    return found


def judged(states: States, text: str) -> tuple[frozenset, int]:
    subject = Subject(text, states.paper.names, "theirs.py")
    readings = {probe.name: measured(probe, subject, states.layout) for probe in PROBES}
    return states.nearest(lambda probe: readings[probe.name])


def main(first: int, last: int, faults: int = 4) -> None:
    torch.set_num_threads(1)
    total: collections.Counter = collections.Counter()
    worst = collections.defaultdict(float)
    for seed in range(first, last):
        found = survey(seed, faults)
        total.update({name: found[name] for name in ("states", "new", "unchanged")})
        total["wrong"] += len(found["wrong"])
        total["done"] += len(found["done"])
        total["redrawn"] += found["set"] > 1
        for name in ("making", "trying"):
            worst[name] = max(worst[name], found[name])
            total[name] += found[name]
        for one in found["wrong"]:
            print(f"seed {seed}: {one}", flush=True)
        for one in found["done"]:
            print(f"seed {seed}: {one} passes for done", flush=True)
        if seed % 10 == 9:
            print(seed + 1, dict(total), dict(worst), flush=True)
    print(dict(total), dict(worst))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
