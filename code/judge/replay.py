"""A failing case as a few lines of Python for a REPL: sizes, seed, call, and what is expected."""


def replay_function(*_):
    return None


def replay_class(*_):
    return None
