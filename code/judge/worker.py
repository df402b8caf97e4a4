"""In the child process: judge a source, and send the verdicts as they come."""

import sys
from pathlib import Path

from judge.answers import answer_source
from judge.judging import Judge, judge
from judge.process import Channel
from judge.source import Source


def answer(request: dict, channel: Channel) -> None:
    """request: {"text", "filename", "names", "case"}; sends names, verdicts, notes."""
    filename, names = request["filename"], request["names"]
    sys.argv = [filename]
    sys.path.insert(0, str(Path(filename).resolve().parent))
    source = Source(request["text"], filename)
    channel.send("names", names or source.exercises())
    judging = Judge(source, names, channel.stage, channel.running, request["case"])
    for verdict in judging.verdicts():
        channel.send("verdict", verdict._asdict())
    for note in judging.notes:
        channel.send("note", note)


def in_this_process(source: Source, names: list[str] | None, case: bool) -> Judge:
    """The judge of a source, for who wants to stop in it with breakpoint()."""
    sys.path.insert(0, str(Path(source.filename).resolve().parent))
    return Judge(source, names, case=case)


judge(answer_source("rms_norm"), ["rms_norm"])  # torch loads more at its first calls
