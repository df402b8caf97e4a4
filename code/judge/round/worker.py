"""In the child process: make the set of a seed, measure a file, and find what is left in it."""

import sys
from pathlib import Path

import torch

from judge.process import Channel
from judge.round import orders
from judge.round.measuring import NotMeasuredError, Raised, Reading, differing, raised
from judge.round.paper import Paper, clean_paper, drawn_sets, nth_set
from judge.round.probes import PROBES, Layout
from judge.round.states import State, States, breaks, measured
from judge.round.subject import Subject, reset
from judge.round.symptoms import rank, symptom


def answer(request: dict, channel: Channel) -> None:
    """request["do"] is "make" or "try"; a message holds the result."""
    torch.set_num_threads(1)
    without_compiler()
    if request["do"] == "make":
        channel.stage("the set")
        channel.send("set", chosen_set(clean_paper(request["seed"], request["faults"])))
    else:
        channel.send("found", tried(request, channel))


def without_compiler() -> None:
    """Spare the second in which torch imports its compiler, for the first step of an optimiser.

    Where torch keeps this otherwise, nothing is found and nothing is spared.
    """
    for method in vars(torch.optim.Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain
    for optimizer in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        plain = getattr(vars(optimizer).get("step"), "__wrapped__", None)
        if plain is not None:
            optimizer.step = torch.no_grad()(plain)  # as the wrapper does, but for the compiler


def chosen_set(paper: Paper) -> int:
    """The number, from 1, of the first drawn set all of whose states can be told apart."""
    layout = None
    for number, planted in enumerate(drawn_sets(paper), 1):
        states = States(paper, planted, layout)
        layout = states.layout
        if states.told_apart():
            return number
    raise AssertionError("sets are drawn without end")


def tried(request: dict, channel: Channel) -> dict:
    """What is left in a file, in words and numbers; `why` alone where it cannot be measured."""
    paper = clean_paper(request["seed"], request["faults"])
    planted = nth_set(paper, request["set"])
    states = States(paper, planted, before=lambda _: channel.stage("the judge's own files"))
    sys.argv = [request["filename"]]
    sys.path.insert(0, str(Path(request["filename"]).resolve().parent))
    channel.stage("the file")
    try:
        subject = Subject(request["text"], paper.names, request["filename"])
        theirs = readings(subject, states.layout, channel)
    except SyntaxError as error:
        return {"why": f"line {error.lineno}: {error.msg}"}
    except NotMeasuredError as error:
        return {"why": str(error)}
    except BaseException as error:
        return {"why": in_words(raised(error, request["filename"]))}
    state, off = states.nearest(lambda probe: theirs[probe.name])
    new = new_finding(states, state, theirs) if off else None
    if new and isinstance(theirs[new[0]].get(new[1]), Raised):
        return {"why": in_words(theirs[new[0]][new[1]])}
    found: dict = {"left": len(planted) - len(state), "of": len(planted), "new": bool(off)}
    if new:
        wanted = states.reading(state, probe_named(new[0]))
        found["new symptom"] = symptom(new[1], theirs[new[0]], wanted)
    if found["left"]:
        found |= next_bug(states, state, theirs)
    elif not off:
        channel.stage("the second and third order")
        found["orders"] = orders.judged(subject, states.layout)
    return found


def readings(subject: Subject, layout: Layout, channel: Channel) -> dict[str, Reading]:
    """All readings of their file, and what they set globally put back."""
    found = {}
    subject.model(layout)  # a missing parameter is said before anything is compared
    for probe in PROBES:
        channel.running(probe.about)
        found[probe.name] = measured(probe, subject, layout)
    reset()
    return found


def in_words(error: Raised) -> str:
    at = f" (line {error.line})" if error.line else ""
    return f"it raises {error.kind}: {error.words}{at}"


def probe_named(name: str):
    return next(probe for probe in PROBES if probe.name == name)


def new_finding(states: States, state: State, theirs: dict[str, Reading]) -> tuple[str, str]:
    """The probe and the finding that speak most clearly against the nearest state."""
    found = [
        (rank(finding, theirs[probe.name]), probe.name, finding)
        for probe in PROBES
        for finding in differing(theirs[probe.name], states.reading(state, probe))
    ]
    return min(found)[1:]


def next_bug(states: States, state: State, theirs: dict[str, Reading]) -> dict:
    """The bug left whose symptom tells most, and that symptom with numbers from their file."""
    shown = []
    clean = states.all[0]
    for number in range(len(states.planted)):
        if number not in state:
            for probe in PROBES:
                with_it, without = (states.reading(one, probe) for one in (state, state | {number}))
                gaps = differing(with_it, without)
                shown += [(rank(gap, theirs[probe.name]), number, probe.name, gap) for gap in gaps]
                if breaks(with_it) and breaks(without):
                    break
    shown = [one for one in shown if one[3] in theirs[one[2]]] or shown
    _, number, probe, finding = min(shown)
    wanted = states.reading(clean, probe_named(probe))
    return {"bug": number, "symptom": symptom(finding, theirs[probe], wanted)}
