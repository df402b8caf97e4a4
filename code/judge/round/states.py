"""The states of repair of a file: which one a reading fits, and whether all can be told apart."""

import heapq
import itertools
from collections.abc import Callable, Sequence

from judge.round.measuring import APART, Raised, Reading, differing, raised
from judge.round.paper import Paper, Planted, owner, reached
from judge.round.probes import PROBES, Layout, Probe
from judge.round.subject import Subject, drawn_layout, reset

State = frozenset  # of the numbers of the bugs that are mended


def measured(probe: Probe, subject: Subject, layout: Layout) -> Reading:
    """What the probe reads, or that it raised."""
    reset()
    try:
        return probe.read(subject, layout)
    except Exception as error:
        if error.__class__.__name__ == "NotMeasuredError":
            raise
        return {f"{probe.name} raises": raised(error, subject.filename)}
    finally:
        reset()


class States:
    """All states of repair of a set of bugs, measured when they are asked for."""

    def __init__(
        self,
        paper: Paper,
        planted: Sequence[Planted],
        layout: Layout | None = None,
        before: Callable[[str], None] = lambda name: None,
    ):
        """before is called with a probe's name ahead of each measurement."""
        self.before = before
        self.paper, self.planted = paper, tuple(planted)
        numbers = range(len(self.planted))
        self.all = [
            State(mended)
            for count in range(len(self.planted), -1, -1)
            for mended in itertools.combinations(numbers, count)
        ]
        self.layout = layout or drawn_layout(self.subject(self.all[0]))
        self._outside = {probe.name: self.outside(probe) for probe in PROBES}
        self._subjects: dict[State, Subject] = {}
        self._readings: dict[tuple[State, str], Reading] = {}

    def subject(self, state: State) -> Subject:
        left = [bug for i, bug in enumerate(self.planted) if i not in state]
        name = f"<mended {','.join(map(str, sorted(state)))}>"
        return Subject(self.paper.text(left), self.paper.names, name)

    def outside(self, probe: Probe) -> State:
        """The bugs whose lines a probe does not run."""
        runs = reached(self.paper, self.planted, probe.runs)
        owners = [owner(self.paper, bug) for bug in self.planted]
        return State(number for number, name in enumerate(owners) if name not in runs)

    def seen(self, state: State, probe: Probe) -> State:
        """The state as a probe sees it: what it does not run may as well be mended."""
        return state | self._outside[probe.name]

    def reading(self, state: State, probe: Probe) -> Reading:
        state = self.seen(state, probe)
        key = state, probe.name
        if key not in self._readings:
            if state not in self._subjects:
                self._subjects[state] = self.subject(state)
            self.before(probe.name)
            self._readings[key] = measured(probe, self._subjects[state], self.layout)
        return self._readings[key]

    def nearest(self, theirs: Callable[[Probe], Reading]) -> tuple[State, int]:
        """The state that fewest probes speak against, and how many do. Of equals the most mended.

        A probe of a state is measured only while no other state has fewer probes against it.
        """
        open_states = [(0, order, 0) for order in range(len(self.all))]
        while True:
            off, order, done = heapq.heappop(open_states)
            if done == len(PROBES):
                return self.all[order], off
            probe = PROBES[done]
            state = self.all[order]
            wrong = bool(differing(theirs(probe), self.reading(state, probe)))
            heapq.heappush(open_states, (off + wrong, order, done + 1))

    def told_apart(self) -> bool:
        """Whether each two states differ clearly in some probe, and each bug shows alone."""
        telling: dict[State, Probe] = {}  # by the bugs in which two states differ, what told last
        for one, other in itertools.combinations(self.all, 2):
            last = telling.get(one ^ other)
            for probe in sorted(PROBES, key=lambda probe: probe is not last):
                if self._apart(one, other, probe):
                    telling[one ^ other] = probe
                    break
            else:
                return False
        return True

    def _apart(self, one: State, other: State, probe: Probe) -> bool:
        if self.seen(one, probe) == self.seen(other, probe):
            return False
        gaps = differing(self.reading(one, probe), self.reading(other, probe))
        return APART in gaps.values()


def breaks(reading: Reading) -> Raised | None:
    """The exception that a reading holds, if it is one."""
    return next((found for found in reading.values() if isinstance(found, Raised)), None)
