"""What the judge's tests share."""

import pytest

from judge.class_judge import Reading


@pytest.fixture
def without_names(monkeypatch):
    """To refuse needs no name, and looking for one takes the longest."""
    monkeypatch.setattr("judge.judging.named_function_mistake", lambda *_: None)
    for method in [name for name in vars(Reading) if name.startswith("_name")]:
        monkeypatch.setattr(Reading, method, lambda *_: False)
